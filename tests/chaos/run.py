"""Runs cases of the fault matrix with real processes, one after another."""

from __future__ import annotations

import dataclasses
import json
import secrets
import signal
import time

import logged_child

from optax_dist.coordinator import journal
from optax_dist.coordinator.launch import child
from tests.chaos import checks as chaos_checks
from tests.chaos import samples, stopped
from tests.chaos.cases import OUTAGE, REPLICAS, Case
from tests.chaos.pool import Pool

OUTCOMES = ("ok", "hang", "diverged", "ended early", "not struck", "wrong")
# No replica may wait for longer, in seconds.
TIMEOUT = 40.0
_DEADLINES = {
  "timeout": TIMEOUT,
  "attempt_timeout": 1.5,
  "leader_timeout": 1.0,
}
# Seconds after which a run counts as hanging, without those of an outage.
DEADLINE = 90.0
# How often a replica is started in a run; it may take several until the right
# one serves the joining replica.
_LIVES = 20
# Steps that must follow a fault.
_STEPS_AFTER = 6


@dataclasses.dataclass
class Result:
  """The result of a run.

  Attributes:
    case: the case.
    seconds: how long it took.
    steps: committed steps.
    problems: violations; empty in a good run.
    struck: whether the fault was injected.
  """

  case: Case
  seconds: float = 0.0
  steps: int = 0
  problems: list[str] = dataclasses.field(default_factory=list)
  struck: bool = False

  @property
  def outcome(self) -> str:
    """One of `OUTCOMES`."""
    # How a problem begins: a replica's own words may be of an exchange.
    for word in OUTCOMES[1:-1]:
      if any(problem.startswith(word) for problem in self.problems):
        return word
    return "wrong" if self.problems else "ok"


@dataclasses.dataclass
class _Member:
  """A process in a run."""

  process: child.Child
  replica: int
  incarnation: int
  events: list[child.Event] = dataclasses.field(default_factory=list)
  killed: bool = False

  @property
  def step(self) -> int:
    steps = [e["step"] for e in self.events if e["event"] == "step"]
    return steps[-1] if steps else 0

  @property
  def is_leader(self) -> bool:
    leads = [e["leader"] for e in self.events if e["event"] == "step"]
    return bool(leads and leads[-1])

  @property
  def result(self) -> child.Event | None:
    for event in self.events:
      if event["event"] == "result":
        return event
    return None

  @property
  def has_joined(self) -> bool:
    return any(e["event"] == "joined" for e in self.events)

  @property
  def over(self) -> bool:
    return self.killed or self.result is not None


def run(pool: Pool, case: Case) -> Result:
  """Runs one case, and checks the invariants."""
  return _Run(pool, case).run()


class _Run:
  """One run."""

  def __init__(self, pool: Pool, case: Case):
    self._pool, self._case = pool, case
    self._result = Result(case)
    self._members: list[_Member] = []
    self._journal = pool.folder / f"run-{case.seed}.jsonl"
    self._journal.unlink(missing_ok=True)
    self._run_name = f"seed {case.seed} {secrets.token_hex(4)}"
    self._start = time.monotonic()
    self._stopped = stopped.Stopped()
    self._primed = not case.joins
    self._struck_at: int | None = None
    self._finishing = False
    self._address = pool.address
    self._outages = case.times if case.phase == OUTAGE else 0

  def run(self) -> Result:
    """Runs the case."""
    for replica in range(REPLICAS):
      self._add(replica, 0)
    while not all(m.over for m in self._members):
      self._look()
      self._advance()
      deadline = DEADLINE + self._case.times * self._case.seconds
      if time.monotonic() - self._start > deadline:
        self._hang()
        break
      if self._pool.store_died():
        self._result.problems.append("the store has died")
        break
    self._result.seconds = time.monotonic() - self._start
    self._conclude()
    return self._result

  def _add(self, replica: int, incarnation: int) -> None:
    case, folder = self._case, self._pool.folder
    member = _Member(self._pool.take(), replica, incarnation)
    self._members.append(member)
    member.process.name = f"replica {replica}"
    member.process.send(
      {
        "do": "run",
        "run": self._run_name,
        "address": self._address,
        "secret": self._pool.secret,
        "replica": replica,
        "incarnation": incarnation,
        "replicas": REPLICAS,
        "lower_on_loss": case.lowers,
        "journal": str(self._journal),
        # The deadlines that outages are to exceed are the usual ones.
        "deadlines": {} if case.phase == OUTAGE else _DEADLINES,
        "checkpoints": str(folder / f"checkpoints-{case.seed}")
        if case.phase == "checkpointing"
        else "",
        **dataclasses.asdict(case),
        "phase": case.at or case.phase,
        "joins": case.joins,
        "remote": case.remote,
      }
    )
    if self._finishing:
      member.process.send({"do": "finish"})

  def _look(self) -> None:
    """Waits briefly for events, and handles them."""
    live = [m for m in self._members if not m.over]
    for member, events, ended in logged_child.read_members(live, 0.02):
      for event in events:
        member.events.append(event)
        self._take(member, event)
      if ended and not member.over:
        self._died(member)
    self._stopped.continue_due()

  def _take(self, member: _Member, event: child.Event) -> None:
    if event["event"] == "reached":
      self._reached(member)
    elif event["event"] == "stop":
      self._continue_later(member)
    elif event["event"] == "result":
      error = event["error"]
      if error not in (None, "finished"):
        self._result.problems.append(f"{member.process.name}: {error}")
      elif not self._finishing:
        self._result.problems.append(
          f"ended early: {member.process.name} at step {member.step}"
        )

  def _continue_later(self, member: _Member) -> None:
    self._stopped.add(member.process, self._case.seconds)

  def _reached(self, member: _Member) -> None:
    """Injects the fault, once, when a process enters the phase."""
    case = self._case
    everyone = [m for m in self._members if not m.over]
    if case.phase == OUTAGE:
      # One that is stopped reads this once it goes on.
      self._begin_outage(everyone)
      member.process.send({"do": "go"})
      return
    absent = [
      m
      for m in everyone
      if not m.step and not m.incarnation and m is not member
    ]
    if self._result.struck or not self._primed or absent:
      member.process.send({"do": "go"})
      return
    victim = member
    if case.remote:
      want = case.who == "leader"
      others = [m for m in self._members if not m.over and m.is_leader == want]
      victim = next((m for m in others if m is not member), member)
      # A replica that fetches a snapshot has no state: losing the last one with
      # a state would end the run.
      lacks = member if case.phase == "fetching_snapshot" else None
      held = [m for m in everyone if m not in (lacks, victim) and m.step]
      last = case.fault in ("kill", "disconnect") and not held
      if last or (victim is member and member.is_leader != want):
        member.process.send({"do": "go"})
        return
    self._result.struck = True
    self._struck_at = max(m.step for m in self._members)
    for other in everyone:
      other.process.send({"do": "disarm"})
    if victim is member:
      member.process.send({"do": "strike"})
      return
    if case.fault == "kill":
      victim.process.signal(signal.SIGKILL)
    elif case.fault in ("stop", "delay"):
      victim.process.signal(signal.SIGSTOP)
      self._continue_later(victim)
    else:
      victim.process.send({"do": "inflict"})
    member.process.send({"do": "go"})

  def _died(self, member: _Member) -> None:
    member.killed = True
    member.process.popen.wait(5.0)
    if member.process.popen.returncode != -signal.SIGKILL:
      self._result.problems.append(
        f"{member.process.name} {member.process.ending()}:"
        f" {member.process.tail(4)}"
      )
    self._pool.discard(member.process)
    self._replace(member)

  def _replace(self, member: _Member) -> None:
    again = [m for m in self._members if m.replica == member.replica]
    if len(again) < _LIVES:
      self._add(member.replica, len(again))

  def _advance(self) -> None:
    """Prepares what the case needs, and ends the run afterwards."""
    live = [m for m in self._members if not m.over]
    if not live:
      return
    furthest = max(m.step for m in live)
    all_there = all(m.step for m in live)
    if not self._primed and all_there and furthest >= self._case.after:
      others = [m for m in live if not m.is_leader]
      if others and any(m.is_leader for m in live):
        self._primed = True
        others[-1].process.signal(signal.SIGKILL)
    if self._primed and self._case.joins and self._struck_at is None:
      # The leader may have served the joining replica, or none did: try
      # another.
      steps = [e for e in self._members[-1].events if e["event"] == "step"]
      if self._members[-1].incarnation and len(steps) > 5:
        self._primed = False
    if self._outages and not self._case.at:
      self._begin_outage(live)
    if self._finishing or self._struck_at is None or self._outages:
      return
    aim = self._struck_at + _STEPS_AFTER
    if all(m.step >= aim for m in live) and not self._stopped:
      self._finishing = True
      for member in live:
        member.process.send({"do": "finish"})

  def _begin_outage(self, live: list[_Member]) -> None:
    """Stops all, or one, once they have got so far since the last time."""
    case = self._case
    if not self._outages or self._stopped:
      return
    victims = live
    if case.fault == "stop-one":
      leads = case.who == "leader"
      victims = [m for m in live if m.is_leader == leads][-1:] or live[:1]
    aim = case.after + (self._struck_at or 0)
    ready = all(m.has_joined for m in victims)
    if not ready or (aim and any(m.step < aim for m in live)):
      return
    for member in victims:
      member.process.signal(signal.SIGSTOP)
    for member in victims:
      self._continue_later(member)
    self._result.struck = True
    self._struck_at = max(m.step for m in live)
    self._outages -= 1

  def _hang(self) -> None:
    problems = ["hang: not over in time"]
    for member in self._members:
      if not member.over:
        member.process.signal(signal.SIGCONT)
        stacks = self._pool.folder / (
          f"stacks-{self._case.seed}-{member.replica}.txt"
        )
        stacks.write_text(member.process.where())
        problems.append(
          f"replica {member.replica} at step {member.step}, see {stacks}"
        )
    if not self._result.struck:
      problems[0] = "not struck: the phase was not reached"
    self._result.problems.append("; ".join(problems))

  def _conclude(self) -> None:
    self._stopped.continue_all()
    for member in self._members:
      if member.result is not None:
        self._pool.give_back(member.process)
      elif not member.killed:
        self._pool.discard(member.process)
    result = self._result
    if not result.struck and not result.problems:
      result.problems.append("not struck: the phase was not reached")
    records = []
    if self._journal.exists():
      for line in self._journal.read_text().splitlines():
        try:
          records.append(json.loads(line))
        except ValueError:
          result.problems.append("the journal has a bad line")
    records = list(filter(journal.Once(), records))
    reports = [
      (m.replica, m.incarnation, m.result)
      for m in self._members
      if m.result is not None and m.result["error"] is None
    ]
    data = None
    if self._case.data:
      data = samples.batches(self._case.data, self._case.aggregate)
    result.steps, problems = chaos_checks.check(records, reports, TIMEOUT, data)
    result.problems += problems
    orphans = self._pool.orphans()
    if orphans:
      result.problems.append(f"orphans: {orphans}")


__all__ = ["Pool", "Result", "run"]
