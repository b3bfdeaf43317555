"""What a follower refuses, says and waits for; `tests/simulation` has the rest."""

import itertools
import math

import pytest

from optax_dist import ledger
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.codec import replace
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.entries import (
  AttemptId,
  Beat,
  Committed,
  Ended,
  Joined,
  Leased,
  Member,
  Part,
  Record,
  Removed,
  Run,
  Term,
  Trimmed,
)
from optax_dist.coordinator.protocol.follower.follower import Follower
from optax_dist.coordinator.protocol.log import (
  LEADER_KEY,
  RUN_KEY,
  record_key,
)
from optax_dist.coordinator.protocol.membership import View
from optax_dist.coordinator.protocol.policies.policy import Policy

ME = 2  # Incarnation of its membership.
MINE = Joined(Member(ME, 1, "p1", "at p1"))


def term(number, process="p2", fresh=False, digest="", incarnation=1):
  """The member with this process becomes leader; fresh: as the only member."""
  replica = int(process[1])
  return Term(
    number,
    process,
    f"at {process}",
    fresh,
    incarnation,
    replica,
    0,
    digest,
  )


def commit(step, sequence=None, mean=b"mean", **changes):
  """A step of replica 0, and of replica 1 if it has submitted."""
  parts = (Part(0, 0, step, step, 0, 1, 1.0),)
  if sequence is not None:
    parts += (Part(ME, 1, sequence, step, 0, 1, 1.0),)
  fields = {"leases": (), "save": False} | changes
  return Committed(
    AttemptId(0, step, 1, 2),
    parts,
    mean=mean,
    details=(),
    dropped=(),
    **fields,
  )


class Driven:
  """Replica 1 in process "p1"; p0 leads, and p2 is the other member."""

  def __init__(self, **options):
    options = {
      "replicas_to_aggregate": 2,
      "total_num_replicas": 3,
      "inline_bytes": 1,
    } | options
    self.config = Config("p1", 1, "at p1", digest="s", **options)
    self.follower = Follower(self.config, itertools.count(1).__next__)
    self.now, self.calls = 0.0, 0
    self.did: list[fx.Effect] = []
    # Two records: a leader, and another member.
    self.view = View()
    self.store = {
      RUN_KEY: Run("nonce"),
      LEADER_KEY: Beat(0, "p0", "at p0", 0, 0),
    }
    other = Joined(Member(1, 2, "p2", "at p2"))
    for entry in (term(0, "p0", True, "s", 0), other):
      self.put(entry)

  def put(self, *entries, number=0):
    """The next record of the log, in the store; returns its position."""
    position = len(self.store) - 2
    record = Record(number, entries)
    self.store[record_key(position)] = record
    self.view.apply(position, record)
    return position

  def give(self, input_):
    """The store answers at once."""
    for effect in self.follower.step(input_, self.now):
      self.did.append(effect)
      match effect:
        case fx.Get(request, key):
          answer = ins.GetAnswered(request, True, self.store.get(key))
          self.give(answer)
        case fx.Put(request, key, value):
          done = self.store.setdefault(key, value) == value
          self.give(ins.PutAnswered(request, "done" if done else "conflict"))
        case fx.Send(_, msg.Hello(call=call)):
          self.calls = call

  def hear(self, message, peer="p0"):
    self.give(ins.Received(peer, message))

  def lose(self, peer="p0", how="broken"):
    self.give(ins.PeerLost(peer, how, "the test says so"))

  def record(self, *entries, peer="p0", number=0):
    """The next record, in the store and as told."""
    position = self.put(*entries, number=number)
    self.hear(msg.Recorded(position, Record(number, entries)), peer)

  def submit(self, sequence, admission=1, step=0, **changes):
    fields = {"total": 1, "finite": True, "payload": b"g"} | changes
    given = ins.Submitted(sequence, -1, admission, step, **fields)
    self.give(given)

  def begin(self):
    """It starts, and calls the leader."""
    self.give(ins.Started("own nonce"))
    assert self.sent(msg.Hello, "p0")
    return self

  def welcome(self, peer="p0", incarnation=ME, view=True):
    """The answer to its last call, with all that is in the log."""
    position = len(self.store) - 2
    told = self.view.copy() if view else None
    self.hear(msg.Welcome(self.calls, position, told, incarnation), peer)
    return self

  def join(self):
    """It becomes a member with the run's state."""
    self.begin().welcome().record(MINE)
    assert self.done(fx.Admitted) == [fx.Admitted(1, ME)]
    self.did.clear()
    return self

  def pass_time(self, seconds):
    until, turns = self.now + seconds, itertools.count()
    while (due := self.follower.deadline()) <= until:
      self.now = max(self.now, due)
      self.give(ins.TimePassed())
      assert next(turns) < 1000, "its deadline stays in the past"
    self.now = until

  def done(self, kind):
    return [e for e in self.did if isinstance(e, kind)]

  def sent(self, kind, peer=None):
    return [
      e.message
      for e in self.done(fx.Send)
      if isinstance(e.message, kind) and peer in (None, e.peer)
    ]

  def steps(self):
    return [e.step for e in self.done(fx.Publish)]

  def reasons(self):
    return [(e.sequence, e.reason) for e in self.done(fx.Resolved)]


# The run, and the leader.


def _asked(effects, kind):
  (found,) = [e for e in effects if isinstance(e, kind)]
  return found


@pytest.mark.parametrize("answer", ["done", "conflict", "unknown"])
def test_a_run_has_the_name_that_is_in_the_store(answer):
  """Whatever it is told of its own put, which another one's may precede."""
  follower = Driven().follower
  get = _asked(follower.step(ins.Started("mine"), 0.0), fx.Get)
  nothing = ins.GetAnswered(get.request, True, None)
  put = _asked(follower.step(nothing, 0.0), fx.Put)
  assert (put.key, put.value) == (RUN_KEY, Run("mine"))
  answered = follower.step(ins.PutAnswered(put.request, answer), 0.0)
  if answer == "unknown":
    answered = follower.step(ins.TimePassed(), follower.deadline())
  get = _asked(answered, fx.Get)
  there = ins.GetAnswered(get.request, True, Run("theirs"))
  assert _asked(follower.step(there, 0.0), fx.UseRun).nonce == "theirs"


def test_a_store_that_refuses_the_name_of_a_run_is_asked_again_after_a_pause():
  follower = Driven().follower
  effects, puts = follower.step(ins.Started("mine"), 0.0), 0
  now = 0.0
  while now < 10.0:
    for effect in effects:
      answer = ins.GetAnswered(effect.request, True, None)
      if isinstance(effect, fx.Put):
        puts += 1
        answer = ins.PutAnswered(effect.request, "unknown")
      effects = follower.step(answer, now)
      assert puts < 100
      break
    else:
      now = follower.deadline()
      effects = follower.step(ins.TimePassed(), now)
  assert puts > 5


@pytest.mark.parametrize("was_in", [False, True])
def test_a_refused_connection_ends_only_one_that_was_never_in(was_in):
  """Later it is another process, at an address that was the leader's."""
  driven = Driven().begin()
  if was_in:
    driven.welcome().record(MINE)
    driven.lose()
  driven.lose(how="refused")
  failed = driven.done(fx.Fail)
  assert [e.error for e in failed] == ([] if was_in else ["JoinRefused"])
  assert math.isfinite(driven.follower.deadline()) == was_in


def test_what_a_leader_does_not_say_is_rejected_and_no_rejection_answered():
  """Two that reject each other's rejections would never stop."""
  driven = Driven().join()
  driven.hear(msg.Applied(3))
  (rejected,) = driven.sent(msg.Rejected, "p0")
  assert "Applied" in rejected.reason
  driven.give(ins.Malformed("p2", "cut short"))
  assert driven.sent(msg.Rejected, "p2") == [msg.Rejected("cut short")]
  sends = driven.done(fx.Send)
  driven.hear(msg.Rejected("no"))
  driven.hear(msg.Applied(3), "p2")  # Not its leader's.
  assert driven.done(fx.Send) == sends
  assert "p0 has rejected a message: no" in driven.done(fx.Log)[-1].text


def test_a_store_that_never_answers_ends_a_replica_at_the_timeout():
  follower = Driven(timeout=20.0).follower
  now, asked = 0.0, 0
  effects = follower.step(ins.Started("mine"), now)
  while not follower.over:
    for get in [e for e in effects if isinstance(e, fx.Get)]:
      asked += 1
      follower.step(ins.GetAnswered(get.request, False, None), now)
    now = follower.deadline()
    effects = follower.step(ins.TimePassed(), now)
  assert now == 20.0
  assert asked > 1
  assert "store, which has not answered yet" in _asked(effects, fx.Fail).reason


def test_a_leader_that_does_not_answer_is_given_up_and_called_again():
  driven = Driven().begin()
  limits = driven.config.deadlines
  driven.pass_time(0.99 * limits.patience)
  assert driven.done(fx.Disconnect) == []
  driven.pass_time(0.01 * limits.patience)
  assert driven.done(fx.Disconnect) == [fx.Disconnect("p0", "no answer")]
  driven.pass_time(limits.pace)
  assert len(driven.sent(msg.Hello, "p0")) == 2


def test_an_answer_to_an_earlier_call_makes_nobody_leader():
  driven = Driven().begin()
  position = len(driven.store) - 2
  driven.hear(msg.Welcome(driven.calls - 1, position, driven.view.copy(), ME))
  driven.hear(msg.Asked(0, -1, 3))
  assert driven.done(fx.SetAsked) == []
  driven.welcome()
  driven.hear(msg.Asked(0, -1, 3))
  assert driven.done(fx.SetAsked) == [fx.SetAsked(3)]


def test_one_that_asks_about_an_earlier_leader_is_told_of_the_later_one():
  driven = Driven().join()
  driven.record(term(1), number=1, peer="p2")
  driven.hear(msg.Canvass(0), "p0")
  told = driven.sent(msg.Recorded, "p0")
  assert told[-1].record.entries == (term(1),)
  assert driven.sent(msg.Standing, "p0") == [msg.Standing(0, True)]


def test_a_leader_that_the_store_has_replaced_is_not_waited_for():
  """What that leader could send is trimmed from the log already."""
  driven = Driven().join()
  driven.store["trimmed/0"] = Trimmed(0)
  driven.store[LEADER_KEY] = Beat(5, "p2", "at p2", 3, 128)
  driven.lose()
  assert driven.sent(msg.Hello, "p0")
  driven.pass_time(0.5 * driven.config.deadlines.patience)
  assert driven.sent(msg.Hello, "p2")


def test_a_store_that_answers_again_is_not_called_silent():
  driven = Driven().join()
  for known in (False, True):
    driven.give(ins.GetAnswered(-9, known, None))
    silent = "the store does not answer" in driven.follower.missing(0.0)
    assert silent != known


# The log.


def test_a_training_loop_learns_how_much_to_sum_after_a_partial_sum():
  driven = Driven().join()
  driven.submit(0)
  driven.hear(msg.Asked(0, 0, 3))
  assert driven.did[-2:] == [fx.SetAsked(3), fx.Taken(0)]
  # As many as before the partial sum; the training loop does not know that.
  driven.hear(msg.Dropped(0, "stale", 1))
  assert driven.did[-2:] == [
    fx.SetAsked(1),
    fx.Resolved(0, "stale", 0),
  ]


@pytest.mark.parametrize("digest", ["s", "another"])
def test_a_run_that_begins_anew_begins_without_it(digest):
  """What it has computed is lost, and so is its state if that is another."""
  driven = Driven().join()
  driven.submit(0)
  driven.record(term(1, "p2", True, digest, 3), number=1, peer="p2")
  assert driven.reasons() == [(0, "lost")]
  assert len(driven.done(fx.Suspended)) == 1
  (hello,) = driven.sent(msg.Hello, "p2")
  assert (hello.incarnation, hello.applied) == (-1, -1)
  driven.welcome("p2", incarnation=4, view=False)
  driven.record(Joined(Member(4, 1, "p1", "at p1")), number=1, peer="p2")
  same = digest == "s"
  assert bool(driven.done(fx.Admitted)) == same
  assert bool(driven.sent(msg.NeedsSnapshot, "p2")) != same


def test_a_replica_that_is_behind_searches_on_when_it_hears_of_a_new_leader():
  """A search that began anew each time would ask for the same again, for ever."""
  driven = Driven().join()
  driven.lose(how="left")
  assert driven.sent(msg.Canvass)
  driven.did.clear()
  position = len(driven.store) - 2
  for _ in range(3):
    record = Record(1, (term(1, "p2"),))
    driven.hear(msg.Recorded(position + 5, record), "p2")
  assert driven.sent(msg.Canvass) == []


def test_a_leader_is_not_called_again_because_others_hear_a_later_one():
  """Each call would be given up for the next record, and ask all others anew."""
  driven = Driven().join()
  driven.lose(how="left")
  driven.did.clear()
  position = len(driven.store) - 2
  for _ in range(3):
    driven.hear(msg.Standing(0, True), "p2")
    record = Record(1, (term(1, "p2"),))
    driven.hear(msg.Recorded(position + 5, record), "p2")
  assert len(driven.sent(msg.Hello, "p0")) == 1
  assert len(driven.sent(msg.Canvass)) <= 1


def test_a_record_that_does_not_follow_is_looked_for_in_the_store():
  driven = Driven().join()
  position = driven.put(term(1, "p2"), number=1)
  record = Record(1, (commit(0),))
  driven.hear(msg.Recorded(position + 1, record), "p0")
  assert driven.sent(msg.Hello, "p2")


def test_a_replica_is_stalled_until_the_step_is_committed():
  driven = Driven().join()
  assert not driven.follower.stalled
  driven.hear(msg.Stalled(0, 12.0, "waiting for computing: replica 2"))
  assert driven.follower.stalled
  driven.record(commit(0))
  assert not driven.follower.stalled


def test_a_replica_that_joins_learns_which_samples_are_done():
  data = ledger.Batches(num_samples=100, global_batch=4)
  driven = Driven(data=data)
  part = Part(0, 0, 0, 0, 0, 1, 1.0, ((0, 4),))
  driven.put(replace(commit(0), parts=(part,)))
  driven.begin().welcome()
  told = driven.done(fx.Progressed)[-1]
  assert told == fx.Progressed(1, ledger.Progress(4))


# The membership.


def test_another_process_under_its_number_ends_it_at_once():
  driven = Driven().join()
  driven.submit(0)
  driven.record(Joined(Member(3, 1, "p9", "at p9")))
  (failed,) = driven.done(fx.Fail)
  assert failed.error == "CoordinatorError"
  assert "Another process has joined as replica 1" in failed.reason
  assert driven.reasons() == [(0, "lost")]
  assert driven.follower.deadline() == math.inf
  # It joins no more, or the two would replace each other without end.
  driven.did.clear()
  driven.record(Removed(3, False, "silent"))
  driven.pass_time(60.0)
  assert driven.did == []


def test_a_removed_replica_cuts_its_connection_and_joins_after_a_pause():
  driven = Driven().join()
  driven.record(Removed(ME, False, "it was not heard from"))
  assert [e.peer for e in driven.done(fx.Disconnect)] == ["p0"]
  assert not driven.sent(msg.Hello)
  driven.pass_time(0.1)
  assert len(driven.sent(msg.Hello, "p0")) == 1


def test_another_process_under_its_number_that_has_gone_ends_nothing():
  driven = Driven().join()
  driven.record(Removed(ME, False, "it was not heard from"))
  driven.record(Joined(Member(3, 1, "p9", "at p9")))
  driven.record(Removed(3, False, "it was killed"))
  driven.pass_time(driven.config.deadlines.pace)
  assert not driven.done(fx.Fail)


def test_the_next_leader_learns_which_samples_a_replica_has():
  data = ledger.Batches(num_samples=100, global_batch=4)
  driven = Driven(data=data).join()
  driven.hear(msg.Asked(0, -1, 1, ((0, 4),)))
  driven.submit(0, data=((0, 4),))
  driven.hear(msg.Asked(0, 0, 1, ((4, 6),)))  # More, for the same sum.
  driven.lose()
  assert driven.sent(msg.Hello)[-1].lease == ((0, 6),)
  driven.welcome(view=False)
  driven.record(commit(0, leases=(Leased(ME, ((8, 12),)),)))
  assert driven.done(fx.Leased)[-1] == fx.Leased(ME, ((8, 12),))
  driven.lose()
  driven.pass_time(1.0)  # It pauses, for this is the second time.
  assert driven.sent(msg.Hello)[-1].lease == ((8, 12),)
  # Those of a membership that has ended are leased to others.
  driven.welcome(view=False)
  driven.record(Removed(ME, False, "silent"))
  driven.pass_time(1.0)
  assert driven.sent(msg.Hello)[-1].lease == ()


def test_a_state_that_comes_before_the_new_leader_answers_is_reported():
  """At the call, that leader was told of an earlier one."""
  driven = Driven().begin().welcome()
  driven.record(commit(0, mean=None))
  driven.record(MINE)
  driven.hear(msg.Fetch(7, "p2", "at p2"))
  driven.record(term(1), number=1, peer="p2")
  (hello,) = driven.sent(msg.Hello, "p2")
  assert hello.applied == 0
  driven.give(ins.SnapshotFetched(7, 1))
  driven.welcome("p2", view=False)
  assert driven.sent(msg.Applied, "p2") == [msg.Applied(1)]


@pytest.mark.parametrize(
  ("wish", "told"),
  [
    (ins.FinishWanted("enough"), msg.Finish("enough")),
    (ins.LeaveWanted(), msg.Leave(lost=False)),
  ],
)
def test_the_next_leader_learns_what_a_replica_wants(wish, told):
  driven = Driven().join()
  driven.give(wish)
  driven.record(term(1), number=1, peer="p2")
  driven.welcome("p2", view=False)
  assert driven.sent(type(told), "p2") == [told]


def test_all_save_the_state_after_a_commit_that_says_so():
  driven = Driven(fingerprint_every=2).join()
  for step in range(4):
    driven.record(commit(step, save=step == 2))
  assert [e.save for e in driven.done(fx.Publish)] == [
    False,
    False,
    True,
    False,
  ]
  assert [e.step for e in driven.done(fx.TakeFingerprint)] == [2, 4]


@pytest.mark.parametrize("save", [False, True])
def test_a_wish_to_save_ends_with_a_commit_that_saves(save):
  driven = Driven().join()
  driven.give(ins.SaveWanted())
  driven.record(commit(0, save=save))
  driven.record(term(1), number=1, peer="p2")
  driven.welcome("p2", view=False)
  assert len(driven.sent(msg.Save, "p2")) == (0 if save else 1)


def test_a_new_leader_gets_a_sum_as_a_whole():
  """Only the leader before it had the part that was buffered."""
  driven = Driven().join()
  driven.submit(0)
  driven.hear(msg.Asked(0, 0, 3))
  driven.give(ins.Submitted(1, 0, 1, 0, total=3, finite=True, payload=b"g"))
  (first, more) = driven.sent(msg.Arrive, "p0")
  assert (first.count, more.count, more.total) == (1, 2, 3)
  driven.record(term(1), number=1, peer="p2")
  driven.welcome("p2", view=False)
  (again,) = driven.sent(msg.Arrive, "p2")
  assert (again.count, again.total) == (3, 3)


def test_of_a_sum_that_goes_on_only_the_new_samples_are_told():
  data = ledger.Batches(num_samples=100, global_batch=4)
  driven = Driven(data=data).join()
  driven.submit(0, data=((0, 2),))
  driven.hear(msg.Asked(0, 0, 1, ((4, 6),)))
  more = ins.Submitted(1, 0, 1, 0, 2, True, b"g", data=((0, 2), (4, 6)))
  driven.give(more)
  assert [a.data for a in driven.sent(msg.Arrive)] == [((0, 2),), ((4, 6),)]


def test_a_gradient_of_an_earlier_membership_does_not_count():
  driven = Driven().join()
  driven.record(Removed(ME, False, "it was not heard from"))
  driven.record(commit(0, mean=None))
  driven.pass_time(driven.config.deadlines.pace)
  driven.welcome(incarnation=3, view=False)
  driven.record(Joined(Member(3, 1, "p1", "at p1")))
  assert driven.sent(msg.NeedsSnapshot)  # It has yet to be admitted.
  driven.submit(0)
  assert driven.reasons() == [(0, "lost")]
  assert not driven.sent(msg.Arrive)


def test_what_was_leased_before_a_commit_that_leases_others_is_void():
  driven = Driven(data=ledger.Batches(num_samples=100, global_batch=4)).join()
  driven.record(commit(0, leases=(Leased(ME, ((4, 6),)),)))
  # It may come later than the commit, which another replica has passed on.
  driven.hear(msg.Asked(0, -1, 1, ((2, 3),)))
  assert driven.done(fx.Leased)[-1] == fx.Leased(ME, ((4, 6),))
  driven.record(commit(1))  # Which leaves the lease as it is.
  driven.hear(msg.Asked(1, -1, 1, ((6, 7),)))
  assert driven.done(fx.Leased)[-1] == fx.Leased(ME, ((6, 7),))


def test_what_was_asked_before_a_commit_is_void_in_a_deterministic_run():
  data = ledger.Batches(96, global_batch=4, micro_batch=1, deterministic=True)
  driven = Driven(data=data, replicas_to_aggregate=4).join()
  driven.record(commit(0, leases=(Leased(ME, ((4, 6),)),)))
  driven.hear(msg.Asked(0, -1, 1, ((2, 3),)))
  assert driven.done(fx.Leased)[-1] == fx.Leased(ME, ((4, 6),))
  driven.hear(msg.Asked(1, -1, 1, ((6, 7),)))
  assert driven.done(fx.Leased)[-1] == fx.Leased(ME, ((6, 7),))


# Gradients.


def test_the_next_leader_is_told_the_last_fingerprint_of_this_membership():
  """Others may have told it theirs of the same step."""
  driven = Driven().join()
  for step in (1, 2):
    driven.give(ins.FingerprintTaken(step, f"of {step}"))
  driven.record(term(1), number=1, peer="p2")
  driven.welcome("p2", view=False)
  assert driven.sent(msg.Fingerprint, "p2") == [msg.Fingerprint(2, "of 2")]
  driven.lose("p2")
  driven.record(term(2), Joined(Member(3, 1, "p1", "at p1")), number=2)
  driven.welcome("p2", incarnation=3, view=False)
  assert len(driven.sent(msg.Fingerprint, "p2")) == 1


def test_one_gradient_of_a_step_is_aggregated_unasked_and_no_second():
  """Under the same id it could be mistaken for the first."""
  driven = Driven(inline_bytes=None, replicas_to_aggregate=3).join()
  driven.submit(0)
  (aggregate,) = driven.done(fx.Aggregate)
  counts = {part.replica: part.count for part in aggregate.parts}
  assert counts == {0: 1, 1: 1, 2: 1}
  assert aggregate.me == 1
  driven.hear(msg.Dropped(0, "non_finite", 1))
  driven.submit(1)
  assert len(driven.done(fx.Aggregate)) == 1
  # A new leader's ids are others.
  driven.record(term(1), number=1, peer="p2")
  driven.welcome("p2", view=False)
  attempts = [a.optimistic for a in driven.sent(msg.Arrive)]
  assert attempts == [AttemptId(0, 0, 0, 2), None, AttemptId(1, 0, 0, 2)]


@pytest.mark.parametrize(
  ("options", "submission"),
  [
    ({}, {"finite": False}),
    ({}, {"total": 2}),
    ({"replicas_to_aggregate": 2}, {}),  # Two of three, and who knows which.
    ({"inline_bytes": 1}, {}),
    ({"alone": True}, {}),
    ({"replicas_to_aggregate": 4}, {}),  # Each replica sums several.
    ({"policy": lambda timeout: Policy()}, {}),
    ({"data": ledger.Batches(9, 3, micro_batch=1, deterministic=True)}, {}),
    ({"max_staleness": 1}, {"step": -1}),
  ],
)
def test_what_may_not_be_in_the_next_step_waits_for_the_leader(
  options, submission
):
  options = {"inline_bytes": None, "replicas_to_aggregate": 3} | options
  driven = Driven(**options).join()
  driven.submit(0, **submission)
  (arrive,) = driven.sent(msg.Arrive)
  assert arrive.optimistic is None
  assert not driven.done(fx.Aggregate)


@pytest.mark.parametrize("committed", [False, True])
def test_each_submission_has_an_outcome_even_if_the_store_is_lost(committed):
  """If a commit has it, it counts; whether or not its mean has come."""
  driven = Driven(inline_bytes=None).join()
  driven.submit(0)
  parts = (Part(0, 0, 0, 0, 0, 1, 1.0), Part(ME, 1, 0, 0, 0, 1, 1.0))
  driven.hear(msg.Attempt(AttemptId(0, 0, 1, 2), parts, (), None, 0))
  assert driven.done(fx.Aggregate)
  if committed:
    driven.record(commit(0, 0, mean=None))
  assert driven.done(fx.Resolved) == []
  driven.give(ins.StoreLost("it was restarted"))
  (failed,) = driven.done(fx.Fail)
  assert "it was restarted" in failed.reason
  assert driven.reasons() == [(0, "" if committed else "lost")]


def test_a_replica_waits_as_long_as_the_run_goes_on():
  driven = Driven(timeout=20.0).join()
  driven.submit(0)
  for step in range(3):
    driven.pass_time(0.9 * driven.config.deadlines.replica)
    driven.record(commit(step))
  driven.pass_time(0.9 * driven.config.deadlines.replica)
  assert not driven.done(fx.Fail)
  driven.pass_time(0.2 * driven.config.deadlines.replica)
  (failed,) = driven.done(fx.Fail)
  assert "for the commit of step 3; its leader is replica 0" in failed.reason
  assert "(Recorded)" in failed.reason


def test_time_between_two_waits_counts_for_neither():
  driven = Driven(timeout=20.0).join()
  driven.submit(0)
  driven.pass_time(1.0)
  driven.hear(msg.Dropped(0, "non_finite", 1))
  driven.pass_time(2.0 * driven.config.deadlines.replica)
  driven.submit(1)
  driven.pass_time(0.9 * driven.config.deadlines.replica)
  assert not driven.done(fx.Fail)
  driven.pass_time(0.2 * driven.config.deadlines.replica)
  assert driven.done(fx.Fail)


def test_a_new_membership_begins_a_new_wait():
  """A replica that was admitted after a while may wait for a snapshot as long."""
  driven = Driven(timeout=20.0).join()
  driven.record(Removed(ME, False, "it was not heard from"))
  driven.record(commit(0, mean=None))
  driven.pass_time(0.9 * driven.config.deadlines.replica)
  driven.welcome(incarnation=3, view=False)
  driven.record(Joined(Member(3, 1, "p1", "at p1")))
  driven.pass_time(0.9 * driven.config.deadlines.replica)
  assert not driven.done(fx.Admitted)
  assert not driven.done(fx.Fail)
  driven.pass_time(0.2 * driven.config.deadlines.replica)
  (failed,) = driven.done(fx.Fail)
  assert "for a snapshot" in failed.reason


def test_a_replica_that_finishes_the_run_waits_for_its_end():
  driven = Driven().join()
  driven.give(ins.FinishWanted("enough"))
  driven.pass_time(2.0 * driven.config.deadlines.replica)
  (failed,) = driven.done(fx.Fail)
  assert "for the end of the run; its leader is replica 0" in failed.reason


# Leaving, and the end of the run.


@pytest.mark.parametrize("dies", [False, True])
def test_a_replica_that_is_joining_at_the_end_gets_the_final_state(dies):
  driven = Driven()
  driven.put(commit(0), commit(1))
  driven.begin().welcome()
  driven.record(MINE)
  driven.record(Ended(2, "enough", "", ()))
  assert driven.sent(msg.NeedsSnapshot, "p0")
  assert math.isfinite(driven.follower.deadline())
  if dies:
    driven.lose()
    assert not driven.done(fx.Fail)  # It calls it again first.
    driven.lose(how="unreachable")
    (failed,) = driven.done(fx.Fail)
    assert failed.error == "RunFinished"
    return
  driven.hear(msg.Fetch(7, "p2", "at p2"))
  driven.pass_time(10 * driven.config.deadlines.patience)  # It is large.
  driven.give(ins.SnapshotFetched(7, 2))
  assert driven.done(fx.Restore) == [fx.Restore(2, 7)]
  assert driven.done(fx.Finished) == [fx.Finished("enough")]


def test_the_final_state_is_requested_again_on_a_new_connection():
  """The deadline of the first request ended with its connection."""
  driven = Driven()
  driven.put(commit(0), commit(1))
  driven.begin().welcome()
  driven.record(MINE)
  driven.record(Ended(2, "enough", "", ()))
  patience = driven.config.deadlines.patience
  driven.pass_time(0.6 * patience)
  driven.lose()
  driven.pass_time(0.8 * patience)  # It calls the leader, which is slow.
  driven.did.clear()
  driven.welcome(view=False)
  assert driven.sent(msg.NeedsSnapshot, "p0")
  driven.pass_time(0.5 * patience)
  assert not driven.done(fx.Fail)
  driven.hear(msg.Fetch(7, "p2", "at p2"))
  driven.give(ins.SnapshotFetched(7, 2))
  assert driven.done(fx.Finished) == [fx.Finished("enough")]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_replica_leaves_by_itself_if_nobody_confirms_it(replaced):
  driven = Driven().join()
  driven.give(ins.LeaveWanted())
  limits = driven.config.deadlines
  # Others need as long to find that the leader is dead, and another one.
  longest = limits.silence + 2 * (limits.pace + limits.patience)
  driven.pass_time(0.99 * longest)
  assert not driven.done(fx.Left)
  if replaced:
    # That one has its own reasons to wait: this may be the only latest state.
    driven.record(term(1), number=1, peer="p2")
    driven.welcome("p2", view=False)
    driven.pass_time(0.99 * longest)
    assert not driven.done(fx.Left)
  driven.pass_time(0.02 * longest)
  assert len(driven.done(fx.Left)) == 1


@pytest.mark.parametrize("error", ["CoordinatorError", "Diverged"])
def test_the_end_by_an_error_is_raised_by_all(error):
  driven = Driven().join()
  driven.submit(0)
  driven.record(Ended(0, "replica 2 differs", error, ()))
  assert driven.done(fx.Fail) == [fx.Fail(error, "replica 2 differs")]
  assert driven.reasons() == [(0, "finished")]


def test_after_the_end_it_serves_the_state_and_does_nothing_else():
  driven = Driven().join()
  driven.record(Ended(0, "enough", "", ()))
  driven.did.clear()
  serve = msg.Serve(7, "p9", "at p9", 0)
  driven.hear(serve, "p2")  # Not its leader.
  driven.submit(0)
  driven.lose("p2")
  driven.give(ins.LeaveWanted())
  assert driven.did == []
  driven.hear(serve)
  assert driven.done(fx.ServeSnapshot) == [
    fx.ServeSnapshot(7, "p9", "at p9", 0)
  ]


def test_an_aborted_replica_says_so_and_is_silent():
  driven = Driven().join()
  driven.submit(0)
  driven.did.clear()
  driven.give(ins.Aborted("it has raised", "the stacks"))
  told = msg.Leave(True, "it has raised", "the stacks")
  assert driven.did == [fx.Send("p0", told)]
  driven.record(Removed(ME, False, "it has raised"))
  driven.pass_time(600.0)
  assert len(driven.did) == 1


# A log that no leader of this version has written.


@pytest.mark.parametrize("step", [0, 5])
def test_a_commit_that_does_not_follow_the_last_one_ends_the_replica(step):
  """Otherwise it would differ from the others from then on."""
  driven = Driven().join()
  driven.record(commit(0), commit(1))
  assert driven.steps() == [1, 2]
  driven.record(commit(step))
  (fail,) = driven.done(fx.Fail)
  assert fail.error == "CoordinatorError"
  assert f"commits step {step}, and the next one is 2" in fail.reason
  assert driven.follower.over
  assert driven.steps() == [1, 2]


# Leadership that is handed over.


def test_a_replica_that_is_nearer_to_the_store_takes_over():
  driven = Driven().join()
  driven.hear(msg.TakeOver())
  (put,) = driven.done(fx.Put)
  (claim,) = put.value.entries
  assert (claim.term, claim.leader, claim.fresh) == (1, "p1", False)
  assert driven.follower.elected is not None
  assert driven.follower.elected[1][-1] == put.value


def test_only_the_leader_hands_over():
  driven = Driven().join()
  driven.hear(msg.TakeOver(), peer="p2")
  assert driven.done(fx.Put) == []


def test_its_distance_to_the_store_is_that_of_the_fastest_answer():
  driven = Driven()
  follower, now = driven.follower, 0.0
  effects = follower.step(ins.Started("mine"), now)
  for delay in (0.3, 0.1, 0.2):
    now += delay
    answer = _asked(effects, fx.Get)
    value = driven.store.get(answer.key)
    effects = follower.step(ins.GetAnswered(answer.request, True, value), now)
    found = [
      e.message
      for e in effects
      if isinstance(e, fx.Send) and isinstance(e.message, msg.Hello)
    ]
    if found:
      break
  assert found[0].store_delay == pytest.approx(0.1)


def test_a_view_with_a_gap_is_not_told_to_a_leader():
  driven = Driven()
  driven.store[LEADER_KEY] = Beat(0, "p0", "at p0", 0, 1)
  driven.begin()
  driven.lose()
  driven.pass_time(10.0)
  hellos = driven.sent(msg.Hello, "p0")
  assert len(hellos) > 1
  assert {hello.position for hello in hellos} == {-1}


def test_a_replica_that_lost_its_leader_is_the_member_that_the_log_names():
  driven = Driven().begin()
  driven.hear(msg.Recorded(0, driven.store[record_key(0)]), "p2")
  driven.hear(msg.Recorded(1, driven.store[record_key(1)]), "p2")
  driven.welcome(incarnation=-1)
  driven.lose()
  driven.hear(msg.Recorded(driven.put(MINE), Record(0, (MINE,))), "p2")
  driven.lose()
  driven.pass_time(1.0)
  assert driven.follower.incarnation == ME


def test_a_replica_joins_at_the_step_before_commits_of_the_same_record():
  driven = Driven().begin().welcome()
  driven.record(MINE, commit(0))
  assert driven.steps() == [1]
  assert not driven.sent(msg.NeedsSnapshot)


def test_a_new_leader_tells_no_records_from_before_a_gap():
  driven = Driven().join()
  driven.lose()
  for step in range(3):
    driven.put(commit(step))
  driven.pass_time(0.1)
  driven.calls = driven.sent(msg.Hello, "p0")[-1].call
  driven.put(commit(3))
  driven.welcome()
  driven.record(term(1, "p1", incarnation=ME), number=1)
  _, records = driven.follower.elected
  assert len(records) == 1


def test_a_replica_whose_term_is_followed_by_another_s_does_not_lead():
  """Its claim took effect late, and it reads both terms at once."""
  driven = Driven().join()
  driven.put(term(1, "p1", incarnation=ME), number=1)
  driven.put(term(2, "p2"), number=2)
  driven.lose(how="left")
  driven.pass_time(0.1)
  assert driven.follower.view.term == 2
  assert driven.follower.elected is None


def test_a_vote_about_an_earlier_leader_does_not_count():
  driven = Driven().join()
  driven.record(term(1, "p0", incarnation=0), number=1)
  driven.did.clear()
  driven.lose(how="left")
  driven.hear(msg.Standing(0, False), "p2")
  driven.pass_time(0.5)
  assert not driven.done(fx.Put)


def test_a_leader_that_was_not_ready_is_called_again_when_it_says_so():
  driven = Driven().join()
  entry = term(1, "p2")
  position = driven.put(entry, number=1)
  told = msg.Recorded(position, Record(1, (entry,)))
  driven.hear(told, "p2")
  driven.hear(msg.NotLeader(), "p2")
  # It is a member as before, for a leader loses those that disconnect.
  assert driven.done(fx.Disconnect) == driven.done(fx.Suspended) == []
  driven.hear(told, "p2")
  assert len(driven.sent(msg.Hello, "p2")) == 2
  assert not driven.sent(msg.Canvass)


def test_a_process_that_is_no_leader_is_called_again_after_longer_pauses():
  """Neither another leader is looked for meanwhile, nor is leadership claimed."""
  driven = Driven().join()
  entry = term(1, "p2")
  position = driven.put(entry, number=1)
  driven.hear(msg.Recorded(position, Record(1, (entry,))), "p2")
  driven.store[LEADER_KEY] = Beat(1, "p2", "at p2", 0, 0)
  longest = driven.config.deadlines.pace / 8
  for pause in (0.05, 0.1, 0.2, 0.4, longest, longest):
    driven.hear(msg.NotLeader(), "p2")
    driven.did.clear()
    driven.pass_time(pause - 0.01)
    assert not [e for e in driven.did if isinstance(e, fx.Get | fx.Put)]
    driven.pass_time(0.02)
    assert driven.done(fx.Get)
    assert driven.sent(msg.Hello, "p2")


def test_who_can_only_wait_for_a_leader_calls_on_and_on():
  """It has no state, so it can't lead, and the store names a process that won't."""
  driven = Driven(timeout=10_000.0)
  driven.put(commit(0))
  driven.begin()
  for _ in range(1100):
    driven.hear(msg.NotLeader())
    driven.did.clear()
    driven.pass_time(driven.config.deadlines.pace / 8 + 0.01)
    assert driven.sent(msg.Hello, "p0")
