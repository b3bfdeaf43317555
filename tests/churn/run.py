"""Runs plans with real processes, one after another, and checks them."""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import Any

from tests.chaos.members import Member, Members, read_journal
from tests.chaos.pool import Pool
from tests.churn import checks, models
from tests.churn.plans import MOST_REPLICAS, STEPS, Event, Plan, Setting

_DEADLINES = {
  "timeout": 30.0,
  "transfer_timeout": 1.5,
  "silence_timeout": 1.0,
}
# Seconds after which a run counts as hanging.
DEADLINE = 100.0
# Seconds for a process to come into the phase in which a fault is to hit it.
_EVENT_TIMEOUT = 3.0


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


def run(pool: Pool, plan: Plan, want: dict[int, str] | None) -> Result:
  """Runs one plan, and checks it.

  Args:
    pool: processes, and the coordinator.
    plan: what happens.
    want: the digest after each step of a run without events; None: this is it.
  """
  return _Run(pool, plan, want).run()


class _Run:
  """One run: a job, and its successors after the end of all its processes."""

  def __init__(self, pool: Pool, plan: Plan, want: dict[int, str] | None):
    self._pool, self._plan, self._want = pool, plan, want
    self._result = Result(plan)
    # Traced here, for all processes that are forked.
    setting = plan.setting
    models.model(setting.model, setting.dtype, setting.width)
    name = "undisturbed" if want is None else f"seed-{plan.seed}"
    self._members = Members(pool, name)
    self._left = list(plan.events)
    # Where the journal of each job is, which is also the name of its run.
    self._journals: list[str] = []
    # Which process a fault is to hit, the event, and until when.
    self._armed: tuple[Member, Event, float] | None = None
    self._leaving: list[Member] = []
    self._done: list[dict[str, Any]] = []
    # What ends the job, and when all that is left of it is killed.
    self._ended_by: Event | None = None
    self._end_at = 0.0

  def run(self) -> Result:
    """Runs the plan."""
    self._begin(self._plan.replicas)
    while True:
      for member, said in self._members.look():
        self._take(member, said)
      if self._members.seconds > DEADLINE:
        where = self._members.where()
        self._result.problems.append(f"hang: not over in time; {where}")
        break
      if not self._members.live:
        if self._ended_by is None:
          break
        event, self._ended_by = self._ended_by, None
        self._begin(event.replicas)
      self._advance()
      # A launcher starts it again.
      self._pool.address()
    self._result.seconds = self._members.seconds
    self._conclude()
    return self._result

  @property
  def _limit(self) -> int:
    return self._left[0].step if self._left else STEPS

  def _begin(self, replicas: int) -> None:
    """Begins a job, from the last checkpoint if there is one."""
    name = f"journal-{len(self._journals)}-{secrets.token_hex(4)}.jsonl"
    self._journals.append(name)
    for replica in range(replicas):
      self._add(replica)

  def _add(self, replica: int) -> None:
    folder = self._members.folder
    self._members.add(
      replica,
      {
        "run": self._journals[-1],
        "address": self._pool.address(),
        "replicas": MOST_REPLICAS,
        "limit": self._limit,
        "journal": str(folder / self._journals[-1]),
        "checkpoints": str(folder / "checkpoints") if self._plan.events else "",
        "deadlines": _DEADLINES,
        "inline": self._plan.inline,
        "setting": dataclasses.asdict(self._plan.setting),
      },
    )

  def _take(self, member: Member, said: dict[str, Any]) -> None:
    match said["event"]:
      case "step":
        self._result.digests.setdefault(said["step"], set()).add(said["digest"])
        self._result.compared += 1
      case "reached":
        self._strike(member)
        # One that is stopped reads this once it goes on.
        member.process.send(do="go")
      case "done" if member not in self._leaving:
        self._done.append(said)
      case "result":
        # Without its coordinator a job ends with an error, in the end.
        ended = self._ended_by
        lost = ended is not None and ended.kind == "lose-coordinator"
        if said["error"] is not None and not lost:
          self._result.problems.append(f"{member}: {said['error']}")

  # Events.

  def _advance(self) -> None:
    """Lets the next event happen once all are there for it."""
    live = self._members.live
    if self._ended_by is not None:
      if time.monotonic() > self._end_at:
        for member in live:
          self._members.kill(member)
      return
    if self._armed is not None:
      member, _, until = self._armed
      if member.over:
        self._armed = None
      elif time.monotonic() > until:
        # The phase did not come, for example as another one did all.
        self._strike(member)
      return
    if not self._left or self._members.any_stopped:
      return
    if not live or not all(m.joined for m in live):
      return
    # One that was stopped may have been removed, and be about to join again.
    if min(m.step for m in live) < self._left[0].step:
      return
    self._happen(self._left.pop(0), live)
    self._members.tell(do="limit", step=self._limit)

  def _happen(self, event: Event, live: list[Member]) -> None:
    self._result.happened.append(event.kind)
    match event.kind:
      case "join":
        taken = {m.replica for m in live}
        self._add(min(set(range(len(taken) + 1)) - taken))
      case "leave":
        self._leaving.append(live[-1])
        live[-1].process.send(do="leave")
      case "kill-all":
        self._ended_by = event
        self._end_at = time.monotonic()
      case "lose-coordinator":
        self._ended_by = event
        self._pool.lose_coordinator()
        self._end_at = time.monotonic() + event.seconds
      case _:
        self._arm(live[-1], event)

  def _arm(self, member: Member, event: Event) -> None:
    """Has a fault wait for a phase of a process, or injects it at once."""
    self._armed = member, event, time.monotonic() + _EVENT_TIMEOUT
    if event.phase:
      member.process.send(do="fault", phase=event.phase, after=event.after)
    else:
      self._strike(member)

  def _strike(self, member: Member) -> None:
    """Injects the fault that waits for a phase of this process."""
    if self._armed is None or self._armed[0] is not member:
      return  # It came to the phase after all.
    event = self._armed[1]
    if event.kind == "kill":
      if not member.doomed:
        self._members.kill(member)
      return
    self._armed = None
    match event.kind:
      case "stop":
        self._members.stop([member], event.seconds)
      case "kill-coordinator":
        self._pool.kill_coordinator()
      case "cut-power":
        self._pool.cut_power(event.lost)

  # The end.

  def _conclude(self) -> None:
    result, data = self._result, self._plan.setting.data
    result.problems += self._members.end()
    if self._left:
      result.problems.append(f"{len(self._left)} events did not happen")
    want = {} if self._want is None else self._want
    result.problems += checks.digests(result.digests, want)
    result.problems += checks.ends(self._done, data)
    for name in self._journals:
      # Its writer may have been killed while it wrote a line.
      results, _ = read_journal(self._members.folder / name)
      last = name == self._journals[-1]
      result.problems += checks.slots(results, data, last)


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
      digests = {step: min(results) for step, results in result.digests.items()}
      self._found[setting] = digests
    return self._found[setting]
