"""The whole system against a naive model, over random events, and its edges."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tensorflow1 import events as tf


class Model:
  """TensorFlow's system, as one would write it down with lists."""

  def __init__(self, k, total, tokens, variables, gated, workers):
    self.k, self.total, self.gated = k, total, gated
    self.step, self.queue, self.waiting = 0, [0] * tokens, []
    self.sums = [[] for _ in range(variables)]
    self.steps, self.taken = [0] * variables, [False] * variables
    self.local = dict.fromkeys(workers, 0)
    self.todo = {worker: [] for worker in workers}
    self.permits = {}

  def push(self, worker, variable):
    self.todo[worker].remove(variable)
    if self.local[worker] >= self.steps[variable]:
      self.sums[variable].append(worker)
    if not self.todo[worker]:
      self.waiting.append(worker)
    self.settle()

  def settle(self):
    moved = True
    while moved:
      moved = False
      for variable, members in enumerate(self.sums):
        if not self.taken[variable] and len(members) >= self.k:
          members.clear()
          self.steps[variable] += 1
          self.taken[variable] = moved = True
      if all(self.taken):
        self.step += 1
        self.queue += [self.step] * max(self.total, self.k)
        self.taken = [False] * len(self.taken)
        moved = True
      while self.queue and self.waiting:
        self.local[self.waiting.pop(0)] = self.queue.pop(0)
        moved = True

  def worker_step(self, worker):
    self.todo[worker] = list(range(len(self.sums)))
    for variable in range(len(self.sums)):
      if variable not in self.gated:
        self.push(worker, variable)
      elif self.permits.get((worker, variable), 0):
        self.permits[worker, variable] -= 1
        self.push(worker, variable)

  def release_gate(self, worker, variable):
    if variable in self.todo[worker]:
      self.push(worker, variable)
    else:
      key = worker, variable
      self.permits[key] = self.permits.get(key, 0) + 1

  def observe(self):
    blocked = [w for w in self.local if self.todo[w] or w in self.waiting]
    counts = tuple(len(members) for members in self.sums)
    return self.step, len(self.queue), counts, self.local, tuple(blocked)


@given(
  k=st.integers(1, 5),
  total=st.integers(1, 4),
  extra=st.integers(0, 3),
  variables=st.integers(1, 3),
  gate_last=st.booleans(),
  moves=st.lists(
    st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 2)), max_size=60
  ),
)
@settings(max_examples=150)
def test_the_system_does_as_a_naive_model(
  k, total, extra, variables, gate_last, moves
):
  tokens = max(0, k - total) + extra
  gated = {variables - 1} if gate_last else set()
  system = tf.sync_replicas(
    k,
    total,
    num_tokens=tokens,
    num_variables=variables,
    gated_variables=gated,
    workers=range(4),
  )
  model = Model(k, total, tokens, variables, gated, range(4))
  for stepping, worker, variable in moves:
    if stepping and worker not in system.observe().blocked:
      system, _ = system.worker_step(worker)
      model.worker_step(worker)
    elif not stepping and variable in gated:
      system, _ = system.release_gate(worker, variable)
      model.release_gate(worker, variable)
    assert tuple(system.observe()) == model.observe()


def test_only_a_live_idle_worker_can_step():
  system = tf.sync_replicas(2, num_tokens=0)
  with pytest.raises(ValueError, match="worker 'x' has not joined"):
    system.worker_step("x")
  system, _ = system.worker_step(0)
  with pytest.raises(ValueError, match="worker 0 is blocked"):
    system.worker_step(0)


def test_a_dead_worker_takes_no_token_and_leaves_its_gradient():
  system = tf.sync_replicas(2, 3, num_tokens=0)
  system, _ = system.worker_step(0)
  system = system.lost(0)
  assert system.observe().num_accumulated == (1,)
  assert 0 not in system.observe().local_step
  system, out = system.worker_step(1)
  # Three tokens, of which one is taken: the dead one's request is gone.
  assert system.observe().queue_size == 2
  assert out[1].members == ((0, 0), (1, 0))


def test_a_new_session_begins_at_the_present_step():
  system = tf.sync_replicas(1, 2)
  system, _ = system.worker_step(0)
  system = system.join(1)
  assert system.observe().local_step == {0: 0, 1: 1}


def test_a_permit_is_kept_for_a_later_step_and_used_once():
  system = tf.sync_replicas(1, 1, num_tokens=0, gated_variables=[0])
  for _ in range(2):
    system, out = system.release_gate(0, 0)
    assert out == ()
  for step in (1, 2):
    system, _ = system.worker_step(0)
    assert system.observe().global_step == step
  system, _ = system.worker_step(0)
  assert system.observe().blocked == (0,)


def test_a_restarted_leader_finds_the_queue_and_accumulators():
  system = tf.sync_replicas(2, num_tokens=0)
  system, _ = system.close()
  for worker in (0, 1):
    system, out = system.worker_step(worker)
  assert not system.running
  assert system.observe().num_accumulated == (2,)
  system, out = system.start_chief()
  assert out[0].members == ((0, 0), (1, 0))
  assert system.observe().global_step == 1


def test_setting_the_step_keeps_gradients_and_other_workers_steps():
  system = tf.sync_replicas(2, num_tokens=0)
  system, _ = system.worker_step(1)
  system, _ = system.chief_init(5)
  seen = system.observe()
  assert (seen.global_step, seen.num_accumulated) == (5, (1,))
  assert seen.local_step == {0: 5, 1: 0}
  # The leader need not be a worker.
  assert tf.sync_replicas(1, workers=[3]).chief_init(5)[0].observe() == (
    *(5, 1, (0,)),
    {3: 0},
    (),
  )


def test_too_few_tokens_for_a_first_step_are_refused():
  system = tf.sync_replicas(3, 2)
  with pytest.raises(ValueError, match=r"0 \(given\) vs 1 \(needed\)"):
    system.enqueue_tokens(0)
  system, _ = system.enqueue_tokens(1)
  assert system.observe().queue_size == 4
