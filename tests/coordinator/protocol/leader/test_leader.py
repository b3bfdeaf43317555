"""Tests that the leader announces what the log has, and survives bad input."""

import itertools

import pytest

from optax_dist import ledger
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol import notes
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
  Removed,
  Term,
)
from optax_dist.coordinator.protocol.leader.leader import Leader
from optax_dist.coordinator.protocol.membership import View
from optax_dist.coordinator.protocol.policies import audit
from optax_dist.coordinator.protocol.policies.policy import Policy


class Driven:
  """A leader, replica 0 in process "p0", with a store that says yes at once."""

  def __init__(self, earlier=(), fresh=True, **options):
    options = {"replicas_to_aggregate": 2, "total_num_replicas": 2} | options
    self.config = Config(
      "p0",
      0,
      "at p0",
      agreement=(("optimizer", "sgd"),),
      average=lambda parts, gradients: b"mean",
      **options,
    )
    view, position = View(), len(earlier)
    for i, entry in enumerate(earlier):
      view.apply(i, Record(getattr(entry, "term", 0), (entry,)))
    mine = position if fresh else 0
    term = Term(position, "p0", "at p0", fresh, mine, 0, 0, "s" * fresh)
    record = Record(position, (term,))
    view.apply(position, record)
    count = itertools.count(1).__next__
    self.leader = Leader(self.config, view, position, (record,), count)
    self.sent: list[tuple[str, msg.Message]] = []
    self.log: list[object] = []
    self.did: list[fx.Effect] = []
    self.holds: list[fx.Put] | None = None
    self.now = 0.0
    self.carry_out(self.leader.begin(0.0))
    self.hello("p0", incarnation=mine)

  def give(self, input_):
    effects = self.leader.step(input_, self.now)
    # It is cached by then, and not recomputed for each gradient.
    assert self.leader.deadline() == self.leader._deadline()
    self.carry_out(effects)

  def carry_out(self, effects):
    for effect in effects:
      self.did.append(effect)
      match effect:
        case fx.Send(peer, message):
          self.sent.append((peer, message))
        case fx.SendAll(peers, message):
          self.sent += [(peer, message) for peer in peers]
        case fx.Put(request, _, Record(_, entries)):
          if self.holds is not None:
            self.holds.append(effect)
            continue
          self.log += entries
          self.give(ins.PutAnswered(request, "done"))

  def say(self, peer, message):
    self.give(ins.Received(peer, message))

  def hello(
    self,
    peer,
    incarnation=-1,
    agreement=None,
    replica=None,
    **changes,
  ):
    agreement = self.config.agreement if agreement is None else agreement
    replica = int(peer[1]) if replica is None else replica
    fields = {"position": -1, "applied": 0, "call": 1} | changes
    address = f"at {peer}"
    self.say(
      peer,
      msg.Hello(agreement, replica, address, incarnation, **fields),
    )

  def arrive(self, peer, sequence=0, step=0, payload=b"", **changes):
    fields = {
      "total": 1,
      "count": 1,
      "finite": True,
      "applied": step,
      "optimistic": None,
    } | changes
    self.say(
      peer,
      msg.Arrive(
        sequence, step, payload=payload, batches="", compute=None, **fields
      ),
    )

  def sent_to(self, peer, kind):
    return [m for p, m in self.sent if p == peer and isinstance(m, kind)]

  def logged(self, kind):
    return [e for e in self.log if isinstance(e, kind)]

  def noted(self, kind):
    written = [e.note for e in self.did if isinstance(e, fx.WriteJournal)]
    return [note for note in written if isinstance(note, kind)]


def inline(**options):
  driven = Driven(inline_bytes=1, **options)
  driven.hello("p1")
  return driven


def with_states(**options):
  """As `inline`; both members have the state of step 0."""
  driven = inline(**options)
  for peer in ("p0", "p1"):
    driven.say(peer, msg.Applied(0))
  return driven


def test_members_that_agree_are_admitted_and_others_refused_by_name():
  driven = Driven()
  driven.hello("p1", agreement=(("optimizer", "adam"),))
  (refused,) = driven.sent_to("p1", msg.Refused)
  assert "optimizer" in refused.reason
  assert "adam" in refused.reason
  assert "sgd" in refused.reason
  assert driven.logged(Joined) == []
  driven.hello("p3", replica=1)
  (joined,) = driven.logged(Joined)
  assert (joined.member.process, joined.member.incarnation) == ("p3", 1)
  (welcome,) = driven.sent_to("p3", msg.Welcome)
  assert (welcome.call, welcome.incarnation) == (1, 1)


def test_followers_get_an_inline_mean_once_it_is_in_the_log():
  driven = inline()
  driven.holds = []
  driven.arrive("p0", payload=b"a")
  driven.arrive("p1", payload=b"b")
  (put,) = driven.holds
  (commit,) = put.value.entries
  assert commit.mean == b"mean"
  before = len(driven.sent_to("p1", msg.Recorded))
  driven.give(ins.PutAnswered(put.request, "done"))
  recorded = driven.sent_to("p1", msg.Recorded)
  assert len(recorded) == before + 1
  assert recorded[-1].record is put.value


def test_a_message_to_all_is_encoded_once():
  driven = inline(total_num_replicas=3, replicas_to_aggregate=3)
  driven.hello("p2")
  driven.sent.clear()
  for peer in ("p0", "p1", "p2"):
    driven.arrive(peer, payload=b"x")
  told = [driven.sent_to(peer, msg.Recorded)[-1] for peer in ("p1", "p2")]
  assert told[0] is told[1]


def test_nothing_is_said_that_rests_on_what_does_not_stand_yet():
  driven = inline()
  driven.holds = []
  driven.arrive("p0", payload=b"a")
  driven.arrive("p1", payload=b"b")
  driven.arrive("p1", sequence=1, payload=b"c")  # It is stale by now.
  assert driven.sent_to("p1", msg.Dropped) == []
  driven.give(ins.PutAnswered(driven.holds[0].request, "done"))
  assert driven.sent_to("p1", msg.Dropped) == [msg.Dropped(1, "stale", 1)]


def test_an_exchange_is_committed_when_all_have_reported():
  driven = Driven()
  driven.hello("p1")
  driven.arrive("p0")
  driven.arrive("p1")
  (attempt,) = driven.sent_to("p1", msg.Attempt)
  driven.say("p0", msg.Done(attempt.attempt))
  assert driven.logged(Committed) == []
  driven.say("p1", msg.Done(attempt.attempt))
  (commit,) = driven.logged(Committed)
  assert commit.attempt == attempt.attempt


def optimistic(driven, *peers, membership=1):
  number = AttemptId(0, 0, 0, membership)
  for peer in peers:
    driven.arrive(peer, optimistic=number)
  return number


def test_an_optimistic_exchange_needs_no_message():
  driven = Driven()
  driven.hello("p1")
  number = optimistic(driven, "p0", "p1")
  assert driven.sent_to("p1", msg.Attempt) == []
  driven.say("p0", msg.Done(number))
  driven.say("p1", msg.Done(number))
  (commit,) = driven.logged(Committed)
  assert commit.attempt == number


def test_a_report_may_come_before_the_gradient_of_another_member():
  driven = Driven()
  driven.hello("p1")
  number = optimistic(driven, "p0")
  driven.say("p0", msg.Done(number))
  optimistic(driven, "p1")
  driven.say("p1", msg.Done(number))
  assert len(driven.logged(Committed)) == 1


@pytest.mark.parametrize("how", ["failed", "other members"])
def test_a_failed_optimistic_exchange_is_announced_anew(how):
  driven = Driven()
  driven.hello("p1")
  number = optimistic(driven, "p0")
  number = optimistic(
    driven, "p1", membership=1 if how != "other members" else 0
  )
  if how == "failed":
    driven.say("p1", msg.Failed(number, 0, "cut off"))
  (attempt,) = driven.sent_to("p1", msg.Attempt)
  assert attempt.attempt.number == 1
  driven.say("p0", msg.Done(number))  # Of what is void now.
  driven.say("p1", msg.Done(number))
  assert driven.logged(Committed) == []


@pytest.mark.parametrize("lower", [True, False])
def test_of_two_members_that_can_not_reach_each_other_one_is_evicted(lower):
  """After three exchanges that failed between them; both reach the leader."""
  driven = Driven(
    replicas_to_aggregate=3, total_num_replicas=3, lower_on_loss=lower
  )
  for peer in ("p1", "p2"):
    driven.hello(peer)
  for number in range(3):
    assert driven.logged(Removed) == []
    for peer in ("p0", "p1", "p2"):
      # The one that is named submits again.
      if not number or peer == "p2":
        driven.arrive(peer, sequence=number)
    attempt = driven.sent_to("p1", msg.Attempt)[-1].attempt
    driven.say("p1", msg.Failed(attempt, 2, "no route"))
  removed = driven.logged(Removed)
  if not lower:
    assert removed == []
    return
  assert [(r.incarnation, r.left) for r in removed] == [(2, False)]
  (lost,) = driven.noted(notes.Lost)
  assert "replica 1 can't reach it: no route" in lost.reason
  # The other two make the step.
  attempt = driven.sent_to("p1", msg.Attempt)[-1]
  assert [part.replica for part in attempt.parts] == [0, 1]
  for peer in ("p0", "p1"):
    driven.say(peer, msg.Done(attempt.attempt))
  assert len(driven.logged(Committed)) == 1


def test_a_lost_connection_is_a_lost_member():
  driven = inline()
  driven.give(ins.PeerLost("p1", "broken", "reset"))
  (removed,) = driven.logged(Removed)
  assert (removed.incarnation, removed.left) == (1, False)


def test_the_gradient_of_a_lost_member_is_waited_for_no_more():
  driven = inline(timeout=30.0)
  driven.arrive("p1", payload=b"g")
  driven.give(ins.PeerLost("p1", "broken", "killed"))
  _pass_time(driven, 2 * driven.config.timeout)
  assert driven.logged(Ended) == []


def test_a_member_that_fails_by_an_exception_is_told_at_once():
  driven = inline()
  driven.say("p1", msg.Leave(True, "an exception"))
  assert [r.left for r in driven.logged(Removed)] == [False]


def test_the_stacks_of_a_member_that_is_stuck_are_noted():
  driven = inline()
  driven.say("p1", msg.Leave(True, "it is stuck", "File x, line 3"))
  (stuck,) = driven.noted(notes.Stuck)
  assert (stuck.replica, stuck.stacks) == (1, "File x, line 3")
  assert [r.incarnation for r in driven.logged(Removed)] == [1]


def test_a_process_that_joins_as_another_replica_is_no_longer_the_first():
  driven = inline(total_num_replicas=3)
  driven.hello("p1", replica=2)
  assert [r.incarnation for r in driven.logged(Removed)] == [1]
  assert [j.member.replica for j in driven.logged(Joined)] == [1, 2]


def test_a_leaving_replica_waits_for_those_that_lack_its_state():
  driven = Driven(replicas_to_aggregate=1)
  driven.hello("p1")
  driven.say("p1", msg.NeedsSnapshot(0))
  driven.say("p0", msg.Leave(lost=False))
  assert driven.logged(Removed) == []
  driven.say("p1", msg.Applied(0))
  assert [r.left for r in driven.logged(Removed)] == [True]
  # The leader itself has left: the others are to find another one.
  assert driven.leader.over
  assert driven.sent_to("p1", msg.NotLeader)


def test_nobody_leaves_on_what_may_change_before_it_can_be_written():
  """The only other with the state is lost while a record is put."""
  driven = inline(replicas_to_aggregate=1)
  driven.hello("p2", replica=1)  # It waits until p1 is lost.
  driven.holds = []
  driven.arrive("p1", payload=b"a")
  (put,) = driven.holds
  driven.say("p0", msg.Leave(lost=False))
  driven.say("p1", msg.Applied(1))  # It has all that it needs of p0.
  driven.give(ins.PeerLost("p1", "broken", "killed"))
  driven.holds = None
  driven.log += put.value.entries
  driven.give(ins.PutAnswered(put.request, "done"))
  assert [r.left for r in driven.logged(Removed)] == [False]
  driven.say("p2", msg.NeedsSnapshot(0))
  assert not driven.leader.over
  driven.say("p2", msg.Applied(1))
  assert [r.left for r in driven.logged(Removed)] == [False, True]
  assert driven.leader.over


@pytest.mark.parametrize("first", ["p1", "p7"])
def test_two_processes_of_one_id_wait_for_one_of_them_to_be_lost(first):
  driven = inline()
  driven.hello("p7", replica=1)
  assert len(driven.logged(Joined)) == 1
  driven.give(ins.PeerLost(first, "broken", "killed"))
  if first == "p7":  # The new one is dead itself.
    driven.give(ins.PeerLost("p1", "broken", "killed"))
  joined = [entry.member.process for entry in driven.logged(Joined)]
  assert joined == (["p1", "p7"] if first == "p1" else ["p1"])
  assert bool(driven.sent_to("p7", msg.Welcome)) == (first == "p1")


@pytest.mark.parametrize(
  "bad",
  [
    msg.Arrive(0, 0, 1, 1, True, 0, None, b"too long", "", None),
    msg.Arrive(0, 0, 1, 2, True, 0, None, b"x", "", None),
    msg.Welcome(1, 0, None, -1),
    msg.Recorded(3, Record(0, ())),
    msg.Done(AttemptId(9, 9, 9, 9)),
    msg.Failed(AttemptId(0, 0, 0, 0), 99, "?"),
    msg.Applied(10**9),
    msg.Fingerprint(10**9, "x"),
    msg.NeedsSnapshot(10**9),
  ],
  ids=lambda bad: type(bad).__name__,
)
def test_nonsense_of_a_member_ends_no_leader(bad):
  driven = inline()
  driven.say("p1", bad)
  driven.give(ins.Malformed("p1", "not a message"))
  driven.say("stranger", bad)
  assert not driven.leader.over
  assert driven.sent_to("p1", msg.Rejected)
  driven.hello("p2")
  assert driven.sent_to("p2", msg.Welcome)


def test_another_leader_s_record_ends_its_office():
  driven = inline()
  driven.holds = []
  driven.arrive("p0", payload=b"a")
  driven.arrive("p1", payload=b"b")
  (put,) = driven.holds
  driven.give(ins.PutAnswered(put.request, "conflict"))
  get = next(e for e in driven.did[::-1] if isinstance(e, fx.Get))
  other = Record(1, (Term(1, "p1", "at p1", False, 1, 1, 0, ""),))
  driven.give(ins.GetAnswered(get.request, True, other))
  assert driven.leader.over
  assert driven.sent_to("p1", msg.NotLeader)
  assert driven.leader.deadline() == float("inf")


def test_a_step_that_makes_no_progress_ends_the_run_and_names_who_is_missing():
  driven = inline(timeout=30.0)
  driven.arrive("p0", payload=b"a")
  while not driven.logged(Ended):
    driven.now = driven.leader.deadline()
    driven.give(ins.TimePassed())
  (ended,) = driven.logged(Ended)
  assert "computing: replica 1" in ended.reason
  assert driven.now == pytest.approx(30.0)
  assert "replica 1" in driven.sent_to("p1", msg.Stalled)[0].missing


def test_a_slow_aggregation_names_who_has_not_reported():
  driven = Driven()
  driven.hello("p1")
  for peer in ("p0", "p1"):
    driven.arrive(peer)
  driven.say("p0", msg.Done(driven.sent_to("p0", msg.Attempt)[-1].attempt))
  _pass_time(driven, driven.config.stall_warning)
  (stalled,) = driven.sent_to("p0", msg.Stalled)
  assert stalled.missing == "waiting for aggregating: replica 1"


def test_a_leader_whose_store_does_not_answer_resigns():
  driven = inline()
  _pass_time(driven, 60.0)
  driven.holds = []
  for peer in ("p0", "p1"):
    driven.arrive(peer, payload=b"g")
  pace = driven.config.deadlines.pace
  _pass_time(driven, 60.0 + 0.99 * pace)
  assert not driven.leader.over
  _pass_time(driven, 60.0 + pace)
  assert driven.leader.over
  assert driven.sent_to("p1", msg.NotLeader)


def test_different_states_end_the_run():
  driven = inline()
  driven.say("p0", msg.Fingerprint(1, "x"))
  driven.say("p1", msg.Fingerprint(1, "y"))
  (ended,) = driven.logged(Ended)
  assert ended.error == "Diverged"


def test_fingerprints_of_earlier_steps_are_compared_as_well():
  driven = inline()
  for step in (1, 2):
    driven.say("p0", msg.Fingerprint(step, f"of {step}"))
  driven.say("p1", msg.Fingerprint(1, "another"))
  (ended,) = driven.logged(Ended)
  assert "After 1 steps" in ended.reason


def test_optimizer_states_are_compared_as_well():
  driven = inline()
  for peer, digest in (("p0", "params-state"), ("p1", "params-another")):
    driven.say(peer, msg.Fingerprint(1, digest))
  (ended,) = driven.logged(Ended)
  assert ended.error == "Diverged"


def test_a_restarted_replica_is_compared_with_itself():
  driven = inline()
  driven.say("p1", msg.Fingerprint(1, "x"))
  driven.give(ins.PeerLost("p1", "broken", "killed"))
  driven.hello("p7", replica=1)
  driven.say("p7", msg.Fingerprint(1, "y"))
  (ended,) = driven.logged(Ended)
  assert ended.error == "Diverged"


def test_no_step_is_taken_after_the_run_has_failed():
  driven = inline()
  driven.arrive("p0", payload=b"a")
  driven.say("p0", msg.Fingerprint(1, "x"))
  driven.say("p1", msg.Fingerprint(1, "y"))
  driven.arrive("p1", payload=b"b")
  assert driven.logged(Ended)
  assert not driven.logged(Committed)


def test_a_snapshot_comes_from_one_that_has_the_latest_state():
  """Even if that is the leader, or one that wants to leave."""
  driven = inline(replicas_to_aggregate=1, total_num_replicas=3)
  driven.hello("p2")
  driven.arrive("p0", payload=b"g")
  driven.say("p0", msg.Applied(1))
  driven.say("p0", msg.Leave(lost=False))
  driven.say("p2", msg.NeedsSnapshot(0))
  (fetch,) = driven.sent_to("p2", msg.Fetch)
  assert fetch.source == "p0"
  driven.say("p1", msg.Applied(1))
  driven.say("p2", msg.NeedsSnapshot(0))
  assert driven.sent_to("p2", msg.Fetch)[-1].source == "p1"


def test_a_fingerprint_that_comes_late_takes_no_request_back():
  """It is of a state that the replica had before it needed a snapshot."""
  driven = inline(replicas_to_aggregate=1, total_num_replicas=3)
  driven.hello("p2")
  driven.say("p0", msg.NeedsSnapshot(0))
  driven.say("p1", msg.NeedsSnapshot(0))
  assert not driven.sent_to("p1", msg.Fetch)  # No replica could serve it.
  driven.say("p1", msg.Fingerprint(0, "digest"))
  driven.say("p0", msg.Applied(0))
  (fetch,) = driven.sent_to("p1", msg.Fetch)
  assert fetch.source == "p0"


def _attempt(driven, step, lasts, *dones):
  """Begins an attempt, and ends it if all are done; returns its message."""
  for peer in ("p0", "p1"):
    driven.arrive(peer, sequence=step, step=step)
  attempt = driven.sent_to("p1", msg.Attempt)[-1]
  driven.now += lasts
  for peer in dones:
    driven.say(peer, msg.Done(attempt.attempt))
  return attempt


def _pass_time(driven, until):
  """Lets the leader's deadlines pass."""
  while driven.leader.deadline() <= until:
    driven.now = max(driven.now, driven.leader.deadline())
    driven.give(ins.TimePassed())
  driven.now = until


def test_an_announced_attempt_may_take_any_time():
  driven = Driven()
  driven.hello("p1")
  _attempt(driven, 0, 0.0)
  _pass_time(driven, 0.9 * driven.config.deadlines.timeout)
  assert driven.logged(Removed) == []
  assert driven.sent_to("p1", msg.AllBegun) == []
  for peer in ("p0", "p1"):
    driven.say(peer, msg.Done(driven.sent_to(peer, msg.Attempt)[-1].attempt))
  assert len(driven.logged(Committed)) == 1


def test_members_of_an_optimistic_attempt_are_told_once_that_all_have_begun():
  driven = Driven(replicas_to_aggregate=2, total_num_replicas=2)
  driven.hello("p1")
  id_ = AttemptId(0, 0, 0, 1)
  for peer in ("p0", "p1"):
    driven.arrive(peer, optimistic=id_)
  limits = driven.config.deadlines
  _pass_time(driven, 0.99 * limits.attempt)
  assert driven.sent_to("p1", msg.AllBegun) == []
  _pass_time(driven, 0.9 * limits.timeout)
  for peer in ("p0", "p1"):
    assert driven.sent_to(peer, msg.AllBegun) == [msg.AllBegun(id_)]
  assert driven.logged(Removed) == []


def test_failures_between_two_members_are_counted_anew_at_each_step():
  driven = Driven(
    replicas_to_aggregate=3, total_num_replicas=3, lower_on_loss=True
  )
  peers = ("p0", "p1", "p2")
  for peer in peers[1:]:
    driven.hello(peer)
  sequence = itertools.count()
  for step in range(3):
    for peer in peers:
      driven.arrive(peer, sequence=next(sequence), step=step)
    for _ in range(2):
      attempt = driven.sent_to("p1", msg.Attempt)[-1].attempt
      driven.say("p1", msg.Failed(attempt, 2, "no route"))
      driven.arrive("p2", sequence=next(sequence), step=step)
    attempt = driven.sent_to("p1", msg.Attempt)[-1].attempt
    for peer in peers:
      driven.say(peer, msg.Done(attempt))
    assert len(driven.logged(Committed)) == step + 1
  assert driven.logged(Removed) == []


def test_the_leader_is_not_the_one_of_two_that_is_evicted():
  driven = Driven(
    replicas_to_aggregate=2, total_num_replicas=3, lower_on_loss=True
  )
  for peer in ("p1", "p2"):
    driven.hello(peer)
  for number in range(3):
    for peer in ("p0", "p1"):
      if not number or peer == "p0":
        driven.arrive(peer, sequence=number)
    attempt = driven.sent_to("p1", msg.Attempt)[-1].attempt
    driven.say("p1", msg.Failed(attempt, 0, "no route"))
  (removed,) = driven.logged(Removed)
  assert removed.incarnation == 1
  assert removed.reason == "it can't reach replica 0: no route"


def witnessed():
  """The only member of a step has its mean, and the witness p1 fetches it."""
  driven = Driven(replicas_to_aggregate=1)
  driven.hello("p1")
  driven.say("p1", msg.Applied(0))
  driven.arrive("p0")
  attempt = driven.sent_to("p1", msg.Attempt)[-1].attempt
  driven.say("p0", msg.Done(attempt))
  return driven, attempt


def test_a_witness_that_still_fetches_the_mean_is_waited_for():
  driven, attempt = witnessed()
  limits = driven.config.deadlines
  _pass_time(driven, 3 * limits.attempt)
  assert driven.logged(Committed) == []
  driven.say("p1", msg.Failed(attempt, None, "no byte came"))
  assert len(driven.logged(Committed)) == 1
  assert driven.logged(Removed) == []


def test_a_mean_helps_only_a_replica_that_has_the_steps_before_it():
  """A gradient of an older step may come from one that lacks a mean yet."""
  driven = Driven(replicas_to_aggregate=1, max_staleness=1)
  driven.hello("p1")

  def commit(peer, step):
    driven.arrive(peer)
    attempt = driven.sent_to("p0", msg.Attempt)[-1].attempt
    assert attempt.step == step
    driven.say("p0", msg.Done(attempt))
    driven.say("p1", msg.Done(attempt))
    assert len(driven.logged(Committed)) == step + 1

  commit("p0", 0)
  commit("p1", 1)  # It still lacks the mean of step 0.
  driven.say("p0", msg.Applied(2))
  driven.say("p0", msg.Leave(lost=False))
  assert driven.logged(Removed) == []
  driven.say("p1", msg.Applied(2))
  assert [r.left for r in driven.logged(Removed)] == [True]


def fresh_start(**options):
  """A leader with a fresh start; replica 1 was a member before."""
  driven = Driven(
    earlier=(Term(0, "q1", "at q1", True, 0, 1, 0, "s"),), **options
  )
  driven.arrive("p0", payload=b"g")
  return driven


def test_a_replica_that_does_not_come_back_to_a_fresh_start_is_lost():
  driven = fresh_start(inline_bytes=1, lower_on_loss=True)
  assert driven.logged(Committed) == []
  driven.now = driven.leader.deadline()
  while not driven.logged(Committed):
    assert driven.now <= driven.config.deadlines.pace
    driven.give(ins.TimePassed())
    driven.now = driven.leader.deadline()


def test_a_fresh_start_waits_for_a_replica_that_comes_back():
  driven = fresh_start(inline_bytes=1, lower_on_loss=True)
  driven.hello("p1")
  driven.now = 2 * driven.config.deadlines.pace
  driven.give(ins.TimePassed())
  assert driven.logged(Committed) == []


def shared_attempt(**options):
  """Three gradients of two replicas are in an attempt; one asked for adds."""
  driven = Driven(replicas_to_aggregate=3, **options)
  driven.hello("p1")
  driven.arrive("p1", total=1)
  driven.arrive("p0", total=1)
  driven.arrive("p0", 1, total=2, count=1)
  (attempt,) = {m.attempt for m in driven.sent_to("p1", msg.Attempt)}
  driven.arrive("p1", 1, total=2, count=1)
  assert not driven.sent_to("p1", msg.Dropped)
  return driven, attempt


def test_what_is_added_during_an_attempt_counts_if_that_fails():
  driven, attempt = shared_attempt()
  driven.say("p1", msg.Failed(attempt, 0, "its connection was lost"))
  # All that replica 0 had is gone, and not only what it added last.
  (dropped,) = driven.sent_to("p0", msg.Dropped)
  assert (dropped.sequence, dropped.whole, dropped.count) == (1, True, 2)
  assert not driven.sent_to("p1", msg.Dropped)
  driven.arrive("p0", 2)
  parts = driven.sent_to("p1", msg.Attempt)[-1].parts
  assert [(p.replica, p.sequence, p.count) for p in parts] == [
    (0, 2, 1),
    (1, 1, 2),
  ]


def test_what_is_added_during_an_attempt_is_late_if_that_succeeds():
  driven, attempt = shared_attempt()
  for peer in ("p0", "p1"):
    driven.say(peer, msg.Done(attempt))
  assert driven.logged(Committed)
  (dropped,) = driven.sent_to("p1", msg.Dropped)
  assert (dropped.sequence, dropped.reason) == (1, "stale")
  assert not dropped.whole


def test_what_is_added_is_told_to_be_late_though_another_attempt_begins():
  driven, attempt = shared_attempt(max_staleness=1)
  for peer in ("p2", "p3", "p4"):
    driven.hello(peer)
    driven.arrive(peer)
  for peer in ("p0", "p1"):
    driven.say(peer, msg.Done(attempt))
  assert driven.logged(Committed)
  assert driven.sent_to("p2", msg.Attempt)[-1].attempt.step == 1
  # It is in neither of the two, and need not wait for the second.
  (dropped,) = driven.sent_to("p1", msg.Dropped)
  assert (dropped.sequence, dropped.reason) == (1, "stale")


def test_a_gradient_of_a_step_to_come_is_refused():
  driven = Driven()
  driven.hello("p1")
  for peer in ("p0", "p1"):
    driven.arrive(peer)
  (attempt,) = {m.attempt for m in driven.sent_to("p1", msg.Attempt)}
  driven.say("p1", msg.Done(attempt))
  driven.arrive("p1", 1, step=1)
  assert driven.sent_to("p1", msg.Rejected)
  driven.say("p0", msg.Done(attempt))
  assert len(driven.logged(Committed)) == 1
  assert not driven.leader.over


def test_where_each_has_a_step_of_its_own_those_that_wait_are_not_averaged():
  driven = Driven(replicas_to_aggregate=1, alone=True, max_staleness=1000)
  for peer in ("p1", "p2"):
    driven.hello(peer)
  for peer in ("p0", "p1", "p2"):
    driven.say(peer, msg.Applied(0))
    driven.arrive(peer)
  for step in range(3):
    attempt = driven.sent_to("p0", msg.Attempt)[-1]
    assert [part.replica for part in attempt.parts] == [step]
    for peer in ("p0", "p1", "p2"):
      driven.say(peer, msg.Done(attempt.attempt))
  assert len(driven.logged(Committed)) == 3


@pytest.mark.parametrize("comes", [True, False])
def test_a_new_leader_takes_no_step_by_one_gradient_before_all_have_come(comes):
  before = (
    Term(0, "p0", "at p0", True, 0, 0, 0, "s"),
    Joined(Member(1, 1, "p1", "at p1")),
  )
  driven = Driven(
    before,
    fresh=False,
    replicas_to_aggregate=1,
    alone=True,
    max_staleness=1000,
    inline_bytes=1,
  )
  driven.arrive("p0", payload=b"g")
  # It would be the only one that has the step, and may die.
  assert driven.logged(Committed) == []
  if comes:
    driven.hello("p1", incarnation=1)
  else:
    driven.now += 2 * driven.config.deadlines.pace
    driven.give(ins.TimePassed())
    assert driven.logged(Removed)
  assert len(driven.logged(Committed)) == 1


def test_a_step_of_leased_gradients_commits_with_the_next_leases():
  data = ledger.Batches(64, 6, shuffle=False)
  driven = Driven(
    replicas_to_aggregate=3, total_num_replicas=3, inline_bytes=1, data=data
  )
  peers = ("p0", "p1", "p2")
  for peer in peers[1:]:
    driven.hello(peer)
  leases = {p: driven.sent_to(p, msg.Asked)[-1].lease for p in peers}
  for peer in peers[:2]:
    driven.arrive(peer, payload=b"g", data=leases[peer])
  # The deadline of the wait begins with the first.
  assert driven.leader.deadline() <= driven.config.stall_warning
  driven.arrive("p2", payload=b"g", data=leases["p2"])
  (commit,) = driven.logged(Committed)
  assert [part.data for part in commit.parts] == list(leases.values())
  spans = [lease.spans for lease in commit.leases]
  assert spans == [((6, 8),), ((8, 10),), ((10, 12),)]


def test_the_samples_of_a_replica_that_is_replaced_are_leased_again():
  data = ledger.Batches(64, 6, shuffle=False)
  driven = inline(replicas_to_aggregate=3, total_num_replicas=3, data=data)
  driven.hello("p2")
  lease = driven.sent_to("p1", msg.Asked)[-1].lease
  driven.hello("p7", replica=1)
  _pass_time(driven, driven.config.deadlines.pace)
  assert driven.sent_to("p7", msg.Asked)[-1].lease == lease


def test_a_wish_to_save_is_one_of_the_next_step():
  driven = inline(replicas_to_aggregate=1)
  driven.say("p1", msg.Save())
  for step in range(2):
    driven.arrive("p0", step, step, b"g")
  assert [commit.save for commit in driven.logged(Committed)] == [True, False]


def test_the_end_says_how_many_gradients_were_applied_and_dropped():
  driven = inline(replicas_to_aggregate=4)
  for peer in ("p0", "p1"):
    driven.arrive(peer, total=2, count=2, payload=b"g")
  driven.arrive("p1", 1, total=2, count=2, payload=b"g")  # Of a past step.
  driven.say("p0", msg.Finish("enough"))
  driven.say("p1", msg.Finish("more than enough"))
  for peer in ("p0", "p1"):
    driven.say(peer, msg.Applied(1))
  (ended,) = driven.logged(Ended)
  assert (ended.reason, ended.dropped) == ("enough", (("stale", 2),))
  (finish,) = driven.noted(notes.Finish)
  assert finish.ledger == {"applied": 4, "dropped": {"stale": 2}}


def test_a_member_is_asked_for_its_step_once_it_may_be_four_behind():
  """What it has decides for how long others keep means for it."""
  driven = with_states(replicas_to_aggregate=1, total_num_replicas=3)
  driven.hello("p2")
  driven.say("p2", msg.NeedsSnapshot(0))
  for step in range(4):
    assert driven.sent_to("p1", msg.Report) == []
    driven.arrive("p0", sequence=step, step=step, payload=b"g")
  assert driven.sent_to("p1", msg.Report) == [msg.Report(4)]
  # One that waits for a snapshot says so once it has it.
  assert driven.sent_to("p2", msg.Report) == []


def test_the_end_asks_who_is_behind_and_serves_the_final_state_afterwards():
  driven = with_states(replicas_to_aggregate=1)
  driven.arrive("p0", payload=b"g")
  driven.say("p0", msg.Applied(1))
  driven.say("p0", msg.Finish("enough"))
  assert driven.sent_to("p1", msg.Report) == [msg.Report(1)]
  assert driven.logged(Ended) == []
  driven.say("p1", msg.Applied(1))
  assert len(driven.logged(Ended)) == 1
  driven.say("p1", msg.NeedsSnapshot(0))
  (fetch,) = driven.sent_to("p1", msg.Fetch)
  (serve,) = driven.sent_to("p0", msg.Serve)
  assert (fetch.source, serve.to, serve.at_least) == ("p0", "p1", 1)


def test_the_end_is_waited_for_from_when_the_last_step_is_in_the_log():
  """Those that are behind can't learn of that step before."""
  driven = with_states(replicas_to_aggregate=1, attempt_timeout=1.0)
  driven.holds = []
  driven.arrive("p0", payload=b"g")
  driven.say("p0", msg.Finish("enough"))
  driven.now += 1.1 * driven.config.deadlines.patience
  driven.give(ins.TimePassed())
  (put,), driven.holds = driven.holds, None
  driven.give(ins.PutAnswered(put.request, "done"))
  assert driven.logged(Ended) == []
  driven.now += 1.1 * driven.config.deadlines.patience
  driven.give(ins.TimePassed())
  assert len(driven.logged(Ended)) == 1


def test_a_member_may_leave_once_the_others_have_its_step():
  driven = with_states(replicas_to_aggregate=1)
  driven.arrive("p0", payload=b"g")
  driven.say("p1", msg.Applied(1))
  driven.say("p1", msg.Leave(lost=False))
  assert driven.sent_to("p0", msg.Report) == [msg.Report(1)]
  assert not driven.logged(Removed)
  driven.say("p0", msg.Applied(1))
  assert driven.logged(Removed) == [Removed(1, True, "left")]


def test_a_member_that_leaves_waits_until_others_have_its_last_step():
  """Also if that was committed after it had asked to leave."""
  driven = with_states(replicas_to_aggregate=1, total_num_replicas=3)
  driven.hello("p2")
  driven.say("p2", msg.NeedsSnapshot(0))
  driven.say("p1", msg.Leave(lost=False))
  driven.arrive("p1", payload=b"g")
  assert len(driven.logged(Committed)) == 1
  driven.say("p2", msg.Applied(0))
  assert driven.logged(Removed) == []
  for peer in ("p0", "p2"):
    driven.say(peer, msg.Applied(1))
  assert driven.logged(Removed) == [Removed(1, True, "left")]


def test_a_heartbeat_names_the_block_from_which_on_the_log_is_there():
  driven = inline(replicas_to_aggregate=1, block=4)
  for step in range(9):
    driven.arrive("p0", sequence=step, step=step, payload=b"g")
  driven.now = driven.leader.deadline()
  driven.give(ins.TimePassed())
  beats = [
    effect.value
    for effect in driven.did
    if isinstance(effect, fx.Put) and isinstance(effect.value, Beat)
  ]
  # The next record is at 11, in block 2.
  assert beats[-1].position == 4


def test_the_store_is_told_four_times_in_a_pace_that_the_leader_lives():
  driven = inline()
  pace = driven.config.deadlines.pace
  for quarter in range(1, 4):
    driven.now = quarter * pace / 4
    driven.give(ins.TimePassed())
    driven.give(ins.TimePassed())
  beats = [
    effect.value
    for effect in driven.did
    if isinstance(effect, fx.Put) and isinstance(effect.value, Beat)
  ]
  # No two are alike, so who reads them sees that time passes for the leader.
  assert [beat.count for beat in beats] == [1, 2, 3, 4]
  assert {beat.leader for beat in beats} == {"p0"}


def test_each_snapshot_has_a_number_of_its_own():
  driven = Driven(total_num_replicas=3)
  for peer in ("p1", "p2"):
    driven.hello(peer, applied=-1)
    driven.say(peer, msg.NeedsSnapshot(-1))
  fetches = [m for _, m in driven.sent if isinstance(m, msg.Fetch)]
  assert len({fetch.transfer for fetch in fetches}) == 2
  serves = driven.sent_to("p0", msg.Serve)
  assert [s.transfer for s in serves] == [f.transfer for f in fetches]


class Rounds(Policy):
  """A step is begun by its first gradient, and all others are called."""

  def accepted(self, incarnation, message):
    return True


class Soon(Policy):
  """It has something to say after 0.3 s."""

  deadline = 0.3


def test_a_policy_is_asked_when_it_wants_to_be():
  driven = inline(policy=lambda timeout: Soon())
  assert driven.leader.deadline() == 0.3


def test_a_member_without_a_gradient_in_a_step_that_begins_is_called():
  driven = inline(policy=lambda timeout: Rounds())
  driven.hello("p2")
  driven.arrive("p1", payload=b"g")
  called = [peer for peer, m in driven.sent if isinstance(m, msg.Call)]
  assert called == ["p0", "p2"]


def test_without_rounds_nobody_is_called():
  driven = inline()
  driven.arrive("p1", payload=b"g")
  assert not [m for _, m in driven.sent if isinstance(m, msg.Call)]


def test_a_member_that_has_left_and_calls_again_reads_that_it_has():
  driven = with_states(replicas_to_aggregate=1)
  driven.say("p1", msg.Leave(lost=False))
  assert driven.logged(Removed) == [Removed(1, True, "left")]
  known = driven.config.agreement
  driven.say("p1", msg.Hello(known, 1, "at p1", 1, 1, 0, 2))
  assert driven.sent_to("p1", msg.Welcome)[-1] == msg.Welcome(2, 1, None, 1)
  assert len(driven.logged(Joined)) == 1


def test_a_snapshot_comes_from_another_member_once_its_server_is_lost():
  driven = inline(replicas_to_aggregate=1, total_num_replicas=3)
  driven.hello("p2")
  driven.arrive("p0", payload=b"g")
  for peer in ("p0", "p1"):
    driven.say(peer, msg.Applied(1))
  driven.say("p2", msg.NeedsSnapshot(0))
  assert driven.sent_to("p2", msg.Fetch)[-1].source == "p1"
  driven.give(ins.PeerLost("p1", "broken", "killed"))
  assert driven.sent_to("p2", msg.Fetch)[-1].source == "p0"


def test_a_member_that_could_not_serve_a_snapshot_is_not_the_next_to_be_asked():
  driven = with_states(replicas_to_aggregate=1, total_num_replicas=3)
  driven.hello("p2")
  for _ in range(2):
    driven.say("p2", msg.NeedsSnapshot(0))
  assert [f.source for f in driven.sent_to("p2", msg.Fetch)] == ["p1", "p0"]


def new_leader(**options):
  """Replicas 1 and 2 were members before it was elected, and have yet to come."""
  return Driven(
    earlier=(
      Term(0, "p0", "at p0", True, 0, 0, 0, "s"),
      Joined(Member(1, 1, "p1", "at p1")),
      Joined(Member(2, 2, "p2", "at p2")),
    ),
    fresh=False,
    **options,
  )


@pytest.mark.parametrize("how", ["comes", "is late"])
def test_no_step_is_taken_before_the_only_state_may_be_there(how):
  driven = new_leader(replicas_to_aggregate=1, total_num_replicas=3)
  driven.hello("p2", incarnation=2)
  driven.say("p0", msg.NeedsSnapshot(0))
  driven.say("p2", msg.NeedsSnapshot(0))
  driven.arrive("p0")
  assert not driven.sent_to("p0", msg.Attempt)
  if how == "is late":
    driven.now = driven.config.deadlines.pace
    driven.give(ins.TimePassed())
    assert driven.logged(Removed)
    assert not driven.sent_to("p0", msg.Attempt)
  driven.hello("p1", incarnation=1)
  if how == "is late":
    assert not driven.sent_to("p0", msg.Attempt)
    driven.say("p1", msg.Applied(0))
  (attempt,) = driven.sent_to("p0", msg.Attempt)
  # It misses no mean that others would need it to have.
  (member,) = [s for s in driven.leader._roster if s.member.process == "p1"]
  assert member.member.incarnation in attempt.readers


def test_a_member_without_the_run_s_state_serves_no_snapshot():
  driven = new_leader(replicas_to_aggregate=1, total_num_replicas=3)
  driven.say("p0", msg.NeedsSnapshot(0))
  driven.hello("p1", incarnation=1, applied=-1)
  assert driven.sent_to("p0", msg.Fetch) == []
  driven.hello("p2", incarnation=2)
  (fetch,) = driven.sent_to("p0", msg.Fetch)
  assert fetch.source == "p2"


def test_no_step_is_taken_before_the_only_latest_state_has_come():
  """Those that have come lack a mean, which only that member could send them."""
  driven = Driven(
    earlier=(
      Term(0, "p0", "at p0", True, 0, 0, 0, "s"),
      Joined(Member(1, 1, "p1", "at p1")),
      Committed(
        AttemptId(0, 0, 1, 1),
        (Part(1, 1, 0, 0, 0, 1, 1.0),),
        None,
        False,
        (),
        (),
      ),
    ),
    fresh=False,
    replicas_to_aggregate=1,
    max_staleness=1,
  )
  driven.arrive("p0", applied=0)
  assert not driven.sent_to("p0", msg.Attempt)
  driven.hello("p1", incarnation=1, applied=1)
  assert driven.sent_to("p0", msg.Attempt)


def test_who_comes_with_the_state_gets_the_next_mean():
  """Without a word more than the call: a snapshot would be far larger."""
  driven = new_leader(replicas_to_aggregate=1, total_num_replicas=3)
  driven.hello("p1", incarnation=1)
  driven.hello("p2", incarnation=2, applied=-1)
  driven.arrive("p0")
  (attempt,) = driven.sent_to("p0", msg.Attempt)
  assert attempt.readers == (1,)


def test_a_step_is_taken_where_the_state_is_whoever_has_yet_to_come():
  driven = new_leader(replicas_to_aggregate=1, total_num_replicas=3)
  driven.arrive("p0")
  assert driven.sent_to("p0", msg.Attempt)


@pytest.mark.parametrize("incarnation", [1, -1])
def test_at_the_end_a_member_that_calls_again_is_served_the_state(incarnation):
  """It has lost the connection, or even fallen off the log."""
  driven = inline(replicas_to_aggregate=1)
  driven.arrive("p0", payload=b"g")
  driven.say("p0", msg.Applied(1))
  driven.say("p0", msg.Finish("enough"))
  assert not driven.logged(Ended)
  driven.hello("p1", incarnation=incarnation)
  assert driven.sent_to("p1", msg.Welcome)[-1].incarnation == 1
  driven.say("p1", msg.NeedsSnapshot(0))
  assert driven.sent_to("p1", msg.Fetch)[-1].source == "p0"
  driven.say("p1", msg.Applied(1))
  assert driven.logged(Ended)


def test_that_the_run_has_finished_is_told_by_the_log_alone():
  """Another leader may go on, as long as the end is not in the log."""
  driven = inline()
  driven.arrive("p0", payload=b"a")
  driven.say("p1", msg.Finish("enough"))
  driven.arrive("p1", payload=b"b")
  assert driven.logged(Ended)
  for peer in ("p0", "p1"):
    assert not driven.sent_to(peer, msg.Dropped)


def test_at_the_end_nobody_joins():
  driven = inline(replicas_to_aggregate=1)
  driven.arrive("p0", payload=b"g")
  driven.say("p0", msg.Finish("enough"))
  driven.hello("p2")
  assert driven.sent_to("p2", msg.Welcome)[-1].incarnation == -1


# Leadership goes to the replica nearest to the store.


def _near_and_far(*delays, **options):
  """Members 0 (this process), 1 and so on, with distances to the store."""
  driven = Driven(inline_bytes=1, total_num_replicas=len(delays), **options)
  driven.hello("p0", incarnation=0, store_delay=delays[0])
  for index, delay in enumerate(delays[1:], 1):
    driven.hello(f"p{index}", store_delay=delay)
    driven.say(f"p{index}", msg.Applied(0))
  return driven


def _successors(driven):
  return [p for p, m in driven.sent if isinstance(m, msg.TakeOver)]


def test_the_member_nearest_to_the_store_becomes_leader():
  driven = _near_and_far(0.1, 0.05)
  assert _successors(driven) == ["p1"]


@pytest.mark.parametrize(
  "delays",
  [
    (0.1, 0.06),  # Not half as far.
    (0.004, 0.001),  # Milliseconds that a busy machine takes, too.
    (0.1, 0.0),  # Unknown.
    (0.0, 0.1),
    (0.1, -1.0),  # Nonsense.
  ],
)
def test_leadership_stays_where_it_is(delays):
  assert _successors(_near_and_far(*delays)) == []


@pytest.mark.parametrize("inline", [True, False])
def test_leadership_moves_while_nothing_is_in_flight(inline):
  driven = Driven(inline_bytes=1 if inline else None)
  payload = b"g" if inline else b""
  driven.hello("p0", incarnation=0, store_delay=0.1)
  driven.arrive("p0", payload=payload)
  driven.hello("p1", store_delay=0.01)
  driven.say("p1", msg.Applied(0))
  assert _successors(driven) == []
  driven.arrive("p1", payload=payload)
  if not inline:
    assert _successors(driven) == []
    attempt = driven.sent_to("p1", msg.Attempt)[-1].attempt
    for peer in ("p0", "p1"):
      driven.say(peer, msg.Done(attempt))
  assert len(driven.logged(Committed)) == 1
  assert _successors(driven) == ["p1"]


@pytest.mark.parametrize(
  "message", [msg.Leave(lost=False), msg.NeedsSnapshot(0)]
)
def test_leadership_does_not_go_to_one_that_leaves_or_lacks_the_state(message):
  driven = Driven(inline_bytes=1, total_num_replicas=3)
  driven.hello("p0", incarnation=0, store_delay=0.1)
  driven.arrive("p0", payload=b"g")
  driven.hello("p1", store_delay=0.01)
  driven.hello("p2")
  driven.say("p2", msg.NeedsSnapshot(0))  # Nobody can leave yet.
  driven.say("p1", message)
  driven.arrive("p2", payload=b"g")
  assert len(driven.logged(Committed)) == 1
  assert driven.logged(Removed) == []
  assert _successors(driven) == []


# Losses of all.


def test_a_run_whose_state_is_gone_ends_at_once():
  driven = inline(replicas_to_aggregate=1)
  driven.arrive("p0", payload=b"g")
  for peer in ("p0", "p1"):
    assert driven.logged(Ended) == []
    driven.say(peer, msg.NeedsSnapshot(0))
  (ended,) = driven.logged(Ended)
  assert ended.error == "CoordinatorError"
  assert "nobody holds its parameters" in ended.reason


def test_who_asks_for_a_state_that_is_gone_hears_of_the_end_first():
  driven = inline(replicas_to_aggregate=1)
  driven.arrive("p0", payload=b"g")
  driven.say("p0", msg.NeedsSnapshot(0))
  driven.holds = []
  driven.say("p1", msg.NeedsSnapshot(0))
  (put,) = driven.holds
  driven.say("p1", msg.NeedsSnapshot(0))
  assert driven.sent_to("p1", msg.NotLeader) == []
  driven.give(ins.PutAnswered(put.request, "done"))
  assert driven.sent_to("p1", msg.NotLeader) == [msg.NotLeader()]


def test_before_the_first_step_the_leader_begins_anew_if_nobody_has_the_state():
  driven = inline()
  for peer in ("p0", "p1"):
    driven.say(peer, msg.NeedsSnapshot(0))
  _pass_time(driven, 0.99 * driven.config.deadlines.pace)
  assert driven.sent_to("p0", msg.TakeOver) == []
  _pass_time(driven, driven.config.deadlines.pace)
  assert driven.sent_to("p0", msg.TakeOver) == [msg.TakeOver(fresh=True)]


@pytest.mark.parametrize("how", ["an exception", "left"])
@pytest.mark.parametrize("other", ["lost", "left", "came back and left"])
def test_a_run_ends_well_only_if_all_its_replicas_leave_by_their_own_wish(
  other, how
):
  driven = inline(lower_on_loss=True)
  for peer in ("p0", "p1"):
    driven.arrive(peer, payload=b"g")
  if other != "left":
    driven.give(ins.PeerLost("p1", "silent", "not a byte came for 5.0 s"))
  if other == "came back and left":
    driven.hello("p1")
    driven.say("p1", msg.Applied(1))
  if other != "lost":
    driven.say("p1", msg.Leave(lost=False))
    driven.say("p0", msg.Applied(1))
  assert driven.logged(Ended) == []  # The other one goes on.
  driven.say("p0", msg.Leave(how != "left", how))
  driven.now += driven.config.deadlines.patience
  driven.give(ins.TimePassed())
  assert {removed.incarnation for removed in driven.logged(Removed)} >= {0, 1}
  ends = [(end.error, end.reason) for end in driven.logged(Ended)]
  # A lost one may come back with its state.
  well = other != "lost" and how == "left"
  assert ends == ([("", "all replicas have left")] if well else [])


def test_the_last_replica_to_leave_gives_a_lost_one_time_to_come_back():
  driven = inline(lower_on_loss=True)
  for peer in ("p0", "p1"):
    driven.arrive(peer, payload=b"g")
  driven.give(ins.PeerLost("p1", "silent", "not a byte came for 5.0 s"))
  driven.say("p0", msg.Leave(lost=False))
  assert len(driven.logged(Removed)) == 1
  driven.now += 0.9 * driven.config.deadlines.patience
  driven.hello("p1")
  driven.now += 0.9 * driven.config.deadlines.patience
  driven.give(ins.TimePassed())
  driven.say("p1", msg.NeedsSnapshot(0))
  assert driven.sent_to("p1", msg.Fetch)
  assert len(driven.logged(Removed)) == 1
  driven.say("p1", msg.Applied(1))
  assert driven.logged(Removed)[-1].left
  assert driven.logged(Ended) == []  # It goes on alone.


def test_a_run_without_a_step_can_begin_again_after_the_loss_of_all():
  driven = inline(lower_on_loss=True)
  driven.give(ins.PeerLost("p1", "broken", "reset"))
  driven.say("p0", msg.Leave(True, "an exception"))
  assert driven.logged(Ended) == []


def test_a_replacement_is_noted_once_it_is_in_the_log():
  driven = inline()
  driven.arrive("p1", payload=b"g")
  driven.holds = []
  driven.hello("p2", replica=1)
  driven.now += 10.0  # The one of before has not been heard of.
  driven.give(ins.TimePassed())
  noted = lambda: [*map(type, driven.noted(notes.Lost | notes.Drop))]
  assert noted() == []
  (put,) = [put for put in driven.holds if put.key.startswith("log/")]
  driven.give(ins.PutAnswered(put.request, "done"))
  assert noted() == [notes.Lost, notes.Drop]


def test_a_step_counts_a_member_that_is_lost_after_it_has_done_its_part():
  data = ledger.Batches(60, 6, shuffle=False)
  driven = Driven(replicas_to_aggregate=3, total_num_replicas=3, data=data)
  peers = ("p0", "p1", "p2")
  for peer in peers[1:]:
    driven.hello(peer)
  leases = {p: driven.sent_to(p, msg.Asked)[-1].lease for p in peers}
  for peer in peers:
    driven.arrive(peer, data=leases[peer])
  attempt = driven.sent_to("p0", msg.Attempt)[-1].attempt
  driven.say("p1", msg.Done(attempt))
  driven.give(ins.PeerLost("p1", "broken", "killed"))
  driven.say("p0", msg.Done(attempt))
  driven.say("p2", msg.Done(attempt))
  assert len(driven.logged(Committed)) == 1


def test_a_snapshot_does_not_wait_for_the_step_of_an_abandoned_attempt():
  driven = Driven(total_num_replicas=3)
  driven.hello("p1")
  driven.hello("p2")
  for peer in ("p0", "p1"):
    driven.say(peer, msg.Applied(0))
    driven.arrive(peer)
  attempt = driven.sent_to("p0", msg.Attempt)[-1].attempt
  driven.say("p2", msg.NeedsSnapshot(0))
  (fetch,) = driven.sent_to("p2", msg.Fetch)
  served = lambda: [
    serve.at_least for serve in driven.sent_to(fetch.source, msg.Serve)
  ]
  assert served() == [1]
  driven.say("p1", msg.Failed(attempt, None, "no"))
  assert served() == [1, 0]


def test_gradients_that_stay_over_a_commit_are_waited_for_anew():
  driven = Driven(total_num_replicas=3, max_staleness=1)
  driven.hello("p1")
  driven.hello("p2")
  driven.arrive("p0")
  driven.now += driven.config.stall_warning
  driven.give(ins.TimePassed())
  assert len(driven.sent_to("p0", msg.Stalled)) == 1
  driven.arrive("p1")
  attempt = driven.sent_to("p0", msg.Attempt)[-1].attempt
  driven.arrive("p2")
  for peer in ("p0", "p1"):
    driven.say(peer, msg.Done(attempt))
  driven.now += driven.config.stall_warning
  driven.give(ins.TimePassed())
  assert len(driven.sent_to("p0", msg.Stalled)) == 2


def test_a_sum_that_is_not_finite_takes_the_part_before_it_with_it():
  driven = Driven(replicas_to_aggregate=4)
  driven.hello("p1")
  driven.arrive("p0", total=2, count=2)
  driven.arrive("p1", total=1, count=1)
  driven.arrive("p0", sequence=1, total=3, count=1, finite=False)
  assert [m.sequence for m in driven.sent_to("p0", msg.Dropped)] == [1, 0]


def test_an_optimistic_exchange_with_a_lost_member_is_announced_anew():
  driven = Driven(
    replicas_to_aggregate=3, total_num_replicas=3, lower_on_loss=True
  )
  driven.hello("p1")
  driven.hello("p2")
  optimistic(driven, "p0", membership=2)
  driven.give(ins.PeerLost("p2", "broken", "killed"))
  optimistic(driven, "p1", membership=2)
  assert driven.sent_to("p1", msg.Attempt)


def test_a_member_that_is_served_a_snapshot_reads_the_next_mean():
  driven = Driven(
    earlier=(Term(0, "p0", "at p0", True, 0, 0, 40, "s"),),
    fresh=False,
    replicas_to_aggregate=1,
    total_num_replicas=2,
  )
  driven.say("p0", msg.Applied(40))
  driven.hello("p1")
  driven.say("p1", msg.NeedsSnapshot(0))
  assert driven.sent_to("p1", msg.Fetch)
  driven.arrive("p0", step=40)
  (attempt,) = driven.sent_to("p0", msg.Attempt)
  assert attempt.readers == (1,)


def test_a_member_that_left_long_ago_may_join_again():
  driven = with_states(replicas_to_aggregate=1, block=1)
  driven.say("p1", msg.Leave(lost=False))
  for step in range(4):
    driven.arrive("p0", sequence=step, step=step, payload=b"g")
  driven.hello("p1", incarnation=1, position=1, call=2)
  assert len(driven.logged(Joined)) == 2


def test_each_lack_of_the_state_is_waited_for_anew():
  driven = inline()
  for peer in ("p0", "p1"):
    driven.arrive(peer, payload=b"g")
  for _ in range(2):
    driven.give(ins.PeerLost("p1", "broken", "killed"))
    driven.say("p0", msg.NeedsSnapshot(0))
    driven.now += 0.6 * driven.config.timeout
    driven.give(ins.TimePassed())
    assert driven.logged(Ended) == []
    driven.hello("p1")
    driven.say("p1", msg.Applied(1))
    driven.say("p0", msg.Applied(1))


def test_a_new_leader_tells_its_members_of_its_term():
  driven = new_leader()
  (told,) = driven.sent_to("p1", msg.Recorded)
  assert told.position == 3


RIGHT, WRONG = bytes([1] * 16), bytes([2] * 16)


def bring(driven, peer, step, digest):
  """A member has computed the only slot of a step."""
  driven.now += 1.0
  slot = ((step, step + 1),)
  work = audit.pack(step, digest)
  driven.arrive(peer, step, step, b"g", data=slot, work=work)


def audited_step():
  """In step 1 of three members' audited run, the second has brought a digest."""
  data = ledger.Batches(8, 1, micro_batch=1, deterministic=True, audit=1.0)
  driven = inline(replicas_to_aggregate=1, total_num_replicas=3, data=data)
  driven.hello("p2")
  # A step waits for its audit once two members have brought something.
  bring(driven, "p0", 0, RIGHT)
  bring(driven, "p1", 1, WRONG)
  assert len(driven.logged(Committed)) == 1
  return driven


def test_a_process_whose_gradient_was_wrong_does_not_join_again():
  driven = audited_step()
  for peer in ("p0", "p2"):
    bring(driven, peer, 1, RIGHT)
  assert [removed.incarnation for removed in driven.logged(Removed)] == [1]
  driven.hello("p1")
  (refused,) = driven.sent_to("p1", msg.Refused)
  assert "is not what replicas [0, 2] have computed" in refused.reason


def test_what_a_lost_member_has_sent_counts_in_no_audit():
  driven = audited_step()
  driven.give(ins.PeerLost("p1", "broken", "killed"))
  for peer in ("p0", "p2"):
    bring(driven, peer, 1, RIGHT)
  assert len(driven.logged(Committed)) == 2


def test_a_step_is_committed_though_its_witness_is_lost():
  driven, _ = witnessed()
  assert driven.logged(Committed) == []
  driven.give(ins.PeerLost("p1", "broken", "killed"))
  assert len(driven.logged(Committed)) == 1
