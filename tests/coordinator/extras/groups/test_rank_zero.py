"""Process 0 of a replica: what it waits for, and what it has the others do."""

import math

import pytest

from optax_dist.coordinator.extras.groups import commands
from optax_dist.coordinator.extras.groups.rank_zero import RankZero
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.entries import Member, Part, RoundId

ROUND = RoundId(0, 0, 1)
PLACES = [
  commands.join_addresses([(f"{x}{r}", f"at {x}{r}") for r in range(3)])
  for x in "ab"
]
PEERS = (Member(0, 0, "a0", PLACES[0]), Member(1, 1, "b0", PLACES[1]))
PARTS = (Part(0, 0, 0, 0, 0, 1, 1.0), Part(1, 1, 0, 0, 0, 1, 1.0))
AGGREGATE = fx.Aggregate(ROUND, PARTS, PEERS, (), 0)
SUBMITTED = msg.SubmitGradient(0, 1, 0, 1, 1, True)
# The same, of another process.
READY = msg.SubmitGradient(0, 1, 0, 1, 1, True, b"", "[7]", 0.5)


class Core:
  """Answers inputs as it was told; keeps what it was given."""

  def __init__(self):
    self.given, self.answers = [], []

  def step(self, input_, now):
    self.given.append(input_)
    answers, self.answers = self.answers, []
    return answers

  def deadline(self):
    return math.inf


class Replica:
  """A speaker of three processes."""

  def __init__(self):
    self.core = Core()
    workers = (("a1", "at a1"), ("a2", "at a2"))
    self.rank_zero = RankZero(self.core, workers)
    self.now = 0.0

  def give(self, input_):
    return self.rank_zero.step(input_, self.now)

  def hear(self, rank, what):
    return self.give(ins.Received(f"a{rank}", what))

  def want(self, *effects):
    """What is wanted if these are the core's effects."""
    self.core.answers = list(effects)
    return self.give(ins.TimePassed())


def test_a_gradient_is_submitted_once_all_have_it():
  replica = Replica()
  replica.hear(2, READY)
  replica.give(SUBMITTED)
  assert not replica.core.given
  replica.hear(1, READY)
  assert replica.core.given == [SUBMITTED]


def test_a_gradient_is_finite_where_all_of_it_is():
  replica = Replica()
  replica.hear(2, READY)
  replica.hear(1, msg.SubmitGradient(0, 1, 0, 1, 1, False))
  replica.give(SUBMITTED)
  assert not replica.core.given[0].finite


def test_processes_at_different_places_of_the_program_are_an_error():
  replica = Replica()
  replica.hear(2, READY)
  replica.hear(1, msg.SubmitGradient(1, 1, 0, 1, 1, True))
  wanted = replica.give(SUBMITTED)
  assert isinstance(replica.core.given[0], msg.Leave)
  assert "do not take the same steps" in wanted[-1].reason
  assert wanted[-1] == commands.EndGroup(wanted[-1].reason)
  assert {t.peer for t in wanted if isinstance(t, fx.Send)} == {"a1", "a2"}


def test_a_process_that_does_not_come_is_named():
  replica = Replica()
  replica.hear(1, READY)
  replica.give(SUBMITTED)
  assert replica.rank_zero.missing(0.0) == "for process 2 of its own replica"


def test_each_process_exchanges_with_its_like():
  wanted = Replica().want(AGGREGATE)
  result = {t.peer: t.message for t in wanted if isinstance(t, fx.Send)}
  for rank in (1, 2):
    peers = [(p.process, p.address) for p in result[f"a{rank}"].peers]
    assert peers == [(f"{x}{rank}", f"at {x}{rank}") for x in "ab"]
  assert [p.address for p in wanted[-1].peers] == ["at a0", "at b0"]


def test_the_mean_is_there_once_all_have_it_and_then_all_apply_it():
  replica = Replica()
  replica.want(AGGREGATE)
  replica.give(msg.Done(ROUND))
  replica.hear(1, msg.Done(ROUND))
  assert msg.Done not in map(type, replica.core.given)
  replica.hear(2, msg.Done(ROUND))
  assert replica.core.given[-1] == msg.Done(ROUND)
  order = fx.Apply(ROUND)
  wanted = replica.want(order)
  assert wanted[-1] == order
  assert wanted[:-1] == [fx.Send("a1", order), fx.Send("a2", order)]


def test_one_failure_fails_the_attempt_and_is_told_once():
  replica = Replica()
  replica.want(AGGREGATE)
  failed = msg.Failed(ROUND, 1, "nothing moves")
  replica.hear(1, failed)
  replica.give(msg.Failed(ROUND, 0, "another reason"))
  replica.hear(2, msg.Done(ROUND))
  replica.hear(1, msg.Done(ROUND))
  told = [g for g in replica.core.given if not isinstance(g, ins.TimePassed)]
  assert told == [failed]
  # It still runs where it has not failed.
  assert replica.want(fx.Release(ROUND))[-1] == fx.Release(ROUND)
  assert replica.hear(2, msg.Done(ROUND)) == []


def test_a_snapshot_is_there_once_all_have_it():
  replica = Replica()
  fetch = msg.Fetch(7, "b0", PLACES[1])
  wanted = replica.want(fetch)
  assert wanted[0].message.source == "b1"
  replica.give(ins.SnapshotFetched(7, 4))
  replica.hear(1, ins.SnapshotFetched(7, 4))
  replica.hear(2, ins.SnapshotFetched(7, 4))
  assert replica.core.given[-1] == ins.SnapshotFetched(7, 4)
  wanted = replica.want(fx.Restore(4, 7))
  assert wanted[-1] == wanted[0].message == fx.Restore(4, 7)


def test_a_fingerprint_is_one_of_all_processes():
  digests = []
  for last in "xy":
    replica = Replica()
    replica.want(fx.TakeFingerprint(3))
    replica.give(msg.Fingerprint(3, "a-b"))
    replica.hear(2, msg.Fingerprint(3, f"c-{last}"))
    replica.hear(1, msg.Fingerprint(3, "d-e"))
    taken = replica.core.given[-1]
    digests.append(taken.digest.split("-"))
  assert digests[0][0] == digests[1][0]
  assert digests[0][1] != digests[1][1]


@pytest.mark.parametrize(
  "loss",
  [
    ins.PeerLost("a1", "broken", "killed"),
    ins.Received("a1", msg.Leave(True, "ValueError")),
  ],
)
def test_a_process_that_is_lost_takes_its_replica_with_it(loss):
  replica = Replica()
  wanted = replica.give(loss)
  assert isinstance(replica.core.given[-1], msg.Leave)
  assert isinstance(wanted[-1], commands.EndGroup)
  assert "process 1" in wanted[-1].reason
  assert replica.give(SUBMITTED) == []


def test_a_process_may_go_once_the_run_has_ended():
  replica = Replica()
  replica.want(fx.Finished("enough"))
  assert replica.give(ins.PeerLost("a1", "left", "closed")) == []


def test_it_connects_to_all_processes_first():
  """Else it would not know if one of them were gone."""
  replica, started = Replica(), ins.Started()
  replica.core.answers = [fx.Connect("c", "at c")]
  assert replica.give(started) == [
    fx.Connect("a1", "at a1"),
    fx.Connect("a2", "at a2"),
    fx.Connect("c", "at c"),
  ]
  assert replica.core.given == [started]


def test_only_its_own_processes_are_heard():
  replica = Replica()
  heard = ins.Received("b1", msg.Leave(True, "bad"))
  assert replica.give(heard) == []
  assert replica.core.given == [heard]  # Which takes it for a forged message.
