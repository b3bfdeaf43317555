"""The consequences of one event, in their order."""

from tests.tensorflow1 import events as tf


def kinds(outcomes):
  return [type(outcome).__name__ for outcome in outcomes]


def test_the_step_of_all_variables_ends_with_the_last_one():
  system = tf.sync_replicas(1, 2, num_variables=2, num_tokens=0)
  system, out = system.worker_step(0)
  assert kinds(out) == [
    *("Applied", "Taken"),
    *("Applied", "Taken", "Advanced", "GotToken"),
  ]
  assert [o.variable for o in out[:4]] == [0, 0, 1, 1]
  assert out[4:] == (tf.Advanced(1), tf.GotToken(0, 1))
  assert system.taken == frozenset()


def test_the_token_of_a_former_session_is_lost():
  system = tf.sync_replicas(2, 2, num_tokens=0)
  system, _ = system.worker_step(0)
  system = system.join(0)
  system, out = system.worker_step(1)
  # Two tokens came: one is the former session's, one is worker 1's.
  assert [o.replica for o in out if isinstance(o, tf.GotToken)] == [1]
  seen = system.observe()
  assert (seen.queue_size, seen.blocked) == (0, ())
  assert seen.local_step == {0: 0, 1: 1}


def test_a_gradient_that_can_not_be_applied_ends_the_leader():
  system = tf.sync_replicas(2, 2, num_variables=2, num_tokens=0)
  system, _ = system.worker_step(0, broken=[1])
  system, out = system.worker_step(1)
  # The first variable is updated before the second one fails.
  assert kinds(out)[:3] == ["Applied", "Taken", "Applied"]
  assert out[3] == tf.StepFailed("chief", "the update failed")
  assert [o.replica for o in out[4:]] == [0, 1]
  assert all("closed" in o.error for o in out[4:])
  seen = system.observe()
  assert (seen.global_step, seen.blocked) == (0, ())
  assert not system.running
  assert system.queue.closed
  assert [a.pending for a in system.accumulators] == [(), ()]


def test_a_leader_that_ends_in_a_round_takes_no_more_in_it():
  system = tf.sync_replicas(1, 1, num_variables=2, num_tokens=3)
  system, _ = system.close()
  system, _ = system.worker_step(0, broken=[0])
  system, out = system.start_chief()
  assert out == (tf.StepFailed("chief", "the update failed"),)
  # The gradient of the second variable stays, and nobody asks for it.
  assert [a.count for a in system.accumulators] == [0, 1]
  assert system.accumulators[1].pending == ()


def test_tokens_for_a_closed_queue_end_the_leader():
  system = tf.sync_replicas(1, 1, num_tokens=0)
  system, _ = system.close()
  system, _ = system.start_chief()
  assert system.running
  system, out = system.worker_step(0)
  assert kinds(out) == [
    *("Applied", "Taken", "Advanced"),
    *("StepFailed", "StepFailed"),
  ]
  assert (out[3].replica, out[4].replica) == ("chief", 0)
  assert "FIFOQueue 'sync_token_q' is closed" in out[3].error
  assert not system.running
  assert system.observe().blocked == ()


def test_a_step_fails_for_all_that_wait_when_the_leader_ends():
  system = tf.sync_replicas(3, num_tokens=0)
  for worker in (2, 0):
    system, _ = system.worker_step(worker)
  system, out = system.close()
  assert [o.replica for o in out] == [2, 0]
  assert all(isinstance(o, tf.StepFailed) for o in out)
  # They can go on, and find the queue closed at once.
  system, out = system.worker_step(2)
  assert kinds(out) == ["Applied", "StepFailed"]
