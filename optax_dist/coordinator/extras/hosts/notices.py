"""The notices by which the launchers of a job's hosts know each other.

Each launcher writes one notice, under its own key of the job's store, and reads
those of host 0 and of the hosts it shares replicas with; host 0 reads all.
"""

from __future__ import annotations

from optax_dist.coordinator.protocol import codec


class Stage:
  """The stage of a host's part of a replica: texts, for the wire.

  Attributes:
    READY: it starts once the other hosts of the replica are ready, too.
    RUNS: it was started, and is not known to have ended.
    LEAVES: it runs, and was asked to end by a signal to another host.
    ENDED: it has ended with the replica, because of an error; it may be
      restarted. Also what was never started.
    DONE: it finished successfully.
    ABSENT: it was abandoned.
  """

  READY = "ready"
  RUNS = "runs"
  LEAVES = "leaves"
  ENDED = "ended"
  DONE = "done"
  ABSENT = "absent"


class Part(codec.Struct):
  """A host's processes of a replica.

  Attributes:
    start: how often the replica was started before; -1 before the first start.
    stage: a value of `Stage`.
    address: of the replica's first host: where its processes meet, ``host:port``.
    code: how the last start has failed: exit code of the process that failed
      first, negative for a signal.
    words: which process it was, and how it ended; or why it was abandoned.
    tail: the last lines of its output.
  """

  start: int = -1
  stage: str = Stage.ENDED
  address: str = ""
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
    process: where it runs, for people.
    settings: the settings that must be the same on all hosts, by flag.
    beat: increases while it lives.
    over: whether it knows that the run is over.
    signal: the signal that asked it to end; 0 for none.
    part: its part of the replica that it shares with other hosts, if it does.
    never_joined: replicas that have ended before they joined, as far as it knows.
    checkup: of a host that is checked before a job.
  """

  launcher: str
  process: str = ""
  settings: tuple[tuple[str, str], ...] = ()
  beat: int = 0
  over: bool = False
  signal: int = 0
  part: Part = Part()
  never_joined: tuple[int, ...] = ()
  checkup: Checkup | None = None


CODEC: codec.Codec[Notice] = codec.Codec(Notice)
