"""The notices by which the launchers of a job's hosts know each other.

Each launcher writes one notice, under its own key of the job's store, and reads
those of host 0 and of the hosts it shares replicas with; host 0 reads all.
"""

from __future__ import annotations

from optax_dist.coordinator.protocol import codec


class Stage:
  """The stage of a replica, or of a host's part of it: texts, for the wire.

  Attributes:
    RUNS: it was started, and is not known to have ended.
    ENDED: it ended with an error; it may be restarted.
    DONE: it finished successfully.
    ABSENT: it was abandoned.
  """

  RUNS = "runs"
  ENDED = "ended"
  DONE = "done"
  ABSENT = "absent"


class Plan(codec.Struct):
  """A decision of a replica's first host.

  Attributes:
    replica: its index.
    start: how often it was started before.
    address: the address of its process 0, ``host:port``.
    launchers: the launchers that take part, one for each of its hosts, in
      order.
    stage: a value of `Stage`.
    words: why it has ended or was abandoned.
  """

  replica: int
  start: int
  address: str
  launchers: tuple[str, ...]
  stage: str = Stage.RUNS
  words: str = ""


class Part(codec.Struct):
  """The state of a host's processes of a replica.

  Attributes:
    replica: its index.
    decider: the launcher that decided on this start.
    start: how often the replica was started before.
    stage: a value of `Stage`, but not `ABSENT`.
    code: exit code of the process that failed first, negative for a signal.
    words: which process it was, and how it ended.
    tail: the last lines of its output.
  """

  replica: int
  decider: str
  start: int
  stage: str = Stage.RUNS
  code: int = 0
  words: str = ""
  tail: str = ""


class Checkup(codec.Struct):
  """What `optax-dist doctor` tells those of other hosts.

  Attributes:
    address: where it listens, for others to try to connect.
    clock: its wall clock, in seconds since 1970.
    done: whether it has tried to connect to all others.
  """

  address: str
  clock: float
  done: bool = False


class Notice(codec.Struct):
  """What a launcher tells the others.

  Attributes:
    launcher: its unique name.
    beat: increases while it lives.
    over: whether it knows that the run is over.
    signal: the signal that asked it to end; 0 for none.
    plans: plans for the replicas whose first host it is on.
    parts: its parts of all replicas that it shares.
    settings: the settings that must be the same on all hosts, by flag.
    process: where it runs, for people.
    checkup: of a host that is checked before a job.
  """

  launcher: str
  beat: int = 0
  over: bool = False
  signal: int = 0
  plans: tuple[Plan, ...] = ()
  parts: tuple[Part, ...] = ()
  settings: tuple[tuple[str, str], ...] = ()
  process: str = ""
  checkup: Checkup | None = None

  def plan(self, replica: int) -> Plan | None:
    """The plan of a replica, if there is one."""
    return next((p for p in self.plans if p.replica == replica), None)

  def part(self, replica: int, decider: str, start: int) -> Part | None:
    """The part in one start of a replica, if there is one."""
    wanted = (replica, decider, start)
    same = lambda p: (p.replica, p.decider, p.start) == wanted
    return next((p for p in self.parts if same(p)), None)


CODEC: codec.Codec[Notice] = codec.Codec(Notice)
