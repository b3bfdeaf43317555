"""What processes of a training share: from flags to the coordinator's arguments."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import strategy_programs

from optax_dist import coordinator
from optax_dist.cli import errors
from optax_dist.cli.train import digits, model
from optax_dist.cli.train.processes import plan
from optax_dist.coordinator import strategies

STRATEGIES = (
  "sync-replicas",
  "elastic-average",
  "local-sgd",
  "diloco",
  "decoupled-diloco",
)


def _config(strategy, *flags, replicas=3, **given):
  """Two epochs of 14 steps, as the command would plan them."""
  args = strategy_programs.parse(
    strategy,
    *flags,
    **{
      "replicas": replicas,
      "optimizer": "adam",
      "learning_rate": 0.5,
      "epochs": 2,
      "batch_size": 96,
      "seed": 5,
    }
    | given,
  )
  return plan.make(args, 1437)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_arguments_come_out_of_the_journal(strategy):
  config = _config(strategy)
  told = json.loads(json.dumps(config))
  assert told == config
  assert told["strategy"] == strategy
  params = {"a": jnp.ones(3), "b": jnp.zeros(2)}
  here, there = (plan.first_state(c, params) for c in (config, told))
  jax.tree.map(np.testing.assert_array_equal, here, there)


@pytest.mark.parametrize(
  ("strategy", "flags", "commits"),
  [
    ("sync-replicas", (), 28),
    ("sync-replicas", ("--replicas-to-aggregate", "7"), 28),
    # Each of three replicas exchanges every tenth step.
    ("elastic-average", (), 8),
    ("elastic-average", ("--communication-period", "3"), 28),
    ("local-sgd", (), 2),
    ("diloco", (), 1),
    ("diloco", ("--communication-period", "100"), 1),
    ("decoupled-diloco", (), 2),
    # Each of seven fragments is given once in a period.
    (
      "decoupled-diloco",
      ("--communication-period", "14", "--fragments", "7"),
      14,
    ),
  ],
)
def test_commits_are_as_many_as_local_steps_allow(strategy, flags, commits):
  config = _config(strategy, *flags)
  assert config["commits"] == commits
  assert config["local_steps"] == 28
  assert config["steps_per_epoch"] == 14
  assert config["batch_size"] == 32


@pytest.mark.parametrize(
  ("strategy", "flags", "k"),
  [
    ("sync-replicas", (), 5),
    ("sync-replicas", ("--replicas-to-aggregate", "2"), 2),
    ("sync-replicas", ("--replicas-to-aggregate", "9"), 9),
    ("elastic-average", (), 1),
    ("local-sgd", (), 5),
    ("diloco", (), 5),
    ("decoupled-diloco", (), 3),
    ("decoupled-diloco", ("--replicas-to-aggregate", "5"), 5),
  ],
)
def test_a_step_takes_so_many_contributions(strategy, flags, k):
  config = _config(strategy, *flags, replicas=5)
  found = plan.join_arguments(config)
  assert (found["replicas_to_aggregate"], found["total_num_replicas"]) == (k, 5)


def test_a_learner_has_one_contribution_to_give():
  with pytest.raises(
    errors.CommandError, match="at most the 5 replicas, got 6"
  ):
    _config("decoupled-diloco", "--replicas-to-aggregate", "6", replicas=5)


@pytest.mark.parametrize(
  ("strategy", "flags", "words"),
  [
    ("cross-shard", (), "take sync-replicas"),
    ("sync-replicas", ("--straggler", "1:0.5"), "--straggler does not go"),
    ("sync-replicas", ("--variable-averages", "0"), "--variable-averages does"),
    ("local-sgd", ("--inner-state", "averaged"), "--inner-state does not go"),
    ("elastic-average", ("--rho", "0.5"), "--rho does not go with"),
  ],
)
def test_what_processes_can_not_do_is_refused(strategy, flags, words):
  with pytest.raises(errors.CommandError, match=words):
    _config(strategy, *flags)


def test_staleness_is_bounded_and_weighed_as_told():
  found = plan.join_arguments(_config("sync-replicas"))
  assert found["max_staleness"] == 0
  assert "staleness_weight" not in found
  flags = ("--max-staleness", "3", "--staleness-weight", "inverse")
  found = plan.join_arguments(_config("sync-replicas", *flags))
  assert (found["max_staleness"], found["staleness_weight"]) == (3, "inverse")
  assert "strategy" not in found


@pytest.mark.parametrize(
  ("flags", "rate"), [((), 0.9 / 3), (("--moving-rate", "0.2"), 0.2)]
)
def test_the_moving_rate_is_by_default_of_all_replicas(
  flags, rate, monkeypatch
):
  monkeypatch.setattr(coordinator, "elastic_average", lambda **told: told)
  found = plan.join_arguments(_config("elastic-average", *flags))
  assert found["strategy"] == {"moving_rate": rate, "communication_period": 10}


@pytest.mark.parametrize("strategy", ["diloco", "decoupled-diloco"])
def test_the_outer_optimizer_is_the_one_of_the_flags(strategy, monkeypatch):
  def kept(outer, **told):
    return outer, told

  monkeypatch.setattr(coordinator, "local_updates", kept)
  monkeypatch.setattr(coordinator, "decoupled_diloco", kept)
  flags = ("--outer-learning-rate", "0.5", "--outer-momentum", "0.25")
  config = _config(strategy, *flags, "--communication-period", "6")
  outer, told = plan.join_arguments(config)["strategy"]
  assert told == (
    {"communication_period": 6}
    if strategy == "diloco"
    else {"period": 6, "fragments": 2, "alpha": 0.25}
  )
  change = jnp.float32(1.0)
  state, found = outer.init(change), []
  for _ in range(2):
    update, state = outer.update(change, state)
    found.append(float(update))
  # Nesterov: the rate times the momentum's trace, one step ahead.
  assert found == pytest.approx([-0.5 * 1.25, -0.5 * (1 + 0.25 * 1.25)])


def test_the_learning_rate_ends_with_the_local_steps():
  optimizer = plan.make_optimizer(
    _config("sync-replicas", optimizer="gradient_descent")
  )
  one = jnp.float32(1.0)
  step = jax.jit(optimizer.update)
  state, found = optimizer.init(one), []
  for _ in range(29):
    update, state = step(one, state, one)
    found.append(-float(update))
  assert found[0] == pytest.approx(0.5)
  assert found[14] == pytest.approx(0.25)
  assert found[28] == 0.0


@pytest.fixture
def _line(monkeypatch):
  """A model that compiles at once: the mean of images times a weight."""
  monkeypatch.setattr(
    model, "loss", lambda params, batch: jnp.mean(params * batch.images)
  )


def _draws(size=8, number=200, seed=5):
  """From a key to its gradient, which is the mean of the drawn numbers."""
  images = np.arange(number, dtype=np.float32) ** 2
  config = {"batch_size": size, "seed": seed}
  labels = np.zeros(number, np.int32)
  gradient = plan.make_gradient(config, jnp.float32(2.0), images, labels)

  def drawn(key):
    loss, found = gradient(jnp.float32(2.0), key)
    assert float(loss) == 2 * float(found)
    return float(found)

  return drawn


@pytest.mark.usefixtures("_line")
def test_a_key_names_its_batch_wherever_it_is_computed():
  keys = [[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]
  here, there, other = _draws(), _draws(), _draws(seed=6)
  found = [here(key) for key in keys]
  assert found == [there(key) for key in keys]
  assert len({*found, other(keys[0])}) == 5


@pytest.mark.usefixtures("_line")
def test_a_batch_has_no_image_twice():
  whole = float(np.mean(np.arange(16.0) ** 2))
  drawn = _draws(size=16, number=16)
  assert {drawn([0, 0, number]) for number in range(3)} == {whole}


def test_the_batch_is_that_of_both_images_and_labels(monkeypatch):
  """An image goes with its own label."""
  monkeypatch.setattr(
    model,
    "loss",
    lambda params, batch: jnp.mean(params * (batch.images - batch.labels)),
  )
  numbers = np.arange(50, dtype=np.float32)
  config = {"batch_size": 5, "seed": 0}
  gradient = plan.make_gradient(config, jnp.float32(1.0), numbers, numbers)
  assert float(gradient(jnp.float32(1.0), [3])[1]) == 0.0


def test_replay_computes_gradients_as_the_replicas_did(monkeypatch):
  images = np.arange(40, dtype=np.float32)
  batch = digits.Batch(images, images)
  monkeypatch.setattr(digits, "load", lambda: (batch, None))
  monkeypatch.setattr(model, "init", lambda seed: jnp.float32(seed))
  monkeypatch.setattr(
    model, "loss", lambda params, batch: jnp.mean(params * batch.images)
  )
  config = _config("sync-replicas", batch_size=24)
  replayed = plan.replay(json.loads(json.dumps(config)))
  assert float(replayed["params"]) == 5.0
  gradient = plan.make_gradient(config, replayed["params"], images, images)
  key = [2, 0, 7]
  expected = gradient(replayed["params"], key)[1]
  assert replayed["gradient"](replayed["params"], key) == expected
  state = replayed["optimizer"].init(replayed["params"])
  assert jax.tree.structure(state) == jax.tree.structure(
    plan.make_optimizer(config).init(replayed["params"])
  )


def test_each_strategy_of_the_command_is_known_or_refused():
  """A new one would otherwise be trained as one that it is not."""
  from optax_dist.cli.train import strategies as of_command

  assert {*STRATEGIES, "cross-shard"} == set(of_command.names())
  for name in STRATEGIES[1:]:
    factory = plan.join_arguments(_config(name))["strategy"]
    quorum = strategies.Quorum(1, 3)
    made = factory(optax.sgd(0.1), quorum)
    assert type(made) is not strategies.SyncReplicas
