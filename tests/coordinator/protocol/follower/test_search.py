"""Tests of when a replica claims leadership, and as which member."""

import itertools

import pytest

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.entries import (
  AttemptId,
  Beat,
  Committed,
  Ended,
  Joined,
  Member,
  Part,
  Record,
  Term,
  Trimmed,
)
from optax_dist.coordinator.protocol.follower.search import (
  LeaderFound,
  Search,
  Situation,
  StartAt,
)
from optax_dist.coordinator.protocol.log import LEADER_KEY, FellOff
from optax_dist.coordinator.protocol.membership import Start, View
from optax_dist.ledger import Progress

START = Start(0, "s", Progress())
BEGINS = (
  Term(0, "p1", "at p1", True, 0, 1, 0, "s"),
  Joined(Member(1, 0, "p0", "at p0")),
)
COMMIT = Committed(
  AttemptId(0, 0, 1, 1), (Part(0, 1, 0, 0, 0, 1, 1.0),), b"m", False, (), ()
)


class Searching:
  """A replica's search, in a store that has nothing new."""

  def __init__(self, *entries, me=-1, holds=False, start=None):
    self.config = Config("p0", 0, "at p0", digest="s")
    self.search = Search(self.config, itertools.count(1).__next__)
    view = View()
    for position, entry in enumerate(entries):
      view.apply(position, Record(0, (entry,)))
    position = len(entries)
    self.situation = Situation(view, position, True, me, holds, start)
    self.store, self.said, self.fell_off = {}, [], False
    self.now = 0.0
    self.search.begin(0.0)

  def claims(self, until):
    """The terms that it claims until then."""
    claims = []
    while self.now <= until and not self.fell_off:
      todo = self.search.proceed(self.now, self.situation)
      for effect in todo:
        if isinstance(effect, fx.Put):
          claims += effect.value.entries
        elif isinstance(effect, fx.Send):
          self.said.append((self.now, effect.peer))
        elif isinstance(effect, fx.Get):
          value = self.store.get(effect.key)
          more, found = self.search.get_answered(
            ins.GetAnswered(effect.request, True, value),
            self.now,
            self.situation,
          )
          todo += more
          self.fell_off |= any(isinstance(f, FellOff) for f in found)
      self.now = self.search.deadline(self.situation)
    return claims


def test_a_process_with_the_latest_state_continues_a_run_whose_members_are_silent():
  wait = 2 * Searching().config.deadlines.pace
  (claim,) = Searching(*BEGINS, COMMIT, holds=True).claims(wait)
  # With another membership than the one that ended.
  assert (claim.term, claim.incarnation, claim.fresh) == (1, 2, False)
  assert not Searching(*BEGINS, COMMIT, holds=True).claims(0.9 * wait)
  assert not Searching(*BEGINS, COMMIT, holds=False).claims(10 * wait)


def test_a_member_that_claims_leadership_stays_the_same_member():
  (claim,) = Searching(*BEGINS, me=1).claims(60.0)
  assert (claim.term, claim.incarnation, claim.fresh) == (1, 1, False)


def test_a_run_that_has_begun_is_not_begun_anew():
  begun = Searching(*BEGINS, COMMIT, me=1, start=START)
  begun.search.end()  # It follows a leader.
  assert begun.search.take_over(begun.situation, fresh=True) == []
  untouched = Searching(*BEGINS, me=1, start=START)
  untouched.search.end()
  (put,) = untouched.search.take_over(untouched.situation, fresh=True)
  (term,) = put.value.entries
  assert (term.fresh, term.incarnation, term.digest) == (True, 2, "s")
  assert untouched.search.take_over(untouched.situation, fresh=True) == []


def test_an_answer_of_another_member_counts_until_that_member_is_silent():
  searching = Searching(*BEGINS, Joined(Member(2, 2, "p2", "at p2")), me=1)
  pace = searching.config.deadlines.pace
  assert not searching.claims(0.6 * pace)
  asked = [at for at, peer in searching.said if peer == "p2"]
  assert asked == [0.0, 0.5 * pace]
  searching.search.voted(2, True)
  # It is asked again at 1.0, and may be dead by 1.5.
  assert not searching.claims(1.4 * pace)
  (claim,) = searching.claims(1.6 * pace)
  assert claim.incarnation == 1


def test_members_that_have_all_lost_the_leader_claim_in_turn():
  searching = Searching(*BEGINS, Joined(Member(2, 2, "p2", "at p2")), me=2)
  searching.search.voted(1, False)
  assert not searching.claims(0.04)
  (claim,) = searching.claims(0.06)
  assert claim.incarnation == 2


def test_nobody_leads_a_run_that_has_ended():
  ended = Searching(*BEGINS, Ended(0, "enough", "", ()), me=1)
  assert not ended.claims(10 * ended.config.deadlines.pace)


class Beating(dict):
  """A store in which the heartbeat of a leader goes on."""

  def get(self, key):
    if key != LEADER_KEY:
      return super().get(key)
    self["beats"] = self.setdefault("beats", 0) + 1
    return Beat(0, "p1", "at p1", self["beats"], 0)


def test_one_that_hears_nobody_deposes_no_leader_that_beats_in_the_store():
  cut_off = Searching(*BEGINS, Joined(Member(2, 2, "p2", "at p2")), me=1)
  cut_off.store = Beating()
  assert not cut_off.claims(10 * cut_off.config.deadlines.pace)


def test_a_new_leader_that_is_lost_before_it_is_reached_is_replaced():
  searching = Searching(*BEGINS, me=1)
  searching.search.trust()
  assert not searching.claims(60.0)
  searching.now = 60.0
  searching.search.begin(searching.now)
  (claim,) = searching.claims(120.0)
  assert claim.incarnation == 1


def test_a_process_that_lacks_a_part_of_the_log_continues_no_run():
  searching = Searching(*BEGINS, COMMIT, holds=True)
  searching.situation = searching.situation._replace(complete=False)
  assert not searching.claims(10 * searching.config.deadlines.pace)


def test_silence_counts_from_the_loss_of_the_leader():
  other = Joined(Member(2, 2, "p2", "at p2"))
  searching = Searching(*BEGINS, other, me=1)
  pace = searching.config.deadlines.pace
  searching.search.end()
  searching.now = 10 * pace
  searching.search.begin(searching.now)
  assert not searching.claims(10.9 * pace)
  (claim,) = searching.claims(11.1 * pace)
  assert claim.incarnation == 1


def test_a_run_that_begins_anew_begins_at_the_step_and_samples_of_its_state():
  start = Start(7, "s", Progress(28))
  begins = Term(0, "p1", "at p1", True, 0, 1, 7, "s")
  other = Joined(Member(1, 0, "p0", "at p0"))
  searching = Searching(begins, other, me=1, start=start)
  searching.search.end()
  (put,) = searching.search.take_over(searching.situation, fresh=True)
  (term,) = put.value.entries
  assert (term.fresh, term.step, term.progress) == (True, 7, Progress(28))


@pytest.mark.parametrize("failed", [False, True])
def test_a_new_replica_reads_the_log_if_the_leader_has_not_answered(failed):
  """The log says whether the run has ended, and who leads it now."""
  searching = Searching()
  searching.situation = Situation(View(), -1, False, -1, False, None)
  if failed:
    searching.search.unreachable["p1"] = 0.0
  (get,) = searching.search.proceed(0.0, searching.situation)
  beat = Beat(0, "p1", "at p1", 1, 4)
  more, found = searching.search.get_answered(
    ins.GetAnswered(get.request, True, beat), 0.0, searching.situation
  )
  assert found[0] == LeaderFound("p1", "at p1")
  assert found[1:] == ([StartAt(4)] if failed else [])
  assert bool(more) == failed


def test_a_replica_looks_for_a_leader_at_once_when_its_log_was_trimmed():
  searching = Searching(*BEGINS)
  searching.store["trimmed/0"] = Trimmed(0)
  assert not searching.claims(0.0)
  assert searching.fell_off
  assert searching.now == 0.0


def _claims(searching, now=0.0):
  """What it puts now."""
  effects = searching.search.proceed(now, searching.situation)
  return [effect for effect in effects if isinstance(effect, fx.Put)]


def _answer(searching, put, answer):
  """What it asks the store once that has answered a put so."""
  answered = ins.PutAnswered(put.request, answer)
  return searching.search.put_answered(answered, 0.0, searching.situation)


@pytest.mark.parametrize("answer", ["done", "conflict"])
def test_whoever_has_claimed_leadership_reads_in_the_log_who_has_it(answer):
  searching = Searching(*BEGINS, me=1)
  (put,) = _claims(searching)
  (get,) = _answer(searching, put, answer)
  assert get.key == put.key
  assert not _claims(searching)


def test_an_unanswered_claim_is_repeated_once_the_log_does_not_show_it():
  searching = Searching(*BEGINS, me=1)
  (put,) = _claims(searching)
  assert not _answer(searching, put, "unknown")
  assert not _claims(searching)
  pause = searching.config.deadlines.pace / 8
  assert searching.search.deadline(searching.situation) == pause
  searching.now = pause
  (claim,) = searching.claims(pause)
  assert (claim,) == put.value.entries


def test_an_unanswered_claim_is_given_up_once_there_is_a_leader():
  searching = Searching(*BEGINS, me=1)
  (put,) = _claims(searching)
  _answer(searching, put, "unknown")
  searching.search.end()
  assert not _claims(searching, now=100.0)
  assert searching.search.idle
