"""Runs plans with real processes, one after another, and checks them."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import secrets
import signal
import time
from collections.abc import Sequence
from typing import Any

import logged_child

from optax_dist.coordinator import journal
from optax_dist.coordinator.launch import child
from tests.chaos import stopped
from tests.chaos.pool import Pool
from tests.churn import checks
from tests.churn.plans import MOST_REPLICAS, STEPS, Event, Plan, Setting

_DEADLINES = {
  "timeout": 30.0,
  "attempt_timeout": 1.5,
  "leader_timeout": 1.0,
}
# Seconds after which a run counts as hanging.
DEADLINE = 100.0
# Seconds for a process to come into the phase in which a fault is to hit it.
_PATIENCE = 3.0


@dataclasses.dataclass
class Result:
  """The result of a run.

  Attributes:
    plan: the plan.
    seconds: how long it took.
    problems: violations; empty in a good run.
    happened: the kinds of events that happened.
    digests: for each step, the digests of all that said one.
    compared: how many digests of a step were said, by all replicas.
  """

  plan: Plan
  seconds: float = 0.0
  problems: list[str] = dataclasses.field(default_factory=list)
  happened: list[str] = dataclasses.field(default_factory=list)
  digests: dict[int, set[str]] = dataclasses.field(default_factory=dict)
  compared: int = 0


@dataclasses.dataclass
class _Member:
  """A process in a run."""

  process: child.Child
  replica: int
  number: int
  joined: bool = False
  step: int = 0
  leads: bool = False
  leaves: bool = False
  doomed: bool = False
  over: bool = False
  kept: bool = False


def run(pool: Pool, plan: Plan, want: dict[int, str] | None) -> Result:
  """Runs one plan, and checks it.

  Args:
    pool: processes, and the store.
    plan: what happens.
    want: the digest after each step of a run without events; None: this is it.
  """
  return _Run(pool, plan, want).run()


class _Run:
  """One run: a job, and its successors after the end of all its processes."""

  def __init__(self, pool: Pool, plan: Plan, want: dict[int, str] | None):
    self._pool, self._plan, self._want = pool, plan, want
    self._result = Result(plan)
    self._folder = pool.folder / f"seed-{plan.seed}-{secrets.token_hex(4)}"
    self._folder.mkdir()
    self._left = list(plan.events)
    self._members: list[_Member] = []
    self._job = 0
    self._stopped = stopped.Stopped()
    # A fault that is to hit a process, the event, and until when.
    self._armed: tuple[_Member, Event, float] | None = None
    self._done: list[dict[str, Any]] = []
    # What ends the job, and when all that is left of it is killed.
    self._ended_by: Event | None = None
    self._end_at = 0.0

  def run(self) -> Result:
    """Runs the plan."""
    start = time.monotonic()
    self._begin(self._plan.replicas)
    while True:
      self._look()
      if time.monotonic() - start > DEADLINE:
        self._hang()
        break
      if not self._live:
        if self._ended_by is None:
          break
        event, self._ended_by = self._ended_by, None
        self._begin(event.replicas)
      self._advance()
    self._result.seconds = time.monotonic() - start
    self._conclude()
    return self._result

  @property
  def _live(self) -> list[_Member]:
    return [m for m in self._members if not m.over]

  @property
  def _limit(self) -> int:
    return self._left[0].step if self._left else STEPS

  def _begin(self, replicas: int) -> None:
    """Begins a job, from the last checkpoint if there is one."""
    self._job += 1
    self._name = f"seed {self._plan.seed} {secrets.token_hex(4)}"
    for replica in range(replicas):
      self._add(replica)

  def _add(self, replica: int) -> None:
    member = _Member(self._pool.take(), replica, len(self._members))
    self._members.append(member)
    member.process.name = f"replica {replica}"
    member.process.send(
      {
        "do": "run",
        "run": self._name,
        "address": self._pool.address,
        "secret": self._pool.secret,
        "replica": replica,
        "replicas": MOST_REPLICAS,
        "limit": self._limit,
        "journal": str(self._folder / f"journal-{self._job}.jsonl"),
        "checkpoints": str(self._folder / "checkpoints")
        if self._plan.events
        else "",
        "deadlines": _DEADLINES,
        "inline": self._plan.inline,
        "setting": dataclasses.asdict(self._plan.setting),
      }
    )

  # What processes say.

  def _look(self) -> None:
    """Waits briefly for events, and handles them."""
    live = self._live
    for member, said, ended in logged_child.read_members(live, 0.02):
      for event in said:
        self._take(member, event)
      if ended and not member.over:
        self._died(member)
    self._stopped.continue_due()

  def _take(self, member: _Member, said: child.Event) -> None:
    match said["event"]:
      case "joined":
        member.joined = True
      case "step":
        member.step, member.leads = said["step"], said["leader"]
        self._result.digests.setdefault(said["step"], set()).add(said["digest"])
        self._result.compared += 1
      case "stopped":
        self._struck(member)
      case "done":
        if not member.leaves:
          self._done.append(said)
      case "result":
        member.over = member.kept = True
        # Without its store a job ends with an error, in the end.
        lost = self._ended_by and self._ended_by.kind == "lose-store"
        if said["error"] is not None and not lost:
          self._result.problems.append(f"{self._who(member)}: {said['error']}")

  def _died(self, member: _Member) -> None:
    member.over = True
    member.process.popen.wait(5.0)
    if not member.doomed or member.process.popen.returncode != -signal.SIGKILL:
      self._result.problems.append(
        f"{self._who(member)} {member.process.ending()}:"
        f" {member.process.tail(4)}"
      )
    if self._armed is not None and self._armed[0] is member:
      self._armed = None
    self._pool.discard(member.process)

  def _who(self, member: _Member) -> str:
    return f"job {self._job}, replica {member.replica}"

  # Events.

  def _advance(self) -> None:
    """Lets the next event happen once all are there for it."""
    live = self._live
    if self._ended_by is not None:
      if time.monotonic() > self._end_at:
        for member in live:
          member.doomed = True
          member.process.signal(signal.SIGKILL)
      return
    if self._armed is not None:
      member, event, until = self._armed
      if member.over:
        self._armed = None
      elif time.monotonic() > until:
        # The phase did not come, for example as another one did all.
        self._strike_now(member, event)
      return
    if not self._left or self._stopped:
      return
    event = self._left[0]
    if not live or not all(m.joined for m in live):
      return
    if max(m.step for m in live) < event.step:
      return
    self._left.pop(0)
    self._happen(event, live)
    for member in self._live:
      member.process.send({"do": "limit", "step": self._limit})

  def _happen(self, event: Event, live: Sequence[_Member]) -> None:
    self._result.happened.append(event.kind)
    match event.kind:
      case "join":
        taken = {m.replica for m in live}
        self._add(min(set(range(len(taken) + 1)) - taken))
      case "leave":
        live[-1].leaves = True
        live[-1].process.send({"do": "leave"})
      case "kill-all":
        self._ended_by = event
        self._end_at = time.monotonic()
      case "lose-store":
        self._ended_by = event
        self._pool.kill_store()
        self._end_at = time.monotonic() + event.seconds
      case "kill" | "kill-leader" | "stop":
        leads = event.kind == "kill-leader"
        fitting = [m for m in live if m.leads == leads] or list(live)
        self._arm(fitting[-1], event)

  def _arm(self, member: _Member, event: Event) -> None:
    member.doomed = event.kind != "stop"
    self._armed = member, event, time.monotonic() + _PATIENCE
    kind = "stop" if event.kind == "stop" else "kill"
    member.process.send(
      {
        "do": "fault",
        "kind": kind,
        "phase": event.phase,
        "after": event.after,
      }
    )

  def _strike_now(self, member: _Member, event: Event) -> None:
    if event.kind == "stop":
      member.process.signal(signal.SIGSTOP)
      self._struck(member)
    else:
      self._armed = member, event, math.inf
      member.process.signal(signal.SIGKILL)

  def _struck(self, member: _Member) -> None:
    """A process is stopped, and continued later."""
    # One that was stopped from here may be so again, by itself.
    seconds = 0.0 if self._armed is None else self._armed[1].seconds
    self._armed = None
    self._stopped.add(member.process, seconds)

  # The end.

  def _hang(self) -> None:
    problems = ["hang: not over in time"]
    for member in self._live:
      member.process.signal(signal.SIGCONT)
      stacks = self._folder / f"stacks-{member.number}.txt"
      stacks.write_text(member.process.where())
      problems.append(
        f"{self._who(member)} at step {member.step}, see {stacks}"
      )
    self._result.problems.append("; ".join(problems))

  def _conclude(self) -> None:
    self._stopped.continue_all()
    for member in self._members:
      if member.kept:
        self._pool.give_back(member.process)
      elif not member.over:
        self._pool.discard(member.process)
    result, data = self._result, self._plan.setting.data
    if self._left:
      result.problems.append(f"{len(self._left)} events did not happen")
    want = {} if self._want is None else self._want
    result.problems += checks.digests(result.digests, want)
    result.problems += checks.ends(self._done, data)
    for job in range(1, self._job + 1):
      path = self._folder / f"journal-{job}.jsonl"
      last = job == self._job
      result.problems += checks.slots(_records(path), data, last)
    orphans = self._pool.orphans()
    if orphans:
      result.problems.append(f"orphans: {orphans}")


def _records(path: pathlib.Path) -> list[dict[str, Any]]:
  lines = path.read_text().splitlines() if path.exists() else []
  found = []
  for line in lines:
    try:
      found.append(json.loads(line))
    except ValueError:
      continue  # Its writer was killed meanwhile.
  return list(filter(journal.Once(), found))


class References:
  """The digests of runs without events, of one replica, by setting."""

  def __init__(self, pool: Pool):
    """Sets the processes to use."""
    self._pool = pool
    self._found: dict[Setting, dict[int, str]] = {}

  def __call__(self, setting: Setting) -> dict[int, str]:
    """The digest after each step, from 0 on.

    Raises:
      RuntimeError: the run was not good.
    """
    if setting not in self._found:
      result = run(self._pool, Plan(-1, setting, True, 1, ()), None)
      if result.problems:
        raise RuntimeError(f"A run without events: {result.problems}")
      digests = {step: min(found) for step, found in result.digests.items()}
      self._found[setting] = digests
    return self._found[setting]
