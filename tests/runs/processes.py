"""The processes of a run, their coordinator, and what strikes them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import os
import pathlib
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from typing import Any, Literal

import workers

from optax_dist.coordinator import journal
from optax_dist.coordinator.protocol import entries
from optax_dist.coordinator.server import process as server
from tests.runs import replica as program

# Seconds after which a condition counts as one that never becomes true.
DEADLINE = 120.0
# Of what a process has said, so many steps are remembered.
_STEPS = 20_000


class Stuck(AssertionError):
  """A condition did not become true, or a process went wrong."""


@dataclasses.dataclass(eq=False)
class Member:
  """A process in a run.

  Attributes:
    process: the process.
    replica: its replica's index.
    rank: its index in the replica.
    incarnation: how many processes were this one before.
    joined: what it has said when it joined; None before.
    steps: the last of its steps.
    result: its last message; None so far.
    killed: whether it has died.
    doomed: whether it may.
  """

  process: workers.Worker
  replica: int
  rank: int = 0
  incarnation: int = 0
  joined: workers.Event | None = None
  steps: list[workers.Event] = dataclasses.field(default_factory=list)
  result: workers.Event | None = None
  killed: bool = False
  doomed: bool = False

  @property
  def over(self) -> bool:
    """Whether nothing more comes from it."""
    return self.killed or self.result is not None

  @property
  def step(self) -> int:
    """The last step that it has seen; -1 before it has joined."""
    last = self.steps[-1] if self.steps else self.joined
    return last["step"] if last else -1

  def steps_of(self, *members: int, after: float = 0.0) -> list[workers.Event]:
    """Those of its last steps that had exactly these members, since a time."""
    last = itertools.takewhile(lambda e: e["at"] > after, reversed(self.steps))
    return [e for e in last if e["members"] == list(members)][::-1]

  def __str__(self) -> str:
    rank = f", process {self.rank}" if self.rank else ""
    return f"replica {self.replica}{rank}.{self.incarnation}"


class Coordinator:
  """The coordinator of a run, which is started again if it is killed."""

  def __init__(
    self, folder: pathlib.Path, secret: str, host: str = "", at: str = ""
  ):
    """Sets where it is.

    Args:
      folder: for its logs.
      secret: of the job.
      host: the network namespace that it is in; "" for this one's.
      at: its address there.
    """
    self._folder, self._secret = folder, secret
    self._host, self._at = host, at
    self._process: server.CoordinatorProcess | None = None
    self._log = folder
    # Whether its death is meant, how often it is killed once more, and when one
    # that is stopped goes on or is replaced.
    self._killed, self._kills = False, 0
    self._stopped_until, self._replaced = math.inf, False

  @property
  def address(self) -> str:
    """Its address."""
    if self._process is None:
      # None continues what an earlier one has written.
      new = tempfile.mkdtemp(prefix="coordinator-", dir=self._folder)
      self._log = pathlib.Path(new, "coordinator.log")
      self._start(0)
    assert self._process is not None
    return self._process.address

  @property
  def is_stopped(self) -> bool:
    """Whether it is stopped for now."""
    return self._stopped_until < math.inf

  def kill(self, times: int = 1) -> None:
    """Kills it, also if it is stopped, and the next ones once they are there."""
    assert self._process is not None
    self._killed, self._kills = True, times - 1
    self._process.kill()

  def stop(self, seconds: float, replaced: bool = False) -> None:
    """Stops it; then it goes on, or is killed and started again."""
    assert self._process is not None
    self._process.process.send_signal(signal.SIGSTOP)
    self._stopped_until = time.monotonic() + seconds
    self._replaced = replaced

  def cut_power(self, lost: int) -> None:
    """Kills it as the end of its host does: its logs lack so many bytes.

    What was synced stays.
    """
    self.kill()
    for log in self._log.parent.glob(f"{self._log.name}*"):
      if log.suffix != ".lock":
        os.truncate(log, max(_synced(log), log.stat().st_size - lost))

  def end(self) -> None:
    """Kills it for good: `address` is that of another one then."""
    if self._process is not None:
      self._process.kill()
      self._process.stop()
    self._process = None

  def look_after(self) -> None:
    """Starts it again, as a launcher does, or lets it go on.

    Raises:
      Stuck: it has died by itself.
    """
    if self._process is None:
      return
    if time.monotonic() > self._stopped_until:
      self._stopped_until = math.inf
      if self._replaced:
        self.kill()
      else:
        self._process.process.send_signal(signal.SIGCONT)
    if (code := self._process.process.poll()) is None:
      return
    if not self._killed:
      raise Stuck(f"the coordinator has ended with exit code {code}")
    port = int(self._process.address.rpartition(":")[2])
    self._process.stop()
    self._start(port)
    if self._kills:
      self.kill(self._kills)

  def _start(self, port: int) -> None:
    self._killed = False
    settings = {"port": port, "log": self._log}
    if self._host:
      settings |= {"bind": self._at, "advertise": self._at, "port": 29300}

    def start():
      if self._host:
        workers.enter(self._host)
      return server.start(self._secret.encode(), **settings)

    # In a thread of its own, as that moves to the host.
    with futures.ThreadPoolExecutor(1) as pool:
      self._process = pool.submit(start).result()


def _synced(log: pathlib.Path) -> int:
  """The size of a log on disk after a power loss, which takes the last steps."""
  data = log.read_bytes()
  end = result = data.find(b"\n") + 1
  # Length and two checksums of four bytes each precede a record.
  while (begin := end + 12) <= len(data):
    end = begin + int.from_bytes(data[end : end + 4], "little")
    if end > len(data):
      break
    record = entries.RECORDS.decode(data[begin:end])
    if not all(isinstance(e, entries.Committed) for e in record.entries):
      result = end
  return result


class Processes:
  """All processes of a run, those that have ended too; a context manager.

  No process is left when it exits.

  Attributes:
    job: what processes are told that are started from now on.
    folder: for what they write.
    journal: its file.
    coordinator: theirs.
    everyone: the members, in the order of their starts.
    problems: what went wrong so far.
    entered: the process that has come to the phase of `arm`; None so far.
    may_end: whether they may end by themselves.
    errors_expected: whether they may end with an error.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    job: program.Job,
    *,
    method: workers.Method = "spawn",
    restarts: Literal["", "replica", "process"] = "",
    hosts: Sequence[str] = (),
    coordinator: tuple[str, str] = ("", ""),
  ):
    """Begins a run; `start` starts the processes of a replica.

    Args:
      folder: for what they write; made anew.
      job: what they are told.
      method: how processes are started; see `workers`.
      restarts: what is started again if a process ends: nothing, its replica as
        a whole, or that process, as whoever knows only its own host does.
      hosts: for each process, the network namespace that it is in; none: this
        one's.
      coordinator: the host of the coordinator and its address there; "": here.
    """
    self.folder = folder
    # With the journal of an earlier run, each step would be there twice.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    self.journal = folder / "journal.jsonl"
    self.job = dataclasses.replace(
      job,
      secret=secrets.token_hex(),
      join={"journal": str(self.journal), **job.join},
    )
    self._method, self._restarts, self._hosts = method, restarts, hosts
    self._settings: dict[str, Any] = {
      "jax_platforms": os.environ.get("JAX_PLATFORMS", "cpu"),
      "jax_num_cpu_devices": 1,
    }
    if job.processes > 1:
      self._settings["jax_cpu_collectives_implementation"] = "gloo"
    else:
      # Processes are killed all the time: their successors need not compile. Of
      # programs of several processes only one would keep them.
      self._settings |= {
        "jax_compilation_cache_dir": str(folder.parent / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
      }
    self.coordinator = Coordinator(folder, self.job.secret, *coordinator)
    self.everyone: list[Member] = []
    self.problems: list[str] = []
    self.entered: Member | None = None
    self.may_end = self.errors_expected = False
    self._armed: dict[str, Any] | None = None
    self._finishing = False
    # Stopped processes, and when they go on.
    self._stopped: list[tuple[float, Member]] = []

  def __enter__(self) -> Processes:
    return self

  def __exit__(self, *error: object) -> None:
    self.end()

  @property
  def live(self) -> list[Member]:
    """Those that take part, or begin to."""
    return [m for m in self.everyone if not m.over]

  @property
  def any_stopped(self) -> bool:
    """Whether one is stopped for now, or the coordinator."""
    return bool(self._stopped) or self.coordinator.is_stopped

  def of(self, replica: int) -> list[Member]:
    """The latest processes of a replica, by rank."""
    own = {m.rank: m for m in self.everyone if m.replica == replica}
    return [own[rank] for rank in sorted(own)]

  def start(self, replica: int) -> list[Member]:
    """Starts all processes of a replica."""
    for rank in range(self.job.processes):
      self._start(replica, rank)
    return self.of(replica)

  def _start(self, replica: int, rank: int) -> None:
    same = [m for m in self.everyone if (m.replica, m.rank) == (replica, rank)]
    job = dataclasses.replace(
      self.job,
      join=self.job.join | {"coordinator_address": self.coordinator.address},
      armed=self._armed,
      replica=replica,
      rank=rank,
      incarnation=len(same),
    )
    index = replica * self.job.processes + rank
    process = workers.Worker(
      f"replica {replica}.{rank}",
      program.main,
      {"job": job},
      self.folder / f"process-{len(self.everyone)}.log",
      method=self._method,
      host=self._hosts[index] if self._hosts else "",
      **self._settings,
    )
    self.everyone.append(Member(process, replica, rank, len(same)))
    if self._finishing:
      process.send(do="finish")

  # What strikes them.

  def tell(self, **message: Any) -> None:
    """Sends all a message; see `replica`."""
    for member in self.live:
      member.process.send(**message)

  def arm(
    self, phase: str, skip: int = 0, process: tuple[int, int] | None = None
  ) -> None:
    """Has the next process that enters a phase wait for `go`; see `entered`.

    Args:
      phase: the phase; "" for none.
      skip: how often a process enters it before.
      process: the replica and rank of the only process that it concerns; None
        for all.
    """
    self.entered = None
    self._armed = {"phase": phase, "skip": skip, "process": process}
    self.tell(do="arm", **self._armed)
    if not phase:
      self._armed = None

  def kill(self, member: Member) -> None:
    """Kills one; the other processes of its replica may die with it."""
    for one in self.of(member.replica):
      one.doomed = True
    member.process.signal(signal.SIGKILL)

  def stop(self, some: Iterable[Member], seconds: float) -> None:
    """Stops some for a time."""
    until = time.monotonic() + seconds
    for member in some:
      member.process.signal(signal.SIGSTOP)
      self._stopped.append((until, member))

  def tell_to_finish(self) -> None:
    """Has all replicas end the run after their next steps, and later ones too."""
    self._finishing = self.may_end = True
    self.tell(do="finish")

  def finish(self) -> None:
    """Has all end the run, and waits for it."""
    self.tell_to_finish()
    self.wait(lambda: not self.live, "not all come to the end")
    if self.job.processes == 1:
      ended = [m for m in self.everyone if m.result is not None]
      self.problems += [
        f"{m} {m.process.ending()}" for m in ended if m.process.wait(60.0) != 0
      ]

  # What they say.

  def wait(
    self, ready: Callable[[], Any], what: str, seconds: float = DEADLINE
  ) -> None:
    """Waits until a condition is true; nothing may go wrong meanwhile.

    Raises:
      Stuck: it did not become true in time, or something is wrong; `problems`
        has it, too.
    """
    end = time.monotonic() + seconds
    while not ready():
      self._look()
      if not self.problems and time.monotonic() > end:
        self.problems.append(f"hang: {what} in {seconds:g} s: {self.where()}")
      if self.problems:
        raise Stuck("; ".join(self.problems))

  def sleep(self, seconds: float) -> None:
    """Waits for a time; nothing may go wrong meanwhile."""
    end = time.monotonic() + seconds
    self.wait(lambda: time.monotonic() >= end, "time", seconds + DEADLINE)

  def _look(self) -> None:
    """Waits briefly for messages, and continues those that were stopped."""
    live = {m.process: m for m in self.live}
    for process in workers.wait_for_messages(live, 0.02):
      member = live[process]
      events, ended = process.read()
      for event in events:
        self._take(member, event)
      if ended and not member.over:
        self._died(member)
    now = time.monotonic()
    for until, member in list(self._stopped):
      if now >= until:
        self._stopped.remove((until, member))
        member.process.signal(signal.SIGCONT)
    try:
      self.coordinator.look_after()
    except Stuck as error:
      self.problems.append(str(error))

  def _take(self, member: Member, said: workers.Event) -> None:
    match said["event"]:
      case "joined":
        member.joined = said
      case "step":
        member.steps.append(said)
        if len(member.steps) > 2 * _STEPS:
          del member.steps[:_STEPS]
      case "reached" if self._armed is not None:
        self.arm("")
        self.entered = member
      case "reached":
        member.process.send(do="go")
      case "result":
        member.result = said
        good = said["error"] in (None, "finished")
        if not good and self._restarts == "process":
          self._died(member)
        elif not good:
          # One whose replica loses a process may say so.
          if not (self.errors_expected or member.doomed):
            self.problems.append(f"{member}: {said['error']}")
        elif not self.may_end:
          self.problems.append(f"ended early: {member} at step {member.step}")

  def _died(self, member: Member) -> None:
    member.killed = True
    if self._restarts == "process":
      self._discard(member)
      self._start(member.replica, member.rank)
      return
    member.process.wait(5.0)
    if not member.doomed:
      self.problems.append(f"{member} {member.process.ending()}")
    elif self._restarts:
      for one in self.of(member.replica):
        one.killed = True
        self._discard(one)
      self.start(member.replica)

  def where(self) -> str:
    """Where each process is; their stacks are in files then."""
    result = []
    for member in self.live:
      member.process.signal(signal.SIGCONT)
      stacks = self.folder / f"stacks-{self.everyone.index(member)}.txt"
      stacks.write_text(member.process.where())
      result.append(f"{member} at step {member.step}, see {stacks}")
    return "; ".join(result)

  # The end.

  def end(self) -> None:
    """Ends all processes."""
    for member in self.everyone:
      self._discard(member)
    self.coordinator.end()

  def _discard(self, member: Member) -> None:
    if member.process.kill():
      self.problems.append(f"{member} has left processes")

  def reports(self) -> list[tuple[int, int, dict[str, Any]]]:
    """The reports of replicas that reached the end, for `checks.check`."""
    return [
      # Of a replica of several processes, fingerprints are of shards.
      (m.replica, m.incarnation, m.result | {"prints": {}})
      if self.job.processes > 1
      else (m.replica, m.incarnation, m.result)
      for m in self.everyone
      if m.result is not None and m.result["error"] is None and not m.rank
    ]

  def records(self) -> journal.Contents:
    """The journal, which nobody may have begun."""
    if not self.journal.exists():
      return journal.Contents([], [])
    return journal.read(self.journal)


def prints(members: Iterable[Member]) -> dict[tuple[int, int], list[str]]:
  """By rank and step, the fingerprints of all processes, dead ones included.

  Processes of one rank hold the same.
  """
  result = collections.defaultdict(list)
  for one in members:
    joined = [] if one.joined is None else [one.joined]
    for step, digest in {(e["step"], e["print"]) for e in joined + one.steps}:
      result[one.rank, step].append(digest)
  return dict(result)
