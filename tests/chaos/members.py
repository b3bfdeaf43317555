"""The processes of a run, and what they have said."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import workers

from optax_dist.coordinator import journal
from tests.chaos.pool import Pool

# Of what it has said, so many steps are remembered.
_STEPS = 20_000


@dataclasses.dataclass(eq=False)
class Member:
  """A process in a run.

  Attributes:
    process: the process.
    replica: its replica's index.
    rank: its index in the replica.
    incarnation: how many processes were this one before.
    events: what it has said, other than its steps and its result.
    steps: the last of its steps.
    result: its last message; None so far.
    killed: whether it has died.
    doomed: whether it may.
  """

  process: workers.Worker
  replica: int
  rank: int = 0
  incarnation: int = 0
  events: list[workers.Event] = dataclasses.field(default_factory=list)
  steps: list[workers.Event] = dataclasses.field(default_factory=list)
  result: workers.Event | None = None
  killed: bool = False
  doomed: bool = False

  @property
  def over(self) -> bool:
    """Whether nothing more comes from it."""
    return self.killed or self.result is not None

  @property
  def joined(self) -> bool:
    """Whether it takes part."""
    return bool(self.said("joined"))

  @property
  def step(self) -> int:
    """The last step that it has seen; 0 before."""
    return self.steps[-1]["step"] if self.steps else 0

  def said(self, event: str) -> list[workers.Event]:
    """Its messages of this kind."""
    return [e for e in self.events if e["event"] == event]

  def steps_of(self, *members: int, after: float = 0.0) -> list[workers.Event]:
    """Those of its last steps that had exactly these members, since a time."""
    last = itertools.takewhile(lambda e: e["at"] > after, reversed(self.steps))
    return [e for e in last if e["members"] == list(members)][::-1]

  def __str__(self) -> str:
    return f"{self.process.name}.{self.incarnation}"

  def take(self, said: workers.Event) -> None:
    """Notes what it has said."""
    match said["event"]:
      case "step":
        self.steps.append(said)
        if len(self.steps) > 2 * _STEPS:
          del self.steps[:_STEPS]
      case "result":
        self.result = said
      case _:
        self.events.append(said)


class Stuck(AssertionError):
  """A condition did not become true; the message says where each process is."""


class Members:
  """All processes of a run, those that have ended too.

  Attributes:
    folder: for what they write.
    everyone: the members, in the order of their starts.
    problems: what went wrong so far.
  """

  def __init__(self, pool: Pool, name: str):
    """Begins a run.

    Args:
      pool: what starts the processes.
      name: of the run and its folder.
    """
    self._pool = pool
    self.folder = pool.folder / name
    # With the journal of an earlier run, each step would be there twice.
    shutil.rmtree(self.folder, ignore_errors=True)
    self.folder.mkdir()
    self._start = time.monotonic()
    self.everyone: list[Member] = []
    self.problems: list[str] = []
    # Stopped processes, and when they go on.
    self._stopped: list[tuple[float, Member]] = []

  @property
  def live(self) -> list[Member]:
    """Those that take part, or begin to."""
    return [m for m in self.everyone if not m.over]

  @property
  def seconds(self) -> float:
    """Since the beginning."""
    return time.monotonic() - self._start

  @property
  def any_stopped(self) -> bool:
    """Whether one is stopped for now."""
    return bool(self._stopped)

  def add(
    self, replica: int, job: Mapping[str, Any], rank: int = 0, host: str = ""
  ) -> Member:
    """Starts a process of a replica.

    Args:
      replica: its replica's index.
      job: what to do; it is also told the secret, and which process it is.
      rank: its index in the replica.
      host: see `workers.Worker`.
    """
    same = [m for m in self.everyone if (m.replica, m.rank) == (replica, rank)]
    told = {"secret": self._pool.secret, "replica": replica, "rank": rank}
    process = self._pool.start(
      f"replica {replica}" + (f", process {rank}" if rank else ""),
      {"job": {**job, **told, "incarnation": len(same)}},
      self.folder / f"process-{len(self.everyone)}.log",
      host,
    )
    self.everyone.append(Member(process, replica, rank, len(same)))
    return self.everyone[-1]

  def look(self) -> Iterator[tuple[Member, workers.Event]]:
    """Waits briefly for messages, and continues those that were stopped.

    Yields:
      A member and what it has said; "died" if it has ended without a result.
    """
    live = {m.process: m for m in self.live}
    for process in workers.wait_for_messages(live, 0.02):
      member = live[process]
      events, ended = process.read()
      for event in events:
        member.take(event)
        yield member, event
      if ended and not member.over:
        member.killed = True
        process.wait(5.0)
        if not member.doomed:
          self.problems.append(f"{member} {process.ending()}")
        yield member, {"event": "died"}
    now = time.monotonic()
    for until, member in list(self._stopped):
      if now >= until:
        self._stopped.remove((until, member))
        member.process.signal(signal.SIGCONT)

  def tell(self, **message: Any) -> None:
    """Sends all a message."""
    for member in self.live:
      member.process.send(**message)

  def kill(self, member: Member) -> None:
    """Kills one."""
    member.doomed = True
    member.process.signal(signal.SIGKILL)

  def stop(self, some: Iterable[Member], seconds: float) -> None:
    """Stops some for a time."""
    for member in some:
      member.process.signal(signal.SIGSTOP)
    until = time.monotonic() + seconds
    self._stopped += [(until, member) for member in some]

  def wait(self, ready: Callable[[], Any], what: str, seconds: float) -> None:
    """Waits until a condition is true; nothing may go wrong meanwhile.

    Raises:
      Stuck: it did not become true in time, or a process has died.
    """
    end = time.monotonic() + seconds
    while not ready():
      for _ in self.look():
        pass
      if self.problems:
        raise Stuck("; ".join(self.problems))
      if time.monotonic() > end:
        raise Stuck(f"{what} in {seconds:g} s: {self.where()}")

  def where(self) -> str:
    """Where each process is; their stacks are in files then."""
    result = []
    for member in self.live:
      member.process.signal(signal.SIGCONT)
      stacks = self.folder / f"stacks-{self.everyone.index(member)}.txt"
      stacks.write_text(member.process.where())
      result.append(f"{member} at step {member.step}, see {stacks}")
    return "; ".join(result)

  def end(self) -> list[str]:
    """Ends all processes; returns all problems."""
    for member in self.everyone:
      if self._pool.discard(member.process):
        self.problems.append(f"{member} has left processes")
    return self.problems


def read_journal(path: pathlib.Path) -> journal.Contents:
  """Reads a journal, which nobody may have begun."""
  return journal.read(path) if path.exists() else journal.Contents([], [])
