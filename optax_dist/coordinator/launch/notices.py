"""What launchers tell each other about replicas that are on several hosts.

Each launcher writes one notice, under its own key of the job's store, and reads
those of the hosts it shares replicas with. Nobody writes another's.
"""

from __future__ import annotations

import dataclasses

from optax_dist.coordinator.protocol import codec


class Stage:
  """How far a replica, or a host's part of it, is: texts, for the wire.

  Attributes:
    RUNS: it was started, and nothing is known of its end.
    ENDED: with an error; it may be started again.
    DONE: it has ended well.
    ABSENT: it was given up.
  """

  RUNS = "runs"
  ENDED = "ended"
  DONE = "done"
  ABSENT = "absent"


@dataclasses.dataclass(frozen=True)
class Plan:
  """What the first host of a replica has decided.

  Attributes:
    replica: its number.
    start: how often it was started before.
    address: where its processes meet, ``host:port``.
    launchers: those that take part, one for each of its hosts, in order.
    stage: one of those of `Stage`.
    words: why it has ended or was given up.
  """

  replica: int
  start: int
  address: str
  launchers: tuple[str, ...]
  stage: str = Stage.RUNS
  words: str = ""


@dataclasses.dataclass(frozen=True)
class Part:
  """What has become of a host's processes of a replica.

  Attributes:
    replica: its number.
    decider: the launcher that has decided on this start.
    start: how often the replica was started before.
    stage: one of those of `Stage`, but not `ABSENT`.
    code: of the process that failed first, the negative for a signal.
    words: which one it was, and how it ended.
    tail: the last lines that it printed.
  """

  replica: int
  decider: str
  start: int
  stage: str = Stage.RUNS
  code: int = 0
  words: str = ""
  tail: str = ""


@dataclasses.dataclass(frozen=True)
class Notice:
  """All that a launcher tells the others.

  Attributes:
    launcher: a name of its own, of which there is no second one.
    beat: grows while it lives.
    over: whether it knows that the run is over.
    signal: the number of the signal that it was asked to end by; 0 for none.
    plans: of the replicas whose first host it is on.
    parts: of all replicas that it shares.
  """

  launcher: str
  beat: int = 0
  over: bool = False
  signal: int = 0
  plans: tuple[Plan, ...] = ()
  parts: tuple[Part, ...] = ()

  def plan(self, replica: int) -> Plan | None:
    """That of a replica, if there is one."""
    return next((p for p in self.plans if p.replica == replica), None)

  def part(self, replica: int, decider: str, start: int) -> Part | None:
    """That of a replica's start, if there is one."""
    wanted = (replica, decider, start)
    same = lambda p: (p.replica, p.decider, p.start) == wanted
    return next((p for p in self.parts if same(p)), None)


CODEC: codec.Codec[Notice] = codec.Codec(Notice)
