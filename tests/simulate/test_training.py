"""Training in virtual time, against plain Python that follows the journal."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import simulate

N = 4
START = {"w": np.array([1.5, -0.5], np.float32), "b": np.float32(2.0)}
SGD = optax.sgd(0.05)
MOMENTUM = optax.sgd(0.02, momentum=0.9)


def gradient(params, key):
  del key
  # Nonlinear, so that it matters on which parameters it is computed.
  return jax.tree.map(lambda x: x + jnp.sin(3 * x), params)


def noise(params, key):
  return jax.tree.map(
    lambda x: jax.random.normal(key, x.shape, x.dtype), params
  )


def evaluate(params):
  return {"size": jnp.sum(params["w"] ** 2), "b": params["b"]}


def _train(strategy, spec="lognormal:0,1", **options):
  options = {
    "params": START,
    "gradient": gradient,
    "optimizer": SGD,
    "evaluate": evaluate,
    "seconds": 60.0,
    "evaluations": 1000,
    "seed": 3,
  } | options
  return simulate.simulate_training(
    strategy, simulate.parse_latency(spec), N, **options
  )


class _Events:
  """What happened, in order, as a journal would have it."""

  def __init__(self, strategy, steps, failures=None):
    self.events = []
    simulate.simulate_timing(
      strategy,
      simulate.parse_latency("lognormal:0,1"),
      N,
      steps=steps,
      seed=3,
      failures=failures,
      journal=self,
    )

  def write(self, kind, /, **fields):
    self.events.append((kind, fields))


def _apply(optimizer, grads, state, params):
  updates, state = optimizer.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def _tree(fn, *trees):
  return jax.tree.map(fn, *trees)


def _follow_gradients(strategy, steps, optimizer, weight, failures):
  params = _tree(jnp.asarray, START)
  state, held = optimizer.init(params), [params] * N
  for kind, fields in _Events(strategy, steps, failures).events:
    if kind in ("join", "drop"):
      held[fields["replica"]] = params
    if kind == "commit":
      grads = [
        _tree(
          lambda g, m=m: g * np.float32(weight(m["staleness"])),
          gradient(held[m["replica"]], None),
        )
        for m in fields["members"]
      ]
      mean = _tree(lambda *g: sum(g) / np.float32(len(g)), *grads)
      params, state = _apply(optimizer, mean, state, params)
      for member in fields["members"]:
        held[member["replica"]] = params
  return params


@pytest.mark.parametrize(
  ("strategy", "options"),
  [
    (simulate.sync_replicas(3), {}),
    (simulate.sync_replicas(2, max_staleness=1, cancel=True), {}),
    (simulate.asynchronous(), {"optimizer": MOMENTUM}),
    (simulate.bounded_staleness(3), {"staleness_weight": "inverse"}),
    (simulate.sync_replicas(2), {"failures": simulate.Failures(0.1, 2.0)}),
  ],
)
def test_each_gradient_is_of_the_parameters_that_its_replica_holds(
  strategy, options
):
  training = _train(strategy, **options)
  steps = int(training.steps[-1])
  assert steps > 20
  weight = lambda late: 1.0
  if "staleness_weight" in options:
    weight = lambda late: 1 / max(late, 1)
  expected = _follow_gradients(
    strategy,
    steps,
    options.get("optimizer", SGD),
    weight,
    options.get("failures"),
  )
  for name in START:
    np.testing.assert_allclose(
      training.params[name], expected[name], rtol=2e-5, atol=1e-6
    )
  # It ends at most one group of steps before the time is over.
  assert training.times[-1] <= 60
  assert training.timing.commit_times[-1] <= 60
  np.testing.assert_array_equal(training.steps, np.arange(steps + 1))


@pytest.mark.parametrize("failures", [None, simulate.Failures(0.05, 2.0)])
def test_elastic_replicas_meet_the_center_one_at_a_time(failures):
  strategy = simulate.elastic_average(3)
  training = _train(strategy, optimizer=MOMENTUM, failures=failures)
  center = _tree(jnp.asarray, START)
  own, states = [center] * N, [MOMENTUM.init(center)] * N
  exchanges = 0
  for kind, fields in _Events(
    strategy, int(training.steps[-1]), failures
  ).events:
    if kind == "join":
      own[fields["replica"]] = center
    if kind == "commit":
      (member,) = fields["members"]
      r = member["replica"]
      for _ in range(3):
        own[r], states[r] = _apply(
          MOMENTUM, gradient(own[r], None), states[r], own[r]
        )
      pull = _tree(lambda x, c: np.float32(0.9 / N) * (x - c), own[r], center)
      own[r] = _tree(jnp.subtract, own[r], pull)
      center = _tree(jnp.add, center, pull)
      exchanges += 1
  assert exchanges == training.steps[-1] > 20
  for name in START:
    np.testing.assert_allclose(
      training.params[name], center[name], rtol=2e-4, atol=1e-5
    )


def test_local_updates_take_the_mean_of_the_changes():
  training = _train(simulate.local_updates(N, 5), outer=optax.sgd(0.5))
  params = _tree(jnp.asarray, START)
  for _ in range(int(training.steps[-1])):
    own = params
    for _ in range(5):
      own, _ = _apply(SGD, gradient(own, None), SGD.init(own), own)
    params = _tree(lambda p, x: p + np.float32(0.5) * (x - p), params, own)
  assert training.steps[-1] > 3
  for name in START:
    np.testing.assert_allclose(
      training.params[name], params[name], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
  ("strategy", "variance"),
  [
    # Of the sum of `steps` means over k of them, at a rate of 0.05.
    (simulate.sync_replicas(3), lambda steps: steps / 3),
    (simulate.asynchronous(), lambda steps: steps),
    (simulate.local_updates(N, 5), lambda steps: 5 * steps / N),
  ],
)
def test_every_contribution_has_a_batch_of_its_own(strategy, variance):
  params = {"w": np.zeros(4000, np.float32), "b": np.float32(0)}
  training = _train(
    strategy, params=params, gradient=noise, seconds=30.0, evaluations=5
  )
  moved = np.asarray(training.params["w"], np.float64)
  expected = 0.05**2 * variance(training.steps[-1])
  assert moved.var() == pytest.approx(expected, rel=0.1)


def test_elastic_replicas_have_batches_of_their_own():
  # Without a pull each replica is a random walk; the center then is the mean of
  # what they bring when it is moved all the way.
  params = {"w": np.zeros(4000, np.float32), "b": np.float32(0)}
  training = _train(
    simulate.elastic_average(1),
    params=params,
    gradient=noise,
    seconds=15.0,
    moving_rate=1.0,
    evaluations=5,
  )
  # With a rate of 1 replica and center swap: the center walks through the
  # replicas, and has as many steps as the replica that it was.
  moved = np.asarray(training.params["w"], np.float64)
  steps = moved.var() / 0.05**2
  assert 1 <= steps <= training.steps[-1]
  assert abs(steps - round(steps)) < 0.1 * steps


def test_time_to_a_value_and_the_seed():
  trainings = [
    _train(simulate.sync_replicas(3), evaluations=8, seed=seed)
    for seed in (3, 3, 4)
  ]
  one, same, other = trainings
  np.testing.assert_array_equal(one.metrics["size"], same.metrics["size"])
  np.testing.assert_array_equal(one.times, same.times)
  assert not np.array_equal(one.times[:5], other.times[:5])
  size = one.metrics["size"]
  assert (np.diff(size) < 0).all()
  half = (size[2] + size[3]) / 2
  expected = (one.times[2] + one.times[3]) / 2
  assert one.time_to("size", half) == pytest.approx(expected)
  assert one.time_to("size", size[0]) == 0.0
  assert one.time_to("size", -1.0) == float("inf")


def test_what_cannot_be_trained_is_refused():
  with pytest.raises(ValueError, match="cannot aggregate 5 contributions"):
    _train(simulate.sync_replicas(5))
  with pytest.raises(ValueError, match="seconds must be above 0"):
    _train(simulate.sync_replicas(3), seconds=0.0)
  with pytest.raises(ValueError, match="backups and failures must be none"):
    _train(simulate.local_updates(N, 5, backups=1))
