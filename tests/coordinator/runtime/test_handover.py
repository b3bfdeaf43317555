"""What the event loop hands over to the training loop."""

import threading
import types

import pytest

from optax_dist.coordinator.runtime.handover import Handover


@pytest.fixture(name="shared")
def _shared():
  return Handover(published=None)


def test_a_wait_ends_when_notified(shared):
  waits = threading.Event()

  def ready():
    waits.set()
    return shared.admission == 1

  found = []
  thread = threading.Thread(target=lambda: found.append(shared.wait(ready, 60)))
  thread.start()
  assert waits.wait(30.0)
  shared.admission = 1
  shared.tell()
  thread.join(30.0)
  assert found == [True]


@pytest.mark.parametrize("over", [{"finished": "done"}, {"failure": OSError()}])
def test_a_wait_ends_with_the_run(shared, over):
  vars(shared).update(over)
  assert not shared.wait(lambda: False, 60.0)
  # What has come before the end counts.
  assert shared.wait(lambda: True, 60.0)


def test_a_wait_has_an_end(shared):
  assert not shared.wait(lambda: False, 0.01)


def test_the_answers_to_past_submissions_are_forgotten(shared):
  answers = [types.SimpleNamespace(sequence=n) for n in (3, 4)]
  for answer in answers:
    shared.resolve(answer, f"before {answer.sequence}")
  assert [shared.answer(n) for n in (3, 4)] == answers
  assert shared.before(4) == "before 4"
  shared.forget(4)
  assert [shared.answer(n) for n in (3, 4)] == [None, answers[1]]


def test_old_progress_is_forgotten_but_for_what_is_saved(shared):
  shared.to_save = types.SimpleNamespace(step=5)
  for step in range(1000):
    shared.progressed(step, f"as of {step}")
    assert len(shared.progress) <= 257
  assert shared.progress[5] == "as of 5"
  # A replica may be some steps behind.
  assert all(shared.progress[step] for step in range(900, 1000))


def test_the_progress_of_steps_that_the_training_loop_holds_is_kept(shared):
  held = [3, 7]
  shared.held = lambda: held
  for step in range(600):
    shared.progressed(step, f"as of {step}")
  assert {3, 7} <= shared.progress.keys()
  held.clear()
  for step in range(600, 1000):
    shared.progressed(step, f"as of {step}")
  assert not {3, 7} & shared.progress.keys()
