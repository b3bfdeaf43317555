"""The processes of a run, and what they have said."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import workers

from optax_dist.coordinator import journal
from tests.chaos.pool import Pool


@dataclasses.dataclass(eq=False)
class Member:
  """A process in a run.

  Attributes:
    process: the process.
    replica: its replica's index.
    incarnation: how many processes were this replica before.
    joined: whether it takes part.
    step: the last step that it has seen.
    steps: how many it has said.
    is_leader: whether it led after that.
    result: its last message; None so far.
    killed: whether it has died.
    doomed: whether it was to.
  """

  process: workers.Worker
  replica: int
  incarnation: int
  joined: bool = False
  step: int = 0
  steps: int = 0
  is_leader: bool = False
  result: workers.Event | None = None
  killed: bool = False
  doomed: bool = False

  @property
  def over(self) -> bool:
    """Whether nothing more comes from it."""
    return self.killed or self.result is not None

  def __str__(self) -> str:
    return f"replica {self.replica}"

  def take(self, said: workers.Event) -> None:
    """Notes what it has said."""
    match said["event"]:
      case "joined":
        self.joined = True
      case "step":
        self.step, self.is_leader = said["step"], said["leader"]
        self.steps += 1
      case "result":
        self.result = said


class Members:
  """All processes of a run, those that have ended too.

  Attributes:
    folder: for what they write.
    everyone: the members, in the order of their starts.
    problems: what went wrong so far.
  """

  def __init__(self, pool: Pool, name: str, limit: float):
    """Begins a run.

    Args:
      pool: what starts the processes.
      name: of the run and its folder.
      limit: seconds after which the run counts as hanging.
    """
    self._pool = pool
    self.folder = pool.folder / name
    # With the journal of an earlier run, each step would be there twice.
    shutil.rmtree(self.folder, ignore_errors=True)
    self.folder.mkdir()
    self._start = time.monotonic()
    self._end = self._start + limit
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

  def add(self, replica: int, job: Mapping[str, Any]) -> Member:
    """Starts the process of a replica."""
    incarnation = sum(m.replica == replica for m in self.everyone)
    number = {"replica": replica, "incarnation": incarnation}
    process = self._pool.start(
      f"replica {replica}",
      {"job": {"secret": self._pool.secret, **number, **job}},
      self.folder / f"process-{len(self.everyone)}.log",
    )
    self.everyone.append(Member(process, replica, incarnation))
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
        if process.wait(5.0) != -signal.SIGKILL or not member.doomed:
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

  def hangs(self) -> bool:
    """Whether it takes too long; then also says where each process is."""
    if time.monotonic() < self._end:
      return False
    problems = ["hang: not over in time"]
    for member in self.live:
      member.process.signal(signal.SIGCONT)
      stacks = self.folder / f"stacks-{self.everyone.index(member)}.txt"
      stacks.write_text(member.process.where())
      problems.append(f"{member} at step {member.step}, see {stacks}")
    self.problems.append("; ".join(problems))
    return True

  def end(self) -> None:
    """Ends all processes."""
    for member in self.everyone:
      if self._pool.discard(member.process):
        self.problems.append(f"{member} has left processes")


def records(path: pathlib.Path) -> tuple[list[dict[str, Any]], int]:
  """The records of a journal, each once, and how many lines are no records."""
  found, bad = [], 0
  for line in path.read_text().splitlines() if path.exists() else ():
    try:
      found.append(json.loads(line))
    except ValueError:
      bad += 1
  return list(filter(journal.Once(), found)), bad
