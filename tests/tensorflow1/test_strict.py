"""Strict mode: recordings of SyncReplicasOptimizer, and its decisions."""

import jax
import pytest
import quorum_recordings
import scenario_recordings as recorded
import sync_replicas_recordings as sync
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_dist import quorum, tensorflow1
from optax_dist.tensorflow1 import events as tf

CANDIDATES = sync.steps()
REPLAYED = [
  id
  for id in CANDIDATES
  if quorum_recordings.not_replayed(recorded.RECORDINGS[id]) is None
]


@pytest.mark.parametrize("id", REPLAYED)
def test_replay_decides_as_recorded(id):
  recording = recorded.RECORDINGS[id]
  config = sync.config_of(recording)
  with jax.enable_x64(config.get("dtype") == "float64"):
    system = quorum_recordings.QuorumSystem(config)
    assert sync.Runner(recording, system).run()


@pytest.mark.skipif(recorded.PATH != recorded.BUNDLED, reason="another file")
def test_how_many_recordings_are_replayed():
  assert (len(REPLAYED), len(CANDIDATES)) == (32, 42)


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(0, 3)))
@settings(max_examples=60)
def test_events_and_decisions_describe_the_system(k, n, arrivals):
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


def test_a_step_that_is_yet_to_come_counts_as_in_tensorflow():
  """Its accumulators refuse what is late alone; staleness is then below 0."""
  state, _ = quorum.step(tensorflow1.strict_quorum(1), quorum.Join(0))
  state, decisions = quorum.step(state, quorum.Arrive(0, 3))
  assert decisions[0] == quorum.Accept(0, 3, -3, 1)
  member = quorum.Contribution(0, 3, -3, 1, 1.0, 0)
  assert decisions[1] == quorum.Commit(0, (member,), 1)
  assert state.step == 1


def test_an_unknown_worker_can_not_be_lost():
  state = tensorflow1.strict_quorum(2)
  for event in (quorum.Lost(5), quorum.Leave(5)):
    assert quorum.step(state, event) == (state, ())
