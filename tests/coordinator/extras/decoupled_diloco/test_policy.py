"""A coordinator's rounds of fragments: their windows and weights, to the second."""

import math

import pytest

from optax_dist.coordinator.extras.decoupled_diloco import rules
from optax_dist.coordinator.extras.decoupled_diloco.rounds import (
  WORK,
  MakeRounds,
  Work,
)
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.coordinator.coordinator import Coordinator
from optax_dist.coordinator.protocol.entries import (
  Committed,
  Ended,
  Fragments,
  Job,
  Removed,
  Rules,
  Start,
)
from optax_dist.coordinator.protocol.history import History


class Driven:
  """A coordinator, with a log that takes all at once."""

  def __init__(self, policy, **rules):
    self.job = Job((), Rules(inline_bytes=4, **rules))
    self.config = Config(self.job, lambda parts, sent: b"mean", policy)
    configure = lambda job: self.config
    self.core = Coordinator(configure, History(), "nonce")
    self.sent, self.log, self.notes, self.now = [], [], [], 0.0
    self.give(ins.Started())

  def give(self, input_):
    for effect in self.core.step(input_, self.now):
      match effect:
        case fx.Send(peers, message):
          self.sent += [(peer, message) for peer in peers]
        case fx.Append(record):
          self.log += record.entries
        case fx.WriteJournal(note):
          self.notes.append(note)

  def say(self, peer, message):
    self.give(ins.Received(peer, message))

  def hello(self, peer):
    new = (-1, -1, 0, 0, 0)
    call = msg.Hello(self.job, int(peer[1]), f"at {peer}", Start(), *new)
    self.say(peer, call)

  def arrive(self, peer, sequence, step, payload, work=b""):
    gradient = (sequence, 0, step, 1, True, payload)
    sent = msg.SubmitGradient(*gradient, applied=step, work=work)
    self.say(peer, sent)


def rounds(replicas=3, quorum=2, lower_on_loss=False, **numbers):
  """A coordinator and all replicas; contributions are sent inline."""
  driven = Driven(
    MakeRounds(Fragments(2, 4, **numbers)),
    replicas_to_aggregate=quorum,
    total_num_replicas=replicas,
    lower_on_loss=lower_on_loss,
  )
  for i in range(replicas):
    driven.hello(f"p{i}")
  return driven


def give(
  driven, at, replica, step=0, tokens=100, late=0, seconds=1.0, begins=True
):
  driven.now = at
  sequence = driven.__dict__.setdefault("numbers", {}).get(replica, 0)
  driven.numbers[replica] = sequence + 1
  work = WORK.encode(Work(tokens, 4, seconds, late, begins))
  driven.arrive(f"p{replica}", sequence, step, b"none", work=work)


def passes(driven, now):
  driven.now = now
  driven.give(ins.TimePassed())


def commits(driven):
  return [entry for entry in driven.log if isinstance(entry, Committed)]


def ends(driven):
  return [entry for entry in driven.log if isinstance(entry, Ended)]


def test_a_round_waits_for_its_window_and_no_longer():
  driven = rounds(overlap=2, safety=0.5)
  give(driven, 10.0, 0)
  give(driven, 10.4, 1)
  # Half of the two seconds that the fastest trains on, less what has passed.
  closes = 10.4 + 0.5 * (2.0 - 0.4)
  passes(driven, closes - 0.01)
  assert not commits(driven)
  assert driven.core.deadline() == pytest.approx(closes)
  passes(driven, closes)
  (commit,) = commits(driven)
  assert [part.replica for part in commit.parts] == [0, 1]
  # The window is shut; the next round's opens with the next quorum.
  assert driven.core.deadline() > closes
  give(driven, 20.0, 0, step=1)
  give(driven, 20.0, 1, step=1)
  passes(driven, 20.9)
  assert len(commits(driven)) == 1
  passes(driven, 21.0)
  assert len(commits(driven)) == 2


def back(driven, replica, at):
  """A replica that was killed is a member again."""
  driven.give(ins.PeerLost(f"p{replica}", "broken", "it was killed"))
  driven.now = at
  driven.hello(f"p{replica}")


def test_a_newcomer_is_in_the_round_if_it_contributes_within_the_window():
  driven = rounds(3, 3, lower_on_loss=True, overlap=2, safety=0.5)
  back(driven, 2, at=9.0)
  give(driven, 10.0, 0)
  give(driven, 10.4, 1)
  # Half of the two seconds that the fastest trains on, less what has passed.
  closes = 10.4 + 0.5 * (2.0 - 0.4)
  passes(driven, 10.9)
  assert not commits(driven)
  give(driven, 11.0, 2)
  (commit,) = commits(driven)
  assert [part.replica for part in commit.parts] == [0, 1, 2]
  # The next round waits for it, however long it takes.
  give(driven, 20.0, 0, step=1)
  give(driven, 20.0, 1, step=1)
  passes(driven, 40.0)
  assert len(commits(driven)) == 1
  give(driven, 40.0, 2, step=1)
  assert len(commits(driven)) == 2
  # And no round waits longer than that for a newcomer.
  driven = rounds(3, 3, lower_on_loss=True, overlap=2, safety=0.5)
  back(driven, 2, at=9.0)
  give(driven, 10.0, 0)
  give(driven, 10.4, 1)
  passes(driven, closes - 0.01)
  assert not commits(driven)
  passes(driven, closes)
  assert [part.replica for part in commits(driven)[0].parts] == [0, 1]


def test_fastest_present_learner_decides_the_window():
  driven = rounds(4, overlap=1, safety=1.0)
  give(driven, 0.0, 3, seconds=0.1)
  driven.give(ins.PeerLost("p3", "broken", "it was killed"))
  give(driven, 5.0, 1, seconds=8.0)
  give(driven, 5.0, 0, seconds=2.0)
  assert driven.core.deadline() <= 7.0
  passes(driven, 6.9)
  assert not commits(driven)
  passes(driven, 7.0)
  assert len(commits(driven)) == 1


def test_weights_follow_tokens_and_are_less_for_late_contributions():
  driven = rounds()
  give(driven, 0.0, 0, tokens=400)
  give(driven, 0.0, 1, tokens=200)
  give(driven, 0.0, 2, tokens=400, late=1)
  (commit,) = commits(driven)
  shares = rules.shares([(400, 4, 0), (200, 4, 0), (400, 4, 1)])
  assert [p.weight for p in commit.parts] == [3 * share for share in shares]
  assert math.fsum(p.weight for p in commit.parts) == pytest.approx(3)


def test_a_contribution_too_late_for_its_round_is_stale():
  driven = rounds(overlap=0)
  give(driven, 0.0, 0)
  give(driven, 0.0, 1)
  assert len(commits(driven)) == 1
  give(driven, 0.1, 2)
  peer, message = driven.sent[-1]
  assert (peer, message.reason) == ("p2", "stale")
  assert isinstance(message, msg.Dropped)


def test_learner_is_removed_if_its_contribution_lacks_its_work():
  driven = rounds()
  for peer, work in (("p1", b""), ("p2", b"\x93nonsense")):
    driven.arrive(peer, 0, 0, b"none", work=work)
  removed = [(to, m.reason) for to, m in driven.sent if isinstance(m, Removed)]
  assert [to for to, _ in removed] == ["p1", "p2"]
  assert all("a contribution without its work" in why for _, why in removed)
  assert not driven.core.is_over


def test_a_learner_without_a_contribution_to_a_round_is_called_once():
  driven = rounds(overlap=9)
  called = lambda: [
    (to, message.step)
    for to, message in driven.sent
    if isinstance(message, msg.Call)
  ]
  give(driven, 10.0, 1)
  assert called() == [("p0", 0), ("p2", 0)]
  give(driven, 10.1, 2)
  give(driven, 10.2, 0)
  assert len(commits(driven)) == 1
  assert len(called()) == 2
  give(driven, 20.0, 0, step=1)
  assert called()[2:] == [("p1", 1), ("p2", 1)]


def test_contribution_before_its_turn_does_not_begin_a_round():
  driven = rounds(overlap=2, safety=0.5)
  give(driven, 10.0, 0, begins=False)
  give(driven, 20.0, 1, begins=False)
  passes(driven, 100.0)
  assert not commits(driven)
  assert not any(isinstance(m, msg.Call) for _, m in driven.sent)
  # It counts once the round has begun, whose window knows nothing of the wait.
  driven = rounds(overlap=2, safety=0.5)
  give(driven, 10.0, 0, begins=False)
  give(driven, 100.0, 1)
  assert driven.core.deadline() == pytest.approx(100.0 + 0.5 * 2.0)
  passes(driven, 101.0)
  assert [p.replica for p in commits(driven)[0].parts] == [0, 1]


def test_contributions_of_all_before_their_turn_are_merged():
  driven = rounds()
  for replica in range(3):
    give(driven, 10.0 + replica, replica, begins=False)
  assert len(commits(driven)) == 1


def test_contribution_before_its_turn_waits_at_most_the_timeout():
  driven = rounds(overlap=2, safety=0.5)
  timeout = driven.config.rules.timeout
  give(driven, 10.0, 0, begins=False)
  assert driven.core.deadline() <= 10.0 + timeout / 2
  passes(driven, 10.0 + timeout / 2)
  called = [to for to, m in driven.sent if isinstance(m, msg.Call)]
  assert called == ["p1", "p2"]
  # No other contributes: the error comes in time, and names the missing replicas.
  passes(driven, 10.0 + timeout - 0.1)
  assert not ends(driven)
  passes(driven, 10.0 + timeout)
  (ended,) = ends(driven)
  assert ended.error == "CoordinatorError"
  assert "replica 1, 2" in ended.reason
