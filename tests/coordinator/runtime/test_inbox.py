"""What the event loop hands over to the training loop."""

import pytest

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.runtime.inbox import Published, TrainingInbox
from optax_dist.coordinator.runtime.states import State

START = State(0, "start")


@pytest.fixture(name="shared")
def _shared():
  made = TrainingInbox(START)
  made.keeps_before = True
  return made


def test_snapshot_is_the_state_before_the_commits_it_contains(shared):
  snapshot = State(9, "snapshot")
  shared.notify(Published(snapshot, False))
  shared.notify(fx.Resolved(4, "", 7))
  assert shared.before(4) is snapshot


def test_answer_that_arrives_while_others_are_forgotten_is_kept(shared):
  """The event loop notifies, and the training loop forgets, in two threads."""

  class Number(int):
    def __gt__(self, other):
      shared.notify(fx.Resolved(5, "lost", 0))
      return int.__gt__(self, other)

  shared.notify(fx.Resolved(3, "lost", 0))
  shared.forget_answers(Number(4))
  assert [shared.answer(n) is None for n in (3, 5)] == [True, False]
