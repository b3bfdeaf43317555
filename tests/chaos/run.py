"""Runs cases of the fault matrix with real processes, one after another."""

from __future__ import annotations

import dataclasses
import math
import secrets
import signal

from optax_dist.coordinator.options import Options
from tests.chaos import checks as chaos_checks
from tests.chaos import samples
from tests.chaos.cases import OUTAGE, REPLICAS, Case
from tests.chaos.members import Member, Members, read_journal
from tests.chaos.pool import Pool

OUTCOMES = ("ok", "ended early", "diverged", "not struck", "hang", "wrong")
# No replica may wait for longer, in seconds.
TIMEOUT = 40.0
_DEADLINES = {
  "timeout": TIMEOUT,
  "transfer_timeout": 1.5,
  "silence_timeout": 1.0,
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


def run(pool: Pool, case: Case) -> Result:
  """Runs one case, and checks the invariants."""
  return _Run(pool, case).run()


class _Run:
  """One run."""

  def __init__(self, pool: Pool, case: Case):
    self._pool, self._case = pool, case
    self._result = Result(case)
    self._limit = DEADLINE + case.times * case.seconds
    self._members = Members(pool, f"run-{case.seed}")
    folder = self._members.folder
    self._journal = folder / "journal.jsonl"
    outage, data = case.phase == OUTAGE, None
    if case.data:
      data = samples.batches(case.data, case.aggregate)
    self._data = data
    self._job = {
      "join": {
        "run": f"seed {case.seed} {secrets.token_hex(4)}",
        "coordinator_address": pool.address(),
        "total_num_replicas": REPLICAS,
        "replicas_to_aggregate": case.aggregate,
        "max_staleness": case.max_staleness,
        "lower_on_loss": case.lowers,
        "bind": "127.0.0.1" if case.loopback else None,
        "inline_bytes": Options.inline_bytes if case.inline else 0,
        "journal": str(self._journal),
        "fingerprint_every": 1,
        "data": data,
        # The deadlines that outages are to exceed are the usual ones.
        **({} if outage else _DEADLINES),
      },
      "checkpoints": str(folder / "checkpoints")
      if case.phase == "checkpointing"
      else "",
      "fault": {
        **dataclasses.asdict(case),
        "phase": case.at or case.phase,
        "joins": case.joins,
      },
    }
    self._primed = not case.joins
    self._struck_at: int | None = None
    self._finishing = False
    self._outages = case.times if outage else 0
    # How often the coordinator is killed once more, and when it goes on that is
    # stopped, or is replaced.
    self._kills, self._stopped_until = 0, math.inf

  def run(self) -> Result:
    """Runs the case."""
    for replica in range(REPLICAS):
      self._members.add(replica, self._job)
    while self._members.live:
      for member, event in self._members.look():
        match event["event"]:
          case "reached":
            # One that is stopped reads this once it goes on.
            member.process.send(do=self._reached(member))
          case "died":
            self._replace(member)
          case "result":
            self._ended(member, event["error"])
      self._advance()
      self._look_after_coordinator()
      if self._members.seconds > self._limit:
        where = self._members.where()
        self._result.problems.append(f"hang: not over in time; {where}")
        break
    self._result.seconds = self._members.seconds
    self._conclude()
    return self._result

  def _ended(self, member: Member, error: str | None) -> None:
    if error not in (None, "finished"):
      self._result.problems.append(f"{member}: {error}")
    elif not self._finishing:
      self._result.problems.append(
        f"ended early: {member} at step {member.step}"
      )

  def _reached(self, member: Member) -> str:
    """Injects the fault, once, when a process enters the phase.

    Returns:
      What the process is to do: "go" on, or "strike".
    """
    case, live = self._case, self._members.live
    if case.phase == OUTAGE:
      self._begin_outage(live)
      return "go"
    absent = [
      m for m in live if not m.step and not m.incarnation and m is not member
    ]
    if self._result.struck or not self._primed or absent:
      return "go"
    self._result.struck = True
    self._struck_at = max(m.step for m in self._members.everyone)
    self._members.tell(do="disarm")
    if case.fault == "corrupt" or (
      case.fault in ("delay", "disconnect") and case.who == "replica"
    ):
      return "strike"
    if case.who == "coordinator":
      self._strike_coordinator()
    elif case.fault == "kill":
      self._members.kill(member)
    else:
      self._members.stop([member], case.seconds)
    return "go"

  def _strike_coordinator(self) -> None:
    match self._case.fault:
      case "kill":
        self._pool.kill_coordinator()
        self._kills = self._case.times - 1
      case "disconnect":
        # All lose it, and it loses all.
        self._members.tell(do="inflict")
      case _:
        self._stop_coordinator()

  def _stop_coordinator(self) -> None:
    self._pool.signal_coordinator(signal.SIGSTOP)
    self._stopped_until = self._members.seconds + self._case.seconds

  def _look_after_coordinator(self) -> None:
    """Starts it again, as a launcher does, or lets it go on."""
    if self._members.seconds > self._stopped_until:
      self._stopped_until = math.inf
      if self._case.replaced:
        self._pool.kill_coordinator()
      else:
        self._pool.signal_coordinator(signal.SIGCONT)
    self._pool.address()
    if self._kills:
      self._kills -= 1
      self._pool.kill_coordinator()

  def _replace(self, member: Member) -> None:
    if member.incarnation + 1 < _LIVES:
      again = self._members.add(member.replica, self._job)
      if self._finishing:
        again.process.send(do="finish")

  def _advance(self) -> None:
    """Prepares what the case needs, and ends the run afterwards."""
    live = self._members.live
    if not live:
      return
    furthest = max(m.step for m in live)
    all_there = all(m.step for m in live)
    if not self._primed and all_there and furthest >= self._case.after:
      self._primed = True
      self._members.kill(live[-1])
    if self._primed and self._case.joins and self._struck_at is None:
      # None may have served the joining replica: try another.
      last = self._members.everyone[-1]
      if last.incarnation and len(last.steps) > 5:
        self._primed = False
    if self._outages and not self._case.at:
      self._begin_outage(live)
    ready = self._case.ends and furthest >= self._case.after and all_there
    if ready and not self._finishing:
      self._finish()
    if self._finishing or self._struck_at is None or self._outages:
      return
    aim = self._struck_at + _STEPS_AFTER
    if all(m.step >= aim for m in live) and not self._is_any_stopped:
      self._finish()

  def _finish(self) -> None:
    self._finishing = True
    self._members.tell(do="finish")

  @property
  def _is_any_stopped(self) -> bool:
    return self._members.any_stopped or self._stopped_until < math.inf

  def _begin_outage(self, live: list[Member]) -> None:
    """Stops all, or one, once they have got so far since the last time."""
    case = self._case
    if not self._outages or self._is_any_stopped:
      return
    of_coordinator = case.who == "coordinator"
    victims = live
    if case.fault == "stop-one":
      victims = [] if of_coordinator else live[-1:]
    aim = case.after + (self._struck_at or 0)
    ready = all(m.joined for m in victims or live)
    if not ready or (aim and any(m.step < aim for m in live)):
      return
    self._members.stop(victims, case.seconds)
    if of_coordinator:
      self._stop_coordinator()
    self._result.struck = True
    self._struck_at = max(m.step for m in live)
    self._outages -= 1

  def _conclude(self) -> None:
    result = self._result
    if not result.struck:
      result.problems.append("not struck: the phase was not reached")
    result.problems += self._members.end()
    results, wrong = read_journal(self._journal)
    if wrong:
      result.problems.append("the journal has a bad line")
    reports = [
      (m.replica, m.incarnation, m.result)
      for m in self._members.everyone
      if m.result is not None and m.result["error"] is None
    ]
    result.steps, problems = chaos_checks.check(
      results, reports, TIMEOUT, self._data
    )
    if self._case.keeps_all:
      problems += chaos_checks.nobody_removed(reports)
    result.problems += problems
