"""What the event loop hands over to the training loop."""

import threading

import pytest

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.runtime.inbox import Published, TrainingInbox
from optax_dist.coordinator.runtime.states import State

START, NEXT = State(0, "start"), State(1, "next")


@pytest.fixture(name="shared")
def _shared():
  made = TrainingInbox(START)
  made.keeps_before = True
  return made


def test_a_wait_ends_when_woken(shared):
  waits = threading.Event()

  def ready():
    waits.set()
    return shared.incarnation == 7

  result = []
  thread = threading.Thread(
    target=lambda: result.append(shared.wait(ready, 60))
  )
  thread.start()
  assert waits.wait(30.0)
  shared.notify(fx.Admitted(7))
  shared.wake()
  thread.join(30.0)
  assert result == [True]


@pytest.mark.parametrize("over", [{"finished": "done"}, {"failure": OSError()}])
def test_a_wait_ends_with_the_run(shared, over):
  vars(shared).update(over)
  assert not shared.wait(lambda: False, 60.0)
  # What has come before the end counts.
  assert shared.wait(lambda: True, 60.0)


def test_a_wait_has_an_end(shared):
  assert not shared.wait(lambda: False, 0.01)


def test_the_answers_to_past_submissions_are_forgotten(shared):
  answers = [fx.Taken(3), fx.Resolved(4, "", 1)]
  shared.notify(answers[0])
  shared.notify(Published(NEXT, False))
  shared.notify(answers[1])
  assert [shared.answer(n) for n in (3, 4)] == answers
  assert shared.published is NEXT
  assert shared.before(4) is START
  shared.forget_answers(4)
  assert [shared.answer(n) for n in (3, 4)] == [None, answers[1]]


def test_no_old_state_passes_for_the_one_before_a_commit_in_a_snapshot(shared):
  snapshot = State(9, "snapshot")
  shared.notify(Published(snapshot, False))
  shared.notify(fx.Resolved(4, "", 7))
  assert shared.before(4) is snapshot


def test_an_answer_may_come_while_others_are_forgotten(shared):
  """The event loop notifies, and the training loop forgets, in two threads."""

  class Number(int):
    def __gt__(self, other):
      shared.notify(fx.Resolved(5, "lost", 0))
      return int.__gt__(self, other)

  shared.notify(fx.Resolved(3, "lost", 0))
  shared.forget_answers(Number(4))
  assert [shared.answer(n) is None for n in (3, 5)] == [True, False]


def test_progress_is_kept_of_states_that_are_held_or_to_come(shared):
  shared.notify(Published(State(5, "saved"), True))
  for step in range(20):
    shared.notify(fx.Progressed(step, f"as of {step}"))
  shared.forget_progress((17, 3))
  assert shared.progress == {n: f"as of {n}" for n in (3, 5, 17, 18, 19)}
  shared.forget_progress((19,))
  assert shared.progress.keys() == {5, 19}


def test_the_first_failure_counts(shared):
  first = OSError("first")
  shared.fail(first)
  shared.fail(OSError("second"))
  assert shared.failure is first
  assert shared.is_over


def test_the_state_to_save_is_kept_until_the_next_one(shared):
  assert shared.to_save is None
  shared.notify(Published(NEXT, True))
  shared.notify(Published(State(2, "later"), False))
  assert (shared.to_save, shared.published.step) == (NEXT, 2)


def test_an_admission_ends_a_suspension(shared):
  shared.notify(fx.Suspended())
  assert shared.suspended
  shared.notify(fx.Admitted(9))
  assert (shared.incarnation, shared.suspended) == (9, False)
