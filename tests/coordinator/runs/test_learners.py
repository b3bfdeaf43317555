"""Tests of learners of decoupled DiLoCo as threads: none waits, any may die."""

import copy
import threading
import time

import embedded_runs as runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from waiting import until

from optax_dist import coordinator
from optax_dist.coordinator.extras.decoupled_diloco import (
  strategy as decoupled_diloco,
)
from optax_dist.coordinator.runtime import endpoint

PARAMS = {"a": jnp.zeros((30, 20)), "b": jnp.zeros(50), "c": jnp.zeros(7)}
INNER = optax.sgd(0.05)
OUTER = optax.sgd(0.5, momentum=0.5, nesterov=True)
ROUNDS = 12


_compiled = {}


def strategy(**options):
  """Returns a strategy that is compiled once, for many runs."""
  options = {"fragments": 2, "period": 6, "overlap": 2} | options
  # With less momentum, so that it does not swing in a few rounds.
  options.setdefault("outer_optimizer", OUTER)

  def make(opt, quorum):
    key = id(opt), *options.items()
    if key not in _compiled:
      _compiled[key] = decoupled_diloco.decoupled_diloco(**options)(opt, quorum)
      _compiled[key].shared(PARAMS)
    made = copy.copy(_compiled[key])
    made.quorum = quorum
    return made

  return make


def gradient(params, replica):
  """Towards a target of the replica's own; a pause for the others."""
  time.sleep(0.001)
  return jax.tree.map(lambda p: p - (1.0 + replica), params)


def to_round(target, ends=0, may_end=lambda: True):
  """Trains to this round; one replica then ends the run for all."""

  def train(replica, result):
    while True:
      grads = gradient(replica.params, replica.replica)
      outcome = replica.step(grads, tokens=8)
      result.computed += 1
      result.outcomes.append(outcome)
      if outcome.finished:
        return replica.global_step
      over = replica.global_step >= target and may_end()
      if replica.replica == ends and over:
        replica.finish()

  return train


def equal(results):
  """All have the same end, and are there: center, outer state, parameters."""
  prints = {coordinator.fingerprint((r.params, r.opt_state)) for r in results}
  assert len(prints) == 1
  assert len({r.value for r in results}) == 1


def commits(path):
  return [r for r in runs.records(path) if r["kind"] == "commit"]


@pytest.mark.parametrize("inline", [0, 64 << 10], ids=["moved", "inline"])
def test_three_learners_train_to_the_same_end(inline, tmp_path):
  path = tmp_path / "run.jsonl"
  results = runs.run(
    to_round(ROUNDS),
    3,
    k=2,
    strategy=strategy(),
    opt=INNER,
    params=PARAMS,
    inline_bytes=inline,
    journal=path,
  )
  assert [r.error for r in results] == [None] * 3
  equal(results)
  for commit in commits(path):
    weights = [member["weight"] for member in commit["members"]]
    assert sum(weights) == pytest.approx(len(weights))
    assert len(weights) >= 2
  # They have learned something: the mean of their targets is 2.
  assert np.abs(np.asarray(results[0].params["b"]) - 2.0).max() < 1.5
  for result in results:
    count = sum(bool(o.members) for o in result.outcomes)
    # The last outcome may come with the end of the run.
    assert count <= result.counts["applied"] <= count + 1


def test_a_joining_learner_gets_the_optimizer_state_of_another():
  """Its momentum and its schedule's count."""
  opt = optax.chain(
    optax.trace(0.5), optax.scale_by_schedule(lambda count: -0.05)
  )
  world = endpoint.World()
  options = {
    "k": 2,
    "n": 3,
    "strategy": decoupled_diloco.decoupled_diloco(OUTER, fragments=2, period=6),
    "opt": opt,
    "params": PARAMS,
  }
  results = [runs.Result() for _ in range(3)]
  far, joined, began = threading.Event(), threading.Event(), {}

  def train(replica, result):
    me = replica.replica
    began[me] = replica._calls.loop.local.opt_state
    if me == 2:
      joined.set()
    while not replica.step(gradient(replica.params, me), tokens=8).finished:
      if replica.global_step >= 4:
        far.set()
        if joined.is_set() and not me:
          replica.finish()
    return replica.global_step

  def made(number):
    return runs.make(world, number, **options)

  threads = [runs.start(made(0), train, results[0])]
  until(lambda: 0 in began)
  threads.append(runs.start(made(1), train, results[1]))
  until(lambda: far.is_set() or any(r.error for r in results))
  threads.append(runs.start(made(2), train, results[2]))
  runs.finish(threads)
  assert [r.error for r in results] == [None] * 3
  equal(results)
  fresh = opt.init(PARAMS)
  jax.tree.map(np.testing.assert_array_equal, began[0], fresh)
  # Four rounds take two periods of one of the two at least.
  assert optax.tree.get(began[2], "count") > 5
  assert np.abs(optax.tree.get(began[2], "trace")["a"]).min() > 0


def test_a_learner_trains_on_while_the_others_are_away():
  """With a quorum of two, one alone merges nothing, and never waits."""
  back = threading.Event()

  def train(replica, result):
    if replica.replica:
      assert back.wait(60.0)
      return to_round(4)(replica, result)
    for _ in range(60):
      outcome = replica.step(gradient(replica.params, 0))
      assert outcome[:3] == (True, "", 0)
    back.set()
    # Its own progress in the meantime is kept.
    assert np.abs(np.asarray(replica.params["b"]) - 1.0).max() < 0.1
    return to_round(4)(replica, result)

  results = runs.run(
    train,
    2,
    k=2,
    strategy=strategy(),
    opt=INNER,
    params=PARAMS,
  )
  assert [r.error for r in results] == [None] * 2
  equal(results)


@pytest.mark.parametrize(
  ("phase", "nth", "victim"),
  [
    ("reduce_scatter", 3, 0),
    ("gather", 3, 2),
  ],
)
def test_learners_continue_after_one_dies_in_a_round(phase, nth, victim):
  """The others continue; a replacement ends as they do."""
  world = endpoint.World()
  options = {
    "k": 2,
    "n": 3,
    "strategy": strategy(),
    "opt": INNER,
    "params": PARAMS,
    "inline_bytes": 0,
    "quorum": {"lower_on_loss": True},
  }
  results = [runs.Result() for _ in range(4)]
  together, died = threading.Barrier(3), threading.Event()
  train = to_round(ROUNDS, ends=1, may_end=died.is_set)

  def first(replica, result):
    try:
      together.wait(60.0)
      return train(replica, result)
    finally:
      if replica.replica == victim:
        died.set()

  with runs.Faults({(phase, victim, nth): runs.kill}) as faults:
    threads = [
      runs.start(runs.make(world, i, **options), first, results[i])
      for i in range(3)
    ]
    assert died.wait(60.0)
    again = runs.make(world, victim, name=f"{victim} again", **options)
    threads.append(runs.start(again, train, results[3]))
    runs.finish(threads)
  assert faults.done == [(phase, victim, nth)]
  assert isinstance(results[victim].error, runs.Killed)
  rest = [r for i, r in enumerate(results) if i != victim]
  # The new process may find the run at its end.
  if isinstance(rest[-1].error, coordinator.RunFinished):
    rest.pop()
  assert [r.error for r in rest] == [None] * len(rest)
  equal(rest)
  assert rest[0].value >= ROUNDS


def test_a_run_goes_on_from_a_checkpoint():
  results = runs.run(
    to_round(5), 2, strategy=strategy(), opt=INNER, params=PARAMS
  )
  assert [r.error for r in results] == [None] * 2
  at = results[0].value
  assert int(results[0].opt_state.round) == at
  more = runs.run(
    to_round(at + 3),
    2,
    strategy=strategy(),
    opt=INNER,
    params=results[0].params,
    opt_state=results[0].opt_state,
    global_step=at,
  )
  assert [r.error for r in more] == [None] * 2
  equal(more)
  assert int(more[0].opt_state.round) == more[0].value >= at + 3


def test_decoupled_diloco_refuses_leased_samples():
  with pytest.raises(ValueError, match="data= is"):
    coordinator.run_embedded(
      lambda replica: None,
      1,
      INNER,
      PARAMS,
      strategy=strategy(),
      data=coordinator.Batches(num_samples=8, global_batch=4),
    )
