"""The strict rules against a naive model, over random events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_dist import quorum, tensorflow1
from optax_dist.tensorflow1 import events as tf


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


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(0, 3)))
@settings(max_examples=60)
def test_events_and_decisions_tell_what_the_system_does(k, n, arrivals):
  tokens = max(0, k - n)
  state = tensorflow1.strict_quorum(k, n, num_tokens=tokens)
  system = tf.sync_replicas(k, n, num_tokens=tokens, workers=())
  local = {}
  for replica in range(n):
    state, decisions = quorum.step(state, quorum.Join(replica))
    system = system.join(replica)
    assert decisions == (quorum.Token(replica, 0),)
    local[replica] = 0
  commits = []
  for replica in arrivals:
    if replica not in quorum.missing(state).computing:
      continue
    at = local[replica]
    state, decisions = quorum.step(state, quorum.Arrive(replica, at))
    system, _ = system.worker_step(replica)
    assert state.system == system
    first, *rest = decisions
    fresh = quorum.accepts(at, sum(map(bool, commits)))
    assert isinstance(first, quorum.Accept if fresh else quorum.Drop)
    for decision in rest:
      match decision:
        case quorum.Token(who, step):
          local[who] = step
        case quorum.Commit(step, members):
          assert step == len(commits)
          assert len(members) == k
          commits.append(members)
        case quorum.Wait(who, _):
          assert who == replica
          assert who in system.observe().blocked
  assert local == system.observe().local_step
  assert len(commits) == state.step == system.global_step
  ledger = quorum.ledger(state)
  assert ledger.arrived == ledger.applied + ledger.inside + sum(
    ledger.dropped.values()
  )
  assert ledger.applied == k * len(commits)


def test_strict_rules_keep_a_dead_replicas_gradient():
  state = tensorflow1.strict_quorum(2, num_tokens=0)
  for event in (quorum.Join(0), quorum.Join(1), quorum.Arrive(1, 0)):
    state, _ = quorum.step(state, event)
  state, decisions = quorum.step(state, quorum.Lost(1))
  assert decisions == ()
  state, decisions = quorum.step(state, quorum.Arrive(0, 0))
  assert [type(d).__name__ for d in decisions] == ["Accept", "Commit", "Token"]
  assert [m.replica for m in decisions[1].members] == [1, 0]


def test_strict_rules_end_by_closing_the_queue():
  state = tensorflow1.strict_quorum(2, num_tokens=0)
  for event in (quorum.Join(0), quorum.Join(1), quorum.Arrive(1, 0)):
    state, _ = quorum.step(state, event)
  state, decisions = quorum.step(state, quorum.Finish())
  assert decisions == (quorum.Finished(0),)
  assert state.finished
  assert not state.system.running
  state, decisions = quorum.step(state, quorum.Arrive(0, 0))
  assert decisions[-1] == quorum.Finished(0)


def test_too_few_initial_tokens_are_refused():
  with pytest.raises(ValueError, match="Too few tokens"):
    tensorflow1.strict_quorum(2, 2, num_tokens=-2)
