"""Sums and submissions of a replica; the simulation has all orders of events."""

import types

import pytest

from optax_dist.coordinator.protocol.effects import Resolved, Taken
from optax_dist.coordinator.runtime.inbox import Joined
from optax_dist.coordinator.training.submission import Submission


class FakeInbox:
  """What an event loop has notified: `answers`, and the rest."""

  def __init__(self, **fields):
    self.published = types.SimpleNamespace(step=0)
    self.joined, self.requested = Joined(incarnation=1), 1
    self.finished = None
    self.lease = (1, ())
    self.answers = {}
    vars(self).update(fields)

  def answer(self, sequence):
    return self.answers.get(sequence)

  def publish(self):
    self.published = types.SimpleNamespace(step=self.published.step + 1)


def begin(seen, **options):
  add = lambda total, gradient: total + gradient
  options = {"max_staleness": 0} | options
  submission = Submission(seen, add, **options)
  submission.resume(seen.joined.incarnation, seen.published)
  return submission


def give(submission, seen, gradient=1):
  submission.draws.keep()
  submission.add(gradient, f"{gradient}", 0.5)
  return submission.submit(True) if submission.is_complete else None


def answer(seen, reason, sequence):
  seen.answers[sequence] = Resolved(sequence, reason, 0)


def test_sum_is_submitted_once_it_has_the_requested_gradients():
  seen = FakeInbox(requested=2)
  submission = begin(seen)
  assert give(submission, seen, 3) is None
  submitted = give(submission, seen, 4)
  assert submission.total == 7
  assert submitted.count == 2
  assert (submitted.batches, submitted.compute) == ("[3,4]", 1.0)
  assert submission.waits() == "for this step's commit"
  seen.publish()
  answer(seen, "", 0)
  assert not submission.waits()
  submission.on_answer()
  assert submission.ended.applied.sequence == 0
  assert submission.counts == {"applied": 2}


def taken():
  """A gradient is with the coordinator, which requests another one."""
  seen = FakeInbox()
  submission = begin(seen)
  give(submission, seen, 3)
  seen.answers[0] = Taken(0)
  submission.on_answer()
  return seen, submission


def test_each_sum_of_a_step_has_its_own_outcome():
  seen, submission = taken()
  give(submission, seen, 4)
  answer(seen, "", 0)
  answer(seen, "duplicate", 1)
  assert not submission.waits()
  submission.on_answer()
  assert submission.counts == {"applied": 1, "duplicate": 1}
  # Its parameters were not stale, so it need not wait for newer ones.
  assert not submission.waits()


def test_gradient_computed_while_the_sum_is_accepted_is_superseded():
  seen, submission = taken()
  give(submission, seen, 4)
  seen.answers[1] = Taken(1)
  submission.on_answer()
  answer(seen, "", 0)
  assert not submission.can_draw()  # The outcome of the other one is to come.
  answer(seen, "", 1)
  assert submission.can_draw()
  assert give(submission, seen, 5) is None
  assert submission.ended.reason == "superseded"
  assert submission.counts == {"applied": 2, "superseded": 1}


def test_only_the_dropped_of_two_sums_is_computed_again():
  seen, submission = taken()
  give(submission, seen, float("nan"))
  answer(seen, "non_finite", 1)
  submission.on_answer()
  submitted = give(submission, seen, 4)
  assert submission.total == 4
  assert submitted.count == 1
  assert submission.counts == {"applied": 0, "non_finite": 1}
  answer(seen, "", 0)
  answer(seen, "", 2)
  submission.on_answer()
  assert submission.counts == {"applied": 2, "non_finite": 1}


@pytest.mark.parametrize("abandoned", [False, True])
def test_a_late_gradient_is_reported_without_its_numbers(abandoned):
  seen = FakeInbox()
  submission = begin(seen)
  seen.publish()
  if abandoned:
    submission.abandon()
    submitted = submission.submit(True)
  else:
    submitted = give(submission, seen)
  assert submission.total is None
  assert (submitted.count, submitted.local_step) == (1, 0)
  assert submitted.compute == (None if abandoned else 0.5)


@pytest.mark.parametrize("admitted_again", [False, True])
def test_stale_gradient_is_followed_by_a_wait_for_newer_parameters(
  admitted_again,
):
  """Or until it is admitted again, with the parameters of that time."""
  seen = FakeInbox()
  submission = begin(seen)
  give(submission, seen)
  answer(seen, "stale", 0)
  submission.on_answer()
  assert submission.waits().startswith("for newer parameters")
  if admitted_again:
    seen.joined.incarnation += 1
  else:
    seen.publish()
  assert not submission.waits()


def test_local_steps_on_expired_leases_end_the_sum():
  """Otherwise the rest of the new lease might not fill a round."""
  seen = FakeInbox(lease=(1, ((0, 4),)))
  submission = begin(seen, samples=2)
  submission.draw()
  submission.draws.keep()
  seen.lease = 1, ()
  assert submission.can_draw()
  seen.lease = 1, ((8, 12),)
  assert submission.draw() is None
  assert submission.ended.reason == "superseded"
  submission.resume(seen.joined.incarnation, seen.published)
  assert submission.draw() == ((8, 10),)


def draws(seen, spans):
  """A deterministic run of steps of eight samples, in slots of two."""
  seen.lease = (1, spans)
  return begin(seen, samples=2, window=8)


def test_dropped_sum_of_slots_leaves_the_accepted_sum():
  seen = FakeInbox()
  submission = draws(seen, ((0, 2),))
  submission.draw()
  give(submission, seen, 3)
  # A coordinator that has started again has yet to get it.
  seen.lease = (1, ((0, 2), (4, 6)))
  seen.answers[0] = Taken(0)
  submission.on_answer()
  assert submission.draw() == ((4, 6),)
  assert give(submission, seen, 4).count == 1
  answer(seen, "returned", 1)
  seen.lease = (1, ((6, 8),))
  assert not submission.waits()
  submission.on_answer()
  assert submission.draw() == ((6, 8),)
  submitted = give(submission, seen, 5)
  assert (submission.total, submitted.count) == (5, 1)
  assert submitted.data == ((6, 8),)
  assert submission.counts == {"applied": 0, "returned": 1}


def test_slots_of_an_accepted_sum_that_is_dropped_are_computed_again():
  """As after a coordinator that has started again, which takes only some of them."""
  seen = FakeInbox(lease=(1, ((0, 2),)))
  submission = draws(seen, ())
  for sequence, spans in enumerate([((0, 2),), ((2, 4),)]):
    seen.lease = (1, spans)
    assert submission.draw() == spans
    give(submission, seen)
    seen.answers[sequence] = Taken(sequence)
    submission.on_answer()
  answer(seen, "returned", 1)
  assert submission.can_draw()
  assert submission.draw() == ((2, 4),)
