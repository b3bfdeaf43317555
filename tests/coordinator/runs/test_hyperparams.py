"""Hyperparameters in the state: set by all at one step, or refused."""

import threading

import embedded_runs as runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from waiting import until

import optax_dist
from optax_dist import coordinator, simulate
from optax_dist.coordinator import checkpoint, journal
from optax_dist.coordinator.runtime import endpoint

ONE = jnp.ones(())
START = jnp.zeros(())
SGD = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
INLINE = pytest.mark.parametrize(
  "inline", [0, 64 << 10], ids=["moved", "inline"]
)


def rate_of(state):
  return float(optax.tree.get(state, "learning_rate"))


@INLINE
@pytest.mark.parametrize("setters", [(1,), (0, 1)])
def test_a_rate_is_set_on_all_replicas_for_the_next_step(inline, setters):
  """Two steps at 1, then two at 0.25: ahead of a commit nobody knows of it."""

  def train(replica):
    for step in range(4):
      if step == 2 and replica.replica in setters:
        replica.set_hyperparams(learning_rate=0.25)
      replica.step(ONE)
    return float(replica.params), rate_of(replica.opt_state)

  result = coordinator.run_embedded(train, 2, SGD, START, inline_bytes=inline)
  assert result == [(-2.5, 0.25)] * 2


def test_one_of_two_concurrent_requests_wins_on_all_replicas():
  def train(replica):
    replica.step(ONE)
    replica.set_hyperparams(learning_rate=0.25 + 0.25 * replica.replica)
    replica.step(ONE)
    return float(replica.params), replica.fingerprint()

  first, second = coordinator.run_embedded(train, 2, SGD, START)
  assert first == second
  assert first[0] in (-1.25, -1.5)


def test_replica_whose_gradients_are_never_used_can_set_a_rate():
  """K of N: the request does not ride with a gradient."""
  over = threading.Event()

  def train(replica):
    if replica.replica == 2:
      replica.set_hyperparams(learning_rate=0.5)
      assert over.wait(60.0)
      return rate_of(replica.opt_state)
    while rate_of(replica.opt_state) != 0.5:
      replica.step(ONE)
    over.set()
    return rate_of(replica.opt_state)

  coordinator.run_embedded(
    train, 3, SGD, START, replicas_to_aggregate=2, max_staleness=1
  )


@pytest.mark.parametrize("name", ["local", "elastic", "decoupled"])
def test_inner_optimizers_get_a_set_rate_at_the_next_exchange(name):
  strategy = {
    "local": coordinator.local_updates(communication_period=2),
    "elastic": coordinator.elastic_average(
      moving_rate=0.5, communication_period=2
    ),
    "decoupled": coordinator.decoupled_diloco(fragments=1, period=2, overlap=0),
  }[name]
  k = {"replicas_to_aggregate": 1} if name == "elastic" else {}

  def train(replica):
    if replica.replica:
      replica.set_hyperparams(learning_rate=0.25)
    exchanges = 0
    while exchanges < 2 or rate_of(replica.inner_state) != 0.25:
      outcome = replica.step(ONE)
      exchanges += bool(outcome.members)
    before = float(replica.params)
    replica.step(ONE)
    return before - float(replica.params)

  result = coordinator.run_embedded(
    train, 2, SGD, START, strategy=strategy, timeout=60.0, **k
  )
  if name != "decoupled":  # A merge may follow that step.
    assert result == [0.25] * 2


@pytest.mark.parametrize("local", [False, True])
def test_late_replicas_and_resumed_runs_have_the_set_rate(local, tmp_path):
  strategy = None
  if local:
    strategy = coordinator.local_updates(communication_period=1)
  world, go = endpoint.World(), threading.Event()
  options = {"k": 1, "n": 2, "opt": SGD, "params": START, "strategy": strategy}
  results = [runs.Result(), runs.Result()]
  state_of = lambda replica: replica.inner_state if local else replica.opt_state

  def first(replica, result):
    replica.step(ONE)
    replica.set_hyperparams(learning_rate=0.25)
    replica.step(ONE)
    checkpoint.save(tmp_path / "step-2", replica)
    result.computed = 1
    assert go.wait(60.0)

  def late(replica, result):
    go.set()
    return rate_of(state_of(replica))

  threads = [runs.start(runs.make(world, 0, **options), first, results[0])]
  until(lambda: results[0].computed or results[0].error)
  threads.append(runs.start(runs.make(world, 1, **options), late, results[1]))
  runs.finish(threads)
  assert [r.error for r in results] == [None] * 2
  assert results[1].value == 0.25

  shared = optax.sgd(1.0) if local else SGD
  answer = checkpoint.restore(tmp_path / "step-2", START, shared.init(START))
  again = coordinator.run_embedded(
    lambda replica: rate_of(state_of(replica)),
    3,
    SGD,
    strategy=strategy,
    **answer,
  )
  assert again == [0.25] * 3


def test_rates_are_set_by_name_except_those_with_a_schedule():
  make = optax.inject_hyperparams(optax.sgd)
  params = {"a": START, "b": START, "c": START}
  opt = optax.partition(
    {
      "a": make(learning_rate=1.0),
      "b": make(learning_rate=2.0),
      "c": make(learning_rate=lambda count: 4.0),
    },
    {name: name for name in params},
  )
  ones = jax.tree.map(jnp.ones_like, params)

  def train(replica):
    replica.step(ones)
    replica.set_hyperparams(learning_rate=0.5)
    replica.step(ones)
    return jax.tree.map(float, replica.params)

  [result] = coordinator.run_embedded(train, 1, opt, params)
  assert result == {"a": -1.5, "b": -2.5, "c": -8.0}


def test_unknown_or_invalid_hyperparameters_are_refused():
  opt = optax.inject_hyperparams(optax.sgd)(
    learning_rate=lambda count: 1.0, momentum=0.5
  )

  def train(replica):
    refused = lambda **values: pytest.raises(ValueError, match="|".join(values))
    with refused(learning_rate=0.1):
      replica.set_hyperparams(learning_rate=0.1)
    with refused(rate=0.1):
      replica.set_hyperparams(rate=0.1)
    for value in (np.nan, np.inf, 1e60, "fast", None, [0.1, 0.2], 1j):
      with refused(momentum=value):
        replica.set_hyperparams(momentum=value)

  coordinator.run_embedded(train, 1, opt, START)


@pytest.mark.parametrize("local", [False, True])
def test_edit_of_the_state_on_one_replica_is_refused_and_dropped(local):
  strategy = None
  if local:
    strategy = coordinator.local_updates(communication_period=1)
  params = {"w": START}
  ones = {"w": ONE}

  def train(replica):
    replica.step(ones)
    if replica.replica == 0:
      state = replica.inner_state if local else replica.opt_state
      state.hyperparams["learning_rate"] = jnp.asarray(0.125)
      with pytest.raises(ValueError, match="set_hyperparams"):
        replica.step(ones)
      replica.params["w"] = jnp.asarray(7.0)
      with pytest.raises(ValueError, match=r"replica\.params was edited"):
        replica.step(ones)
    replica.step(ones)
    return float(replica.params["w"])

  result = coordinator.run_embedded(train, 2, SGD, params, strategy=strategy)
  assert result == [-2.0] * 2


def test_replay_applies_hyperparameters_from_the_journal(tmp_path):
  path = tmp_path / "run.jsonl"

  def train(replica):
    for step in range(3):
      if step == 1:
        replica.set_hyperparams(learning_rate=0.25)
      replica.step(ONE, batch=step)

  coordinator.run_embedded(
    train, 1, SGD, START, journal=path, fingerprint_every=1
  )
  records = journal.read(path).records
  commits = [r for r in records if r["kind"] == "commit"]
  assert [c.get("hyperparams") for c in commits] == [
    None,
    {"learning_rate": 0.25},
    None,
  ]
  replay = simulate.replay_run(
    records, optimizer=SGD, params=START, gradient=lambda params, batch: ONE
  )
  assert not replay.difference
  assert replay.compared >= 2


def test_averages_of_parameters_are_shared_and_saved(tmp_path):
  """TensorFlow's variable_averages, as a transform in the shared optimizer."""
  opt = optax.chain(optax.sgd(1.0), optax_dist.params_ema(0.5))
  average = lambda r: float(optax_dist.averaged_params(r.opt_state, r.params))

  def train(replica):
    for _ in range(3):
      replica.step(-ONE)
    if replica.replica:
      checkpoint.save(tmp_path / "step-3", replica)
    return average(replica)

  # Towards 1, 2 and 3, each time half of the way from 0.
  assert coordinator.run_embedded(train, 2, opt, START) == [2.125] * 2
  result = checkpoint.resume(tmp_path, START, opt.init(START))

  def go_on(replica):
    before = average(replica)
    replica.step(-ONE)
    return before, average(replica)

  again = coordinator.run_embedded(go_on, 3, opt, **result)
  assert again == [(2.125, 3.0625)] * 3

  with pytest.raises(TypeError, match="params_ema"):
    coordinator.run_embedded(train, 2, opt, START, variable_averages=object())
