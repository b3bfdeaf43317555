"""The state of a replica's own optimizer outlives the replica.

Its schedule tells how many steps it has taken: with gradients of 1, step c moves the
parameters by `RATE * (c + 1)`.
"""

import threading

import embedded_runs as runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from waiting import until

from optax_dist import coordinator
from optax_dist.coordinator import checkpoint, strategies
from optax_dist.coordinator.runtime import endpoint

RATE = 2.0**-12
PERIOD = 3
PARAMS = jnp.zeros(4)
ONES = jnp.ones(4)
OPT = optax.sgd(lambda count: RATE * (count + 1).astype(jnp.float32))
STRATEGIES = {
  "local": coordinator.local_updates(communication_period=PERIOD),
  "elastic": coordinator.elastic_average(
    moving_rate=0.25, communication_period=PERIOD
  ),
  "decoupled": coordinator.decoupled_diloco(
    optax.sgd(1.0), fragments=1, period=PERIOD, overlap=0
  ),
}
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def count_of(replica):
  return int(optax.tree.get(replica.inner_state, "count"))


def next_count(replica):
  """From the size of its next step, unless an exchange follows it."""
  before = np.asarray(replica.params)
  replica.step(ONES)
  moved = (before - np.asarray(replica.params)) / RATE
  return round(float(moved[0])) - 1


def train(replica, exchanges):
  """Trains until that many of this replica's exchanges are merged."""
  while exchanges:
    outcome = replica.step(ONES)
    exchanges -= bool(outcome.accepted and outcome.members)


class Held:
  """Two replicas that wait after two exchanges each, for others to join."""

  def __init__(self, name, **options):
    self.options = {
      "k": 1 if name == "elastic" else 2,
      "n": 3,
      "strategy": STRATEGIES[name],
      "opt": OPT,
      "params": PARAMS,
      **options,
    }
    self.counts = []
    self._world = endpoint.World()
    self._both, self._go = threading.Barrier(2), threading.Event()
    self._results, self._threads = [], []
    for number in range(2):
      self._start(number, self._train)
    errors = lambda: [r.error for r in self._results if r.error]
    until(lambda: len(self.counts) == 2 or errors())
    assert not errors()

  def _train(self, replica, result):
    self._both.wait(60.0)
    train(replica, 2)
    self.counts.append(count_of(replica))
    assert self._go.wait(60.0)

  def _start(self, number, function, **options):
    made = runs.make(self._world, number, **(self.options | options))
    self._results.append(runs.Result())
    self._threads.append(runs.start(made, function, self._results[-1]))

  def join(self, function, **options):
    """Another replica joins; returns what the function finds."""

    def run(replica, result):
      try:
        return function(replica)
      finally:
        self._go.set()

    self._start(2, run, **options)
    runs.finish(self._threads)
    assert [r.error for r in self._results] == [None] * 3
    return self._results[2].value


@every_strategy
@pytest.mark.parametrize("inline", [0, 64 << 10], ids=["moved", "inline"])
def test_late_replica_continues_the_schedule_of_the_others(name, inline):
  held = Held(name, inline_bytes=inline)
  began, following = held.join(lambda r: (count_of(r), next_count(r)))
  assert following == began
  if name == "decoupled":
    # It is of the last contribution, and one takes a step at least.
    assert 2 <= began <= max(held.counts)
  else:
    assert held.counts == [2 * PERIOD] * 2
    assert began == 2 * PERIOD


@every_strategy
def test_late_replica_may_begin_with_a_fresh_inner_state(name):
  assert Held(name).join(next_count, inner_state="fresh") == 0


@every_strategy
def test_restarted_replica_continues_the_schedule(name):
  world = endpoint.World()
  k = 1 if name == "elastic" else 2
  options = {"k": k, "n": 2, "strategy": STRATEGIES[name], "opt": OPT}
  results = [runs.Result() for _ in range(3)]
  both, back = threading.Barrier(2), threading.Event()

  def survivor(replica, result):
    both.wait(60.0)
    train(replica, 2)
    assert back.wait(60.0)
    return count_of(replica)

  def dies(replica, result):
    both.wait(60.0)
    train(replica, 2)
    raise runs.Killed

  def restarted(replica, result):
    try:
      return count_of(replica), next_count(replica)
    finally:
      back.set()

  make = lambda i: runs.make(world, i, params=PARAMS, **options)
  threads = [
    runs.start(make(0), survivor, results[0]),
    runs.start(make(1), dies, results[1]),
  ]
  threads[1].join(60.0)
  assert isinstance(results[1].error, runs.Killed)
  threads.append(runs.start(make(1), restarted, results[2]))
  runs.finish(threads)
  assert results[0].error is results[2].error is None
  began, following = results[2].value
  assert following == began
  assert began == (2 * PERIOD if name != "decoupled" else results[0].value)


def opt_state_of(name):
  """The shared part of the optimizer's state, as for `checkpoint.restore`."""
  made = STRATEGIES[name](OPT, strategies.Quorum(1, 2))
  return made.shared(PARAMS).opt_state


@every_strategy
@pytest.mark.parametrize("number", [1, 2, 3])
def test_resumed_run_continues_the_schedule(name, number, tmp_path):
  def save(replica):
    train(replica, 2)
    if replica.replica == 1:
      checkpoint.save(tmp_path / f"step-{replica.global_step}", replica)
    return count_of(replica)

  k = {"replicas_to_aggregate": 1} if name == "elastic" else {}
  strategy = STRATEGIES[name]
  saved = coordinator.run_embedded(
    save, 2, OPT, PARAMS, strategy=strategy, **k
  )[1]
  assert saved == 2 * PERIOD or name == "decoupled"
  with pytest.raises(ValueError, match="is what all share"):
    checkpoint.resume(tmp_path, PARAMS, OPT.init(PARAMS))
  result = checkpoint.resume(tmp_path, PARAMS, opt_state_of(name))
  began = coordinator.run_embedded(
    lambda r: (count_of(r), next_count(r)),
    number,
    OPT,
    strategy=strategy,
    **result,
    **k,
  )
  assert began == [(saved, saved)] * number


@pytest.mark.parametrize("name", ["local", "elastic"])
def test_nonfinite_period_is_repeated(name):
  """Its parameters and its own optimizer's state were spoilt."""
  opt = optax.chain(optax.trace(0.5), OPT)

  def bad_once(replica):
    train(replica, 1)
    for number in range(PERIOD):
      outcome = replica.step(ONES * (np.nan if number == 1 else 1.0))
    assert outcome.reason == "non_finite"
    assert count_of(replica) == PERIOD
    train(replica, 1)
    trace = optax.tree.get(replica.inner_state, "trace")
    return count_of(replica), np.asarray(trace).tolist()

  [(count, trace)] = coordinator.run_embedded(
    bad_once, 1, opt, PARAMS, strategy=STRATEGIES[name]
  )
  assert count == 2 * PERIOD
  # Six gradients of 1: 2 - 2 ** -5.
  assert trace == [1.96875] * 4


@pytest.mark.parametrize(
  ("strategy", "opt"),
  [
    (
      coordinator.decoupled_diloco(fragments=2, period=4),
      optax.sgd(0.1, momentum=0.9),
    ),
    # A gradient is applied one step later, in the next period.
    (
      coordinator.local_updates(communication_period=3),
      optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, last, params: (optax.tree.scale(-0.1, last), grads),
      ),
    ),
  ],
  ids=["decoupled", "local"],
)
def test_nonfinite_inner_state_is_replaced(strategy, opt):
  """It is not sent, so what is sent is finite when the state is spoilt."""

  def bad_once(replica):
    outcomes = []
    while "non_finite" not in outcomes:
      bad = len(outcomes) == 2
      grads = {"a": ONES, "b": ONES * (np.nan if bad else 1.0)}
      outcomes.append(replica.step(grads).reason)

    def goes_on():
      outcome = replica.step({"a": ONES, "b": ONES})
      assert outcome.accepted
      return outcome.global_step > 3

    until(goes_on)  # A learner waits for no step.
    state = replica.params, replica.center, replica.inner_state
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    return len(outcomes)

  params = {"a": PARAMS, "b": PARAMS}
  [number] = coordinator.run_embedded(
    bad_once, 1, opt, params, strategy=strategy, timeout=30.0
  )
  assert number > 3


def test_unsuitable_inner_state_is_refused():
  run = lambda state, **options: coordinator.run_embedded(
    lambda r: None, 1, OPT, PARAMS, inner_state=state, **options
  )
  with pytest.raises(ValueError, match="'sync_replicas' has none"):
    run(OPT.init(PARAMS))
  with pytest.raises(ValueError, match="inner_state"):
    run(
      optax.adam(0.1).init(PARAMS),
      strategy=STRATEGIES["local"],
    )
  with pytest.raises(ValueError, match="fresh"):
    run("frehs", strategy=STRATEGIES["local"])
