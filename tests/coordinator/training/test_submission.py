"""What a replica sums and submits; the simulation has all orders of events."""

import types

import pytest

from optax_dist.coordinator.protocol.effects import Resolved, Taken
from optax_dist.coordinator.training.submission import Submission


class Told:
  """What an event loop has notified: `answers`, and the rest."""

  def __init__(self, **fields):
    self.published = types.SimpleNamespace(step=0)
    self.requested = self.incarnation = 1
    self.suspended, self.finished = False, None
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
  submission.resume(seen.incarnation, seen.published)
  return submission


def give(submission, seen, gradient=1):
  submission.draws.keep()
  submission.add(gradient, f"{gradient}", 0.5)
  return submission.submit(True) if submission.is_complete else None


def answer(seen, reason, sequence, partial_only=False):
  seen.answers[sequence] = Resolved(
    sequence, reason, 0, partial_only=partial_only
  )


def test_a_sum_is_submitted_once_it_has_what_was_asked_for():
  seen = Told(requested=2)
  submission = begin(seen)
  assert give(submission, seen, 3) is None
  submitted = give(submission, seen, 4)
  assert submission.total == 7
  assert (submitted.total, submitted.count) == (2, 2)
  assert (submitted.batches, submitted.compute) == ("[3,4]", 1.0)
  assert submission.waits() == "for this step's commit"
  seen.publish()
  answer(seen, "", 0)
  assert not submission.waits()
  submission.on_answer()
  assert submission.ended.applied.sequence == 0
  assert submission.counts == {"applied": 2}


def partial_sum(max_staleness=0):
  """A gradient is with the coordinator, which requests another one."""
  seen = Told()
  submission = begin(seen, max_staleness=max_staleness)
  give(submission, seen, 3)
  seen.answers[0] = Taken(0)
  submission.on_answer()
  return seen, submission


def test_what_is_added_to_a_partial_sum_is_submitted_with_it():
  seen, submission = partial_sum()
  submitted = give(submission, seen, 4)
  assert (submitted.total, submitted.count) == (2, 1)
  assert submission.total == 7


def test_what_is_added_to_a_decided_sum_is_superseded():
  seen, submission = partial_sum()
  seen.requested = 3
  give(submission, seen, 4)
  answer(seen, "lost", 0)
  give(submission, seen, 5)
  assert submission.counts == {"applied": 0, "lost": 1, "superseded": 1}
  assert submission.total == 5


def test_no_other_sum_begins_on_a_step_in_which_a_partial_sum_counts():
  seen, submission = partial_sum(max_staleness=1)
  seen.publish()
  answer(seen, "", 0)
  assert give(submission, seen, 4) is None
  assert submission.counts == {"applied": 1, "superseded": 1}
  assert submission.ended.reason == "superseded"
  assert not submission.waits()


def test_a_partial_sum_may_have_an_outcome_of_its_own():
  seen, submission = partial_sum()
  give(submission, seen, 4)
  answer(seen, "stale", 1, partial_only=True)
  assert submission.waits() == "for the commit of its partial sum"
  answer(seen, "", 0)
  assert not submission.waits()
  submission.on_answer()
  assert submission.counts == {"applied": 1, "stale": 1}
  # Its parameters were not stale, so it need not wait for newer ones.
  assert not submission.waits()


@pytest.mark.parametrize("abandoned", [False, True])
def test_a_late_gradient_is_reported_without_its_numbers(abandoned):
  seen = Told()
  submission = begin(seen)
  seen.publish()
  if abandoned:
    submission.abandon()
    submitted = submission.submit(True)
  else:
    submitted = give(submission, seen)
  assert submission.total is None
  assert (submitted.total, submitted.local_step) == (1, 0)
  assert submitted.compute == (None if abandoned else 0.5)


@pytest.mark.parametrize("admitted_again", [False, True])
def test_after_a_stale_gradient_it_waits_for_newer_parameters(admitted_again):
  """Or until it is admitted again, with those of then."""
  seen = Told()
  submission = begin(seen)
  give(submission, seen)
  answer(seen, "stale", 0)
  submission.on_answer()
  assert submission.waits().startswith("for newer parameters")
  if admitted_again:
    seen.incarnation += 1
  else:
    seen.publish()
  assert not submission.waits()


def test_the_samples_of_local_steps_are_submitted_together():
  seen = Told(lease=(1, ((0, 4),)))
  submission = begin(seen, samples=2)
  assert submission.draw() == ((0, 2),)
  assert submission.draw() == ((0, 2),)  # Without a gradient, again.
  submission.draws.keep()
  assert submission.draw() == ((2, 4),)
  assert give(submission, seen).data == ((0, 4),)


def test_local_steps_on_samples_that_are_leased_no_more_end_the_sum():
  """Otherwise the rest of the new lease might not fill a round."""
  seen = Told(lease=(1, ((0, 4),)))
  submission = begin(seen, samples=2)
  submission.draw()
  submission.draws.keep()
  seen.lease = 1, ()
  assert submission.can_draw()
  seen.lease = 1, ((8, 12),)
  assert submission.draw() is None
  assert submission.ended.reason == "superseded"
  submission.resume(seen.incarnation, seen.published)
  assert submission.draw() == ((8, 10),)


def test_local_steps_that_may_count_yet_go_on_while_others_commit():
  seen = Told(lease=(1, ((0, 4),)))
  submission = begin(seen, samples=2, max_staleness=1)
  submission.draw()
  submission.draws.keep()
  seen.publish()
  assert submission.draw() == ((2, 4),)


def test_a_new_membership_draws_samples_of_its_own():
  seen = Told(lease=(1, ((0, 4),)))
  submission = begin(seen, samples=2)
  submission.draw()
  submission.draws.keep()
  submission.draw()
  seen.lease = 1, ()
  seen.incarnation = 2
  assert submission.finish_if_over(1)
  # Others compute on what it had.
  assert submission.ended.forgets
  assert submission.counts == {"applied": 0, "lost": 1}
  submission.resume(seen.incarnation, seen.published)
  seen.lease = 2, ((8, 12),)
  assert submission.draw() == ((8, 10),)


def partial():
  """A sum on two samples, of which the coordinator has asked for one gradient more."""
  seen = Told(lease=(1, ((0, 2),)))
  submission = begin(seen, samples=2)
  submission.draw()
  give(submission, seen)
  seen.answers[0] = Taken(0)
  submission.on_answer()
  return submission, seen


def test_a_decided_partial_sum_leaves_its_lease_to_the_next_one():
  submission, seen = partial()
  assert not submission.can_draw()
  answer(seen, "lost", 0)
  assert submission.can_draw()
  seen.lease = 1, ((2, 6),)
  assert submission.draw() == ((2, 4),)
  assert submission.counts == {"applied": 0, "lost": 1}


def test_what_was_added_to_a_decided_partial_sum_is_drawn_again():
  submission, seen = partial()
  seen.lease = 1, ((2, 6),)
  submission.draw()
  assert give(submission, seen) is None
  answer(seen, "lost", 0)
  assert submission.draw() == ((2, 4),)
  assert submission.counts == {"applied": 0, "lost": 1, "superseded": 1}


def test_samples_of_a_past_membership_are_not_drawn():
  seen = Told(lease=(0, ((0, 4),)))
  submission = begin(seen, samples=2)
  assert submission.draw() is None
  assert not submission.can_draw()
  seen.incarnation += 1  # It need not wait for any: it begins another sum.
  assert submission.can_draw()


def draws(seen, spans):
  """A deterministic run of steps of eight samples, in slots of two."""
  seen.lease = (1, spans)
  return begin(seen, samples=2, window=8)


def test_a_lease_that_becomes_smaller_ends_the_sum_earlier():
  seen = Told()
  submission = draws(seen, ((0, 6),))
  assert submission.draw() == ((0, 2),)
  assert give(submission, seen, 3) is None
  assert submission.draw() == ((2, 4),)
  # Another replica has taken the rest before this one had begun it.
  seen.lease = (1, ((0, 4),))
  submitted = give(submission, seen, 4)
  assert (submitted.total, submitted.data) == (2, ((0, 4),))
  assert submission.total == 7


@pytest.mark.parametrize("before", [0, 1])
def test_a_slot_that_another_replica_has_computed_is_not_added(before):
  seen = Told()
  submission = draws(seen, ((0, 2 + 2 * before),))
  for number in range(before):
    submission.draw()
    assert give(submission, seen, number) is None
  submission.draw()
  seen.lease = (1, ((0, 2 * before),))
  submitted = give(submission, seen, 9)
  assert submission.counts == {"applied": 0, "superseded": 1}
  # What it had added to the sum before is submitted.
  assert (submitted.total if submitted else 0) == before


def test_a_sum_is_submitted_when_the_rest_is_taken_between_two_slots():
  seen = Told()
  submission = draws(seen, ((0, 4),))
  submission.draw()
  assert give(submission, seen, 3) is None
  seen.lease = (1, ((0, 2),))
  assert submission.can_draw()
  assert submission.draw() is None
  assert submission.is_complete


def test_slots_of_the_next_step_wait_for_its_parameters():
  seen = Told()
  submission = draws(seen, ((8, 10),))
  assert not submission.can_draw()
  assert submission.draw() is None
  seen.publish()
  assert submission.can_draw()
  assert submission.draw() is None
  submission.resume(seen.incarnation, seen.published)
  assert submission.draw() == ((8, 10),)


def test_a_dropped_addition_leaves_the_partial_sum():
  seen = Told()
  submission = draws(seen, ((0, 2),))
  submission.draw()
  give(submission, seen, 3)
  seen.lease = (1, ((4, 6),))
  seen.answers[0] = Taken(0)
  submission.on_answer()
  submission.draw()
  assert give(submission, seen, 4).total == 2
  answer(seen, "returned", 1, partial_only=True)
  seen.lease = (1, ((6, 8),))
  assert not submission.waits()
  submission.on_answer()
  assert (submission.total, submission.partial) == (3, 0)
  assert submission.draw() == ((6, 8),)
  submitted = give(submission, seen, 5)
  assert (submission.total, submitted.count) == (8, 1)
  assert submitted.data == ((0, 2), (6, 8))
  assert submission.counts == {"applied": 0, "returned": 1}


def test_what_is_computed_for_a_step_that_is_over_is_superseded():
  seen = Told()
  submission = draws(seen, ((0, 4),))
  submission.draw()
  give(submission, seen, 3)
  submission.draw()
  # The others have repeated its slots: the step is committed without it.
  seen.lease = (1, ((8, 12),))
  seen.publish()
  assert give(submission, seen, 4) is None
  assert submission.draw() is None
  assert submission.ended is not None
  assert submission.counts == {"applied": 0, "superseded": 2}


def test_a_report_of_a_stale_sum_extends_nothing():
  seen, submission = partial_sum(max_staleness=0)
  seen.publish()
  submitted = give(submission, seen, 4)
  assert submitted.count == submitted.total
  # Nor does it have what the coordinator has already.
  assert (submitted.total, submitted.batches) == (1, "[4]")


def test_an_abandoned_sum_goes_on_while_it_may_count():
  seen = Told(requested=2)
  submission = begin(seen, max_staleness=1)
  give(submission, seen)
  seen.publish()
  submission.abandon()
  assert submission.ended is None
  assert submission.total == 1


def test_an_abandoned_gradient_of_a_past_step_ends_a_sum_that_has_none():
  seen = Told()
  submission = begin(seen, max_staleness=1)
  seen.publish()
  submission.abandon()
  assert submission.ended.reason == "abandoned"
  assert submission.counts == {"applied": 0, "abandoned": 1}


@pytest.mark.parametrize(
  ("reason", "waits"),
  [("lost", "to be admitted again"), ("finished", "for the end of the run")],
)
def test_a_sum_that_is_lost_or_too_late_is_followed_by_no_other(reason, waits):
  seen = Told()
  submission = begin(seen)
  give(submission, seen)
  answer(seen, reason, 0)
  submission.on_answer()
  seen.suspended = reason == "lost"
  assert submission.waits() == waits
  seen.suspended, seen.finished = False, "enough"
  assert not submission.waits()


def test_an_abandoned_gradient_is_computed_on_the_same_samples_again():
  seen = Told(lease=(1, ((0, 8),)))
  submission = begin(seen, samples=2, window=8)
  submission.draw()
  submission.draws.keep()
  submission.abandon()
  assert submission.draws.drawn == ((0, 2),)
