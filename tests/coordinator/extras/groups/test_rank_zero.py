"""Process 0 of a replica: what it waits for, and what it has the others do."""

import math

from optax_dist.coordinator.extras.groups import commands
from optax_dist.coordinator.extras.groups.rank_zero import RankZero
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg

SUBMITTED = msg.SubmitGradient(0, 1, 0, 1, True)
# The same, of another process.
READY = msg.SubmitGradient(0, 1, 0, 1, True, b"", "[7]", 0.5)


class Core:
  """A core that returns prepared effects, and keeps its inputs."""

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
    self.rank_zero = RankZero(self.core, workers, 60.0)
    self.now = 0.0
    self.give(ins.Started())
    self.hear(1, commands.Ready())
    assert not self.core.given  # Nobody calls the coordinator before all hear.
    self.hear(2, commands.Ready())
    assert self.core.given == [ins.Started()]
    self.core.given.clear()

  def give(self, input_):
    return self.rank_zero.step(input_, self.now)

  def hear(self, rank, what):
    return self.give(ins.Received(f"a{rank}", what))

  def want(self, *effects):
    """The effects of `RankZero` if these are the core's."""
    self.core.answers = list(effects)
    return self.give(ins.TimePassed())


def test_gradient_is_finite_only_if_all_processes_say_so():
  replica = Replica()
  replica.hear(2, READY)
  replica.hear(1, msg.SubmitGradient(0, 1, 0, 1, False))
  replica.give(SUBMITTED)
  assert not replica.core.given[0].finite


def test_fingerprint_covers_all_processes():
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


def test_rank_zero_obeys_only_processes_of_its_replica():
  replica = Replica()
  heard = ins.Received("b1", msg.Leave(True, "bad"))
  assert replica.give(heard) == []
  assert replica.core.given == [heard]  # Which takes it for a forged message.
