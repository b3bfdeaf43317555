"""Chiefs that die, replicas that vanish, come back, are stuck or not wanted."""

import logging
import threading
import time

import embedded_runs as runs
import jax
import jax.numpy as jnp
import optax
import pytest

from optax_dist import coordinator
from optax_dist.coordinator import embedded, engine

MOVED = {"inline_bytes": 0}


def begin(world, numbers, train, **options):
  """Replicas that train together; their threads and results."""
  options = {"k": len(numbers), "n": len(numbers)} | options
  results = {i: runs.Result() for i in numbers}
  together = threading.Barrier(len(numbers))

  def start(replica, result):
    together.wait(10.0)
    return train(replica, result)

  threads = [
    runs.start(runs.make(world, i, **options), start, results[i])
    for i in numbers
  ]
  return threads, results


def chief_of(results, replicas):
  return next(r.replica for r in replicas if r.is_chief)


@pytest.mark.parametrize("inline", [0, 64 << 10], ids=["moved", "inline"])
def test_the_next_chief_goes_on_where_the_last_one_died(inline, tmp_path):
  # TensorFlow issues 7970 and 16213: without its chief a job stood still.
  path = tmp_path / "run.jsonl"
  with runs.Faults({("committing", 0, 4): runs.kill}):
    threads, results = begin(
      embedded.World(),
      range(3),
      runs.to_step(8),
      k=2,
      n=3,
      journal=path,
      inline_bytes=inline,
      quorum={"lower_on_loss": True},
    )
    runs.finish(threads)
  died = [i for i, r in results.items() if r.error is not None]
  assert len(died) == 1
  assert isinstance(results[died[0]].error, runs.Killed)
  found = runs.records(path)
  chiefs = [r["replica"] for r in found if r["kind"] == "chief"]
  assert chiefs[0] == died[0]
  assert chiefs[1] != died[0]
  prints = runs.replay(found)
  alive = {i: r for i, r in results.items() if i not in died}
  for result in alive.values():
    assert all(prints[step] == p for step, p in result.prints.items())
    assert max(result.prints) >= 8
  runs.check_ledger(alive, found)


def test_a_chief_that_ends_first_leaves_the_others_to_go_on():
  def train(replica, result):
    if replica.is_chief:
      replica.step(runs.compute(replica, 0)[0])
      return True
    runs.to_step(6)(replica, result)
    return False

  results = runs.run(train, 3)
  assert [r.error for r in results] == [None] * 3
  assert sum(r.value for r in results) == 1


def test_a_replica_that_takes_a_token_and_dies_takes_nothing_with_it():
  # TensorFlow issue 5022: its token was lost, and the queue ran dry.
  last = []

  def train(replica, result):
    # The others need each other, so they end at the same step.
    while not last or replica.global_step < last[0]:
      if replica.replica == 2 and len(result.outcomes) == 3:
        last.append(replica.global_step + 40)
        raise runs.Killed
      grads, _ = runs.compute(replica, len(result.outcomes))
      result.outcomes.append(replica.step(grads))

  began = time.monotonic()
  results = runs.run(train, 3, k=2, **MOVED)
  assert [type(r.error) for r in results] == [type(None)] * 2 + [runs.Killed]
  assert all(o.accepted for r in results[:2] for o in r.outcomes[-10:])
  assert time.monotonic() - began < 8.0


@pytest.mark.parametrize("phase", ["reduce_scatter", "gather"])
def test_a_stall_in_the_middle_of_an_exchange(phase, caplog, tmp_path):
  # TensorFlow issue 12667. It is given up, joins again, and goes on.
  path = tmp_path / "run.jsonl"
  caplog.set_level(logging.CRITICAL, "optax_dist.coordinator")
  plan = {(phase, 2, 2): lambda: time.sleep(1.6)}
  back = threading.Event()

  def train(replica, result):
    while not back.is_set() or replica.global_step < 9:
      if replica.replica == 2 and faults.done and replica.global_step > 5:
        back.set()
      runs.to_step(replica.global_step + 1)(replica, result)
      time.sleep(0.002)

  with runs.Faults(plan) as faults:
    threads, results = begin(
      embedded.World(),
      range(3),
      train,
      k=3,
      n=3,
      journal=path,
      attempt_timeout=0.4,
      quorum={"lower_on_loss": True},
      **MOVED,
    )
    runs.finish(threads)
  assert [r.error for r in results.values()] == [None] * 3, results
  found = runs.records(path)
  prints = runs.replay(found)
  for result in results.values():
    assert all(prints[step] == p for step, p in result.prints.items())
  runs.check_ledger(results, found)
  assert 2 in [r["replica"] for r in found if r["kind"] == "lost"]


def test_a_replica_that_lives_and_makes_no_progress_is_named():
  # JAX issue 38503: its heartbeats went on.
  released = threading.Event()

  def train(replica, result):
    if replica.replica == 1:
      released.wait(5.0)
      return
    try:
      replica.step(runs.compute(replica, 0)[0])
    finally:
      released.set()

  results = runs.run(train, 2, timeout=1.0, attempt_timeout=0.5)
  assert isinstance(results[0].error, coordinator.CoordinatorError)
  assert "computing: replica 1" in str(results[0].error)


def test_who_is_waited_for_is_logged_in_time(caplog):
  def train(replica, result):
    if replica.replica == 1:
      time.sleep(0.7)
    replica.step(runs.compute(replica, 0)[0])

  with caplog.at_level(logging.WARNING, "optax_dist.coordinator"):
    results = runs.run(train, 2, stall_warning=0.2)
  assert [r.error for r in results] == [None] * 2
  assert "waiting for computing: replica 1" in caplog.text


def test_a_newcomer_takes_over_the_state_and_replaces_its_predecessor():
  world = embedded.World()
  joined = threading.Event()

  def train(replica, result):
    while not joined.is_set() or replica.global_step < 5:
      replica.step(runs.compute(replica, result.computed)[0])
      result.computed += 1
    while not replica.finished:
      outcome = replica.step(runs.compute(replica, result.computed)[0])
      result.computed += 1
      result.prints[outcome.global_step] = replica.fingerprint()

  threads, results = begin(world, range(2), train, k=1, n=2, **MOVED)
  time.sleep(0.1)
  # Another process, which starts from numbers of its own, as replica 1.
  other = jax.tree.map(jnp.zeros_like, runs.PARAMS)
  late = runs.Result()

  def newcomer(replica, result):
    joined.set()
    for _ in range(20):
      outcome = replica.step(runs.compute(replica, 0)[0])
      result.prints[outcome.global_step] = replica.fingerprint()
    replica.finish()

  one = runs.make(world, 1, k=1, n=2, params=other, **MOVED)
  threads.append(runs.start(one, newcomer, late))
  runs.finish(threads)
  assert late.error is None
  assert results[0].error is None
  both = late.prints.keys() & results[0].prints.keys()
  assert both
  assert all(late.prints[s] == results[0].prints[s] for s in both)
  # The other process of that number ends, and says why.
  assert isinstance(results[1].error, coordinator.CoordinatorError)
  assert "Another process has joined as replica 1" in str(results[1].error)


@pytest.mark.parametrize(
  ("name", "difference"),
  [
    ("parameters", {"params": {"w": jnp.ones((5, 31))}}),
    ("parameters", {"params": {"w": jnp.ones((5, 30), jnp.bfloat16)}}),
    ("optimizer", {"opt": optax.sgd(0.2)}),
    ("optimizer state", {"opt": optax.sgd(0.1, momentum=0.9)}),
    ("policy", {"k": 1}),
    ("wire", {"wire": "bfloat16"}),
  ],
)
def test_who_differs_is_refused_and_told_in_what(name, difference):
  world = embedded.World()
  same = {
    "k": 2,
    "n": 2,
    "opt": optax.sgd(0.1),
    "params": {"w": jnp.ones((5, 30))},
  }
  first = runs.make(world, 0, **same).start()
  second = runs.make(world, 1, **(same | difference))
  with pytest.raises(coordinator.JoinRefused, match=f"its {name} differ"):
    second.start()
  second.close()
  third = runs.make(world, 1, **same).start()
  for one in (first, third):
    one.close()


def test_a_snapshot_whose_source_dies_is_taken_from_another():
  world = embedded.World()
  stop, begun = threading.Event(), threading.Event()

  def train(replica, result):
    while not stop.is_set():
      replica.step(runs.compute(replica, 0)[0])
      begun.set()

  with runs.Faults({("serving", i, 1): runs.kill for i in (1, 2)}) as faults:
    threads, results = begin(world, range(3), train, k=1, n=3, **MOVED)
    assert begun.wait(10.0)
    # Both others die as they serve; the chief is asked last.
    late = runs.make(world, 3, k=1, n=3, **MOVED)
    late.start()
    assert late.global_step > 0
    stop.set()
    late.leave()
    late.close()
    runs.finish(threads)
  killed = {replica for _, replica, _ in faults.done}
  assert killed
  for i, result in results.items():
    expected = runs.Killed if i in killed else type(None)
    assert type(result.error) is expected, results


def test_a_step_of_one_replica_is_not_lost_with_it():
  # A witness has its outcome before it is committed.
  def train(replica, result):
    if replica.replica == 1:
      replica.step(runs.compute(replica, 0)[0])
      result.value = replica.fingerprint()
      raise runs.Killed
    assert replica.wait_until_stale(5.0)
    replica.abandon()
    assert replica.global_step == 1
    replica.step(runs.compute(replica, 1)[0])
    assert replica.global_step == 2

  results = runs.run(train, 2, k=1, **MOVED)
  assert results[0].error is None
  assert isinstance(results[1].error, runs.Killed)


def test_when_all_have_died_a_newcomer_is_told():
  world = embedded.World()

  def train(replica, result):
    replica.step(runs.compute(replica, 0)[0])
    raise runs.Killed

  threads, results = begin(world, range(2), train, **MOVED)
  runs.finish(threads)
  assert [type(r.error) for r in results.values()] == [runs.Killed] * 2
  late = runs.make(world, 0, k=2, n=2, timeout=1.0, attempt_timeout=0.5)
  with pytest.raises(coordinator.CoordinatorError, match="from a checkpoint"):
    late.start()
  late.close()


def test_a_job_that_starts_anew_averages_nothing_old():
  """The service went on; a name of its own keeps the new run apart."""
  world = embedded.World()

  def train(replica, result):
    replica.step(runs.compute(replica, 0)[0])
    if replica.replica == 0:
      replica.step(runs.compute(replica, 1)[0])  # It waits for the other.
    raise runs.Killed

  threads, _ = begin(world, range(2), train, timeout=2.0, run="one")
  runs.finish(threads)
  again, second = begin(world, range(2), runs.to_step(3), run="two")
  runs.finish(again)
  fresh = runs.run(runs.to_step(3), 2)
  assert [r.error for r in second.values()] == [None] * 2
  for a, b in zip(second.values(), fresh, strict=True):
    assert a.prints == b.prints


def test_two_runs_share_a_board():
  # TensorFlow issue 11071: two optimizers in one job shared their queues.
  world = embedded.World()
  one, first = begin(world, range(2), runs.to_step(6), run="one", **MOVED)
  two, second = begin(
    world,
    range(2),
    runs.to_step(6),
    run="two",
    params={"w": jnp.ones(900)},
    **MOVED,
  )
  runs.finish(one + two)
  for result in [*first.values(), *second.values()]:
    assert result.error is None
    assert result.counts["applied"] == 6
  assert first[0].prints == first[1].prints
  assert second[0].prints == second[1].prints
  assert not first[0].prints.items() & second[0].prints.items()


def test_replicas_that_have_diverged_are_told_apart():
  def train(replica, result):
    for number in range(6):
      if replica.replica == 1 and number == 3:
        # What a broken memory would do.
        f = replica._follower
        with f.changed:
          f.shared = jax.tree.map(lambda x: x + 1, f.shared)
      replica.step(runs.compute(replica, number)[0])

  results = runs.run(train, 2, fingerprint_every=1)
  for result in results:
    assert isinstance(result.error, coordinator.Diverged)
    assert "hold different parameters" in str(result.error)


def test_the_end_of_the_board_ends_every_wait():
  world = embedded.World()

  def train(replica, result):
    if replica.replica == 0:
      threading.Timer(0.2, replica._engine.board.close).start()
      replica.step(runs.compute(replica, 0)[0])
    else:
      time.sleep(1.0)

  began = time.monotonic()
  threads, results = begin(world, range(2), train, timeout=3.0)
  runs.finish(threads)
  assert time.monotonic() - began < 6.0
  assert isinstance(
    results[0].error, coordinator.CoordinatorError | engine.BoardLost
  )
