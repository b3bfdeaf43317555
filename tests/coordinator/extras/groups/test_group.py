"""Replicas of several processes, as threads: each has a tree for its shards."""

import copy
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import ledger
from optax_dist.coordinator import errors, strategies
from optax_dist.coordinator.extras.groups import commands
from optax_dist.coordinator.extras.groups import group as groups
from optax_dist.coordinator.extras.groups.inbox import GroupInbox
from optax_dist.coordinator.options import Options
from optax_dist.coordinator.replica import Replica
from optax_dist.coordinator.runtime import endpoint, process_exit, states
from optax_dist.coordinator.training.participant import Participant

SIZE = 2
PATIENT = {"timeout": 60.0, "transfer_timeout": 20.0, "silence_timeout": 10.0}
OPT = optax.sgd(0.1, momentum=0.9)
SYNC = strategies.SyncReplicas(OPT, strategies.Quorum(1, 1))


def start_params(process):
  """As if it were sharded: what each process has is its own."""
  return {"b": jnp.full((4 + process,), 0.5), "w": jnp.ones((5, 30)) * process}


@jax.jit
def gradient(params, batch):
  return jax.tree.map(
    lambda x: 0.1 * x + jnp.sin(batch.astype(x.dtype)), params
  )


class Gatherer:
  """Stands in for `process_allgather`, between threads."""

  def __init__(self, count):
    self.texts = [""] * count
    self.barrier = threading.Barrier(count, timeout=60.0)

  def __call__(self, process, text):
    self.texts[process] = text
    self.barrier.wait()
    result = list(self.texts)
    self.barrier.wait()
    return result


class Job:
  """Threads of all processes of all replicas; what they did, by both."""

  def __init__(self, replicas, needed=None, data=None, **settings):
    self.world, self.data = endpoint.World(), data
    self.replicas, self.needed = replicas, needed or replicas
    self.settings = settings
    self.threads, self.results, self.errors = [], {}, {}
    self.losses, self.live = [], {}

  def start(self, replica, train, sizes=SIZE):
    gatherer = Gatherer(sizes)
    for process in range(sizes):
      thread = threading.Thread(
        target=self._run, args=(replica, process, sizes, gatherer, train)
      )
      self.threads.append(thread)
      thread.start()

  def _run(self, replica, process, sizes, gatherer, train):
    # Compiled once.
    strategy = copy.copy(SYNC)
    strategy.quorum = strategies.Quorum(
      self.needed, self.replicas, lower_on_loss=True
    )
    key = (replica, process)
    try:
      group = groups.Group(
        process,
        sizes,
        lambda text: gatherer(process, text),
        lambda reason: self.losses.append((key, reason)),
      )
      participant = Participant(
        self.world.connect(f"{replica}.{process}"),
        strategy,
        start_params(process),
        replica=replica,
        settings=Options(**(PATIENT | self.settings)),
        processes=group,
        data=self.data,
      )
      one = Replica(participant)
      self.live[key] = one
      with one.start():
        self.results[key] = train(one, process)
    except BaseException as error:
      self.errors[key] = error

  def join(self):
    for thread in self.threads:
      thread.join(120.0)
    assert not any(thread.is_alive() for thread in self.threads)


def to_step(target):
  def train(replica, process):
    seen = {}
    number = 0
    while replica.global_step < target:
      batch = jnp.asarray(100 * replica.replica + number)
      outcome = replica.step(gradient(replica.params, batch), batch=number)
      number += 1
      seen.setdefault("first", replica.stats())
      seen[replica.global_step] = (
        replica.fingerprint(),
        outcome._replace(waited=0.0),
      )
      if outcome.finished:
        break
    seen["stats"] = replica.stats()
    seen["params"] = replica.params
    return seen

  return train


def check_equal(job, steps):
  """Processes of equal rank hold the same, and all have the same outcomes."""
  assert not job.errors, job.errors
  for step in steps:
    for process in range(SIZE):
      prints = {
        seen[step][0]
        for (_, p), seen in job.results.items()
        if p == process and step in seen
      }
      assert len(prints) == 1, (step, process)
  for replica in {r for r, _ in job.results}:
    raised = [
      {s: o for s, (_, o) in ((s, v) for s, v in seen.items() if s in steps)}
      for (r, _), seen in job.results.items()
      if r == replica
    ]
    assert all(t == raised[0] for t in raised)


def test_each_process_exchanges_its_own_shards_and_no_more():
  job = Job(3, fingerprint_every=2)
  for replica in range(3):
    job.start(replica, to_step(6))
  job.join()
  check_equal(job, range(1, 7))
  for process in range(SIZE):
    # By hand: the mean of all three, in order.
    params = start_params(process)
    state = OPT.init(params)
    for step in range(6):
      grads = [gradient(params, jnp.asarray(100 * r + step)) for r in range(3)]
      mean = jax.tree.map(lambda *x: sum(x[1:], x[0]) / 3, *grads)
      updates, state = OPT.update(mean, state, params)
      params = optax.apply_updates(params, updates)
    for replica in range(3):
      seen = job.results[replica, process]
      jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6),
        seen["params"],
        params,
      )
      # 2P(k-1)/k in each direction together, where P includes what aligns it.
      # The first step may take two attempts, for replicas join one by one, and
      # the second have begun before this replica counts.
      total = 4 * (16 + 160)
      moved = sum(
        seen["stats"][way] - seen["first"][way]
        for way in ("bytes_in", "bytes_out")
      )
      each = 4 * total * 2 / 3
      assert 4 * each * 0.9 <= moved <= 5 * each * 1.1


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_all_processes_compute_on_the_same_samples(micro_batch):
  slots = {"micro_batch": micro_batch, "deterministic": bool(micro_batch)}
  data = ledger.Batches(26, 12, seed=3, **slots)
  needed = data.slots if micro_batch else 2
  job = Job(2, needed, data=data)
  # One replica may take all steps of a deterministic run.
  together = threading.Barrier(2 * SIZE)

  def train(replica, process):
    together.wait(60.0)
    drawn, sums, counted = [], [], []
    for indices in replica.batches():
      drawn.append(indices.tolist())
      sums += indices.tolist()
      outcome = replica.step(
        gradient(replica.params, jnp.asarray(indices.sum()))
      )
      if outcome.accepted and not outcome.members:
        continue
      if outcome.accepted:
        counted += sums
      sums = []
    return drawn, counted, replica.report_data(), replica.fingerprint()

  for replica in range(2):
    job.start(replica, train)
  job.join()
  assert not job.errors, job.errors
  result = job.results
  for replica in range(2):
    assert result[replica, 0][:3] == result[replica, 1][:3]
  for process in range(SIZE):
    assert result[0, process][2:] == result[1, process][2:]
  counted = result[0, 0][1] + result[1, 0][1]
  report = ledger.report(data, ledger.Progress(24))
  assert result[0, 0][2] == report
  if micro_batch is None:
    # Otherwise another replica may have taken over a slot that was computed here.
    assert sorted([*counted, *report[0].left_out]) == list(range(26))


def test_a_slot_counts_as_zeros_for_all_processes_if_one_finds_it_not_finite():
  data = ledger.Batches(24, 12, micro_batch=3, deterministic=True)
  job = Job(1, data.slots, data=data)

  def train(replica, process):
    for slot in replica.micro_batches():
      grads = jax.tree.map(jnp.ones_like, replica.params)
      if (slot.step, slot.number, process) == (1, 2, 1):
        grads["w"] = grads["w"].at[3].set(jnp.nan)
      replica.step(grads)
    return replica.report_data(), replica.params

  job.start(0, train)
  job.join()
  assert not job.errors, job.errors
  for process in range(SIZE):
    (report,), params = job.results[0, process]
    assert len(report.skipped) == 3
    # Means of ones, and of three in four: by momentum 1, and 0.9 + 0.75.
    want = start_params(process)["b"] - 0.1 * (1.0 + 1.65)
    np.testing.assert_allclose(params["b"], want, rtol=1e-6)


def test_the_others_commit_without_a_replica_that_loses_a_process():
  job = Job(2)
  arrived = threading.Event()

  def dies(replica, process):
    for number in range(3):
      replica.step(gradient(replica.params, jnp.asarray(number)))
    if process == 1:
      raise RuntimeError("this process fails")
    # Its next step needs both.
    arrived.set()
    replica.step(gradient(replica.params, jnp.asarray(3)))

  job.start(0, to_step(8))
  job.start(1, dies)
  job.join()
  assert job.results.keys() == {(0, 0), (0, 1)}
  assert isinstance(job.errors[1, 1], RuntimeError)
  assert isinstance(job.errors[1, 0], errors.CoordinatorError)
  assert "process 1" in str(job.errors[1, 0])
  assert "this process fails" in str(job.errors[1, 0])
  assert [key for key, _ in job.losses] == [(1, 0)]
  last = job.results[0, 0][8][1]
  assert last.members == (0,)


def test_a_process_that_takes_no_step_is_named():
  short = {"timeout": 1.0, "transfer_timeout": 0.5, "silence_timeout": 0.5}
  job = Job(1, **short)
  over = threading.Event()

  def train(replica, process):
    if process == 1:
      assert over.wait(60.0)
      return
    try:
      replica.step(gradient(replica.params, jnp.asarray(0)))
    finally:
      over.set()

  job.start(0, train)
  job.join()
  assert isinstance(job.errors[0, 0], errors.CoordinatorError)
  assert "process 1" in str(job.errors[0, 0])


def test_a_replica_that_joins_later_is_sent_its_shards():
  job = Job(2, needed=1)
  inside = threading.Event()

  def first(replica, process):
    seen = {}
    finished = False
    while not finished:
      grads = gradient(replica.params, jnp.asarray(len(seen)))
      finished = replica.step(grads).finished
      seen[replica.global_step] = replica.fingerprint()
      if replica.global_step == 5 and not inside.is_set():
        if process == 0:
          job.start(1, second)
        assert inside.wait(60.0)
    return seen

  def second(replica, process):
    seen = {replica.global_step: replica.fingerprint()}
    inside.set()
    for _ in range(10):
      replica.step(gradient(replica.params, jnp.asarray(7)))
      seen[replica.global_step] = replica.fingerprint()
    replica.finish()
    seen[replica.global_step] = replica.fingerprint()
    return seen

  job.start(0, first)
  job.join()
  assert not job.errors, job.errors
  late = job.results[1, 1]
  assert min(late) >= 5
  # Its first state and its last one, at least.
  common = [s for s in late if s in job.results[0, 1]]
  assert len(common) > 1
  for process in range(SIZE):
    ours, theirs = (job.results[i, process] for i in (0, 1))
    assert [ours[s] for s in common] == [theirs[s] for s in common]


def test_replicas_of_other_sizes_are_refused():
  job = Job(2, needed=1)
  begun, refused = threading.Event(), threading.Event()

  def first(replica, process):
    begun.set()
    assert refused.wait(90.0)

  job.start(0, first)
  assert begun.wait(60.0)
  job.start(1, to_step(1), sizes=3)
  for thread in job.threads[SIZE:]:
    thread.join(60.0)
  refused.set()
  job.join()
  raised = [job.errors[1, process] for process in range(3)]
  assert all(isinstance(e, errors.JoinRefused) for e in raised), raised
  assert "processes per replica" in str(raised[2])


def test_a_collective_with_a_lost_process_ends():
  program = (
    "from optax_dist.coordinator.extras.groups import group; import time;"
    "group._GRACE = 0.1; group._end_soon('Process 1 is lost.');"
    "time.sleep(300)"
  )
  done = subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == process_exit.EXIT_CODE == 75
  assert "Process 1 is lost. This process ends, too." in done.stderr


def test_processes_at_different_calls_are_reported():
  seen = GroupInbox(states.State(0, {}), print, False, 5.0, print)
  seen.notify(commands.Advance(3, 0))
  seen.sync()
  assert "process 0 is at call 3, this one at 0" in str(seen.failure)
  late = GroupInbox(states.State(0, {}), print, False, 0.1, print)
  late.sync()
  assert "did not come to the same place" in str(late.failure)


def test_a_process_that_waits_for_process_0_looks_whether_it_has_to_leave():
  """Otherwise it says that its program does not look, and will be killed."""
  looked = []
  seen = GroupInbox(states.State(0, {}), print, False, 5.0, print)
  seen.notify(commands.Advance(0, 0, True))
  assert not seen.wait(lambda: False, 60.0, lambda: bool(looked.append(1)))
  assert looked
