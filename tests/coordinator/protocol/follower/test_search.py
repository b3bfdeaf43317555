"""Tests of leader election: a replica that is only cut off never claims it."""

import itertools
import math

import pytest

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.entries import (
  Beat,
  Joined,
  Member,
  Record,
  Term,
  Trimmed,
)
from optax_dist.coordinator.protocol.follower.search import (
  Elected,
  Search,
  Situation,
)
from optax_dist.coordinator.protocol.log import FellOff
from optax_dist.coordinator.protocol.membership import Start, View
from optax_dist.ledger import NOTHING_DONE

START = Start(0, "s", NOTHING_DONE)


def _view():
  view = View()
  view.apply(0, Record(0, (Term(0, "p0", "at p0", True, 0, 0, 0, "s"),)))
  for i in (1, 2):
    joined = Joined(Member(i, i, f"p{i}", f"at p{i}"))
    view.apply(i, Record(0, (joined,)))
  return view


class Driven:
  """The search of member 1 (or 2) of three, whose leader 0 is lost."""

  def __init__(self, me=1):
    config = Config(f"p{me}", me, f"at p{me}", leader_timeout=5.0)
    self.search = Search(config, itertools.count(1).__next__)
    self.view = _view()
    self.situation = Situation(self.view, 3, True, me, True, START)
    self.store: dict[str, object] = {}
    self.found: list[object] = []
    self.sent: list[object] = []
    self.claims: list[tuple[float, fx.Put]] = []
    self.search.begin(0.0)

  def carry_out(self, effects, now):
    for effect in effects:
      match effect:
        case fx.Get(request, key):
          value = self.store.get(key)
          answer = ins.GetAnswered(request, True, value)
          more, found = self.search.get_answered(answer, now, self.situation)
          self.found += found
          self.carry_out(more, now)
        case fx.Put():
          self.claims.append((now, effect))
        case fx.Send():
          self.sent.append(effect)

  def run(self, until):
    now = 0.0
    while now <= until and not self.claims:
      self.carry_out(self.search.proceed(now, self.situation), now)
      now = max(now, self.search.deadline(self.situation))
    return self.claims[0][0] if self.claims else None


def test_it_asks_the_other_members():
  driven = Driven()
  driven.run(0.0)
  assert driven.sent == [fx.Send("p2", msg.Canvass(0))]


def test_the_first_claims_at_once_if_all_others_have_lost_the_leader_too():
  for me, other, expected in ((1, 2, 0.0), (2, 1, 0.05)):
    driven = Driven(me)
    driven.run(0.0)
    driven.search.voted(other, False)
    assert driven.search.deadline(driven.situation) <= expected
    assert math.isclose(driven.run(1.0), expected)


def test_nobody_claims_while_another_one_hears_the_leader():
  driven = Driven()

  def run_on(now=0.0):
    while now < 30.0:
      driven.carry_out(driven.search.proceed(now, driven.situation), now)
      driven.search.voted(2, True)
      now = max(now + 1e-3, driven.search.deadline(driven.situation))

  run_on()
  assert driven.claims == []


def test_who_reaches_nobody_waits_until_the_store_is_silent_too():
  assert math.isclose(Driven().run(20.0), 5.0)
  driven, beats = Driven(), itertools.count()

  class Beating(dict):
    def get(self, key):  # One more each time that it is read.
      return Beat(0, "p0", "at p0", next(beats), 0) if key == "leader" else None

  driven.store = Beating()
  assert driven.run(60.0) is None


def _claimed(answer, store=(), position=3):
  driven = Driven()
  driven.run(20.0)
  (at, put) = driven.claims[0]
  # A leader was found meanwhile, which sent more, and was lost again.
  driven.situation = driven.situation._replace(position=position)
  driven.store.update(store)
  if answer == "done":
    driven.store[put.key] = put.value
  effects, _ = driven.search.put_answered(
    ins.PutAnswered(put.request, answer), at
  )
  driven.claims.clear()
  driven.found.clear()
  driven.carry_out(effects, at)
  return driven, put


def test_a_claim_that_stands_makes_it_leader():
  driven, put = _claimed("done")
  assert driven.found == [Elected(3, put.value)]
  (term,) = put.value.entries
  assert (term.term, term.fresh, term.incarnation) == (1, False, 1)


def test_a_claim_where_the_log_was_trimmed_makes_nobody_leader():
  driven, _ = _claimed("done", {"trimmed/0": Trimmed(0)})
  assert driven.found == [FellOff(128)]


def test_a_claim_from_before_all_that_a_leader_sent_is_forgotten():
  """It took effect where the log has been trimmed since."""
  driven, _ = _claimed("done", {"trimmed/0": Trimmed(0)}, position=130)
  assert driven.found == []
  # The replica is still a member, and the next that may lead.
  driven.run(60.0)
  ((_, put),) = driven.claims
  assert put.key == "log/130"


def test_a_claim_that_came_too_late_makes_it_read_on():
  other = Record(1, (Term(1, "p2", "at p2", False, 2, 2, 0, ""),))
  driven, _ = _claimed("conflict", {"log/3": other})
  driven.carry_out(driven.search.proceed(5.1, driven.situation), 5.1)
  (read,) = driven.found
  assert read.records == ((3, other),)
  assert driven.claims == []


def test_a_claim_of_which_nothing_is_known_is_put_again_alike():
  driven, put = _claimed("unknown")
  now = driven.search.deadline(driven.situation)
  driven.carry_out(driven.search.proceed(now, driven.situation), now)
  ((_, again),) = driven.claims
  assert (again.key, again.value) == (put.key, put.value)


def test_one_that_is_no_member_claims_only_with_the_latest_state():
  for holds, expected in ((True, 10.0), (False, None)):
    driven = Driven()
    driven.view.step = 4  # Steps were committed.
    driven.situation = Situation(driven.view, 3, True, -1, holds, None)
    at = driven.run(60.0)
    assert at == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("start", [None, Start(0, "theirs", NOTHING_DONE)])
def test_a_run_begins_anew_from_the_start_state_that_is_there(start):
  """It may be that of another replica; one's own is gone then."""
  driven = Driven()
  driven.situation = Situation(driven.view, 3, True, -1, False, start)
  driven.run(60.0)
  if start is None:
    assert driven.claims == []
  else:
    ((_, put),) = driven.claims
    (term,) = put.value.entries
    assert (term.fresh, term.step, term.digest) == (True, 0, "theirs")
