"""Runs cases of the fault matrix with real processes."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time

import hosts

from optax_dist.coordinator.options import Options
from tests.chaos.cases import OUTAGE, Case
from tests.runs import between_hosts, checks, models, samples
from tests.runs.processes import DEADLINE, Member, Processes, Stuck, prints
from tests.runs.replica import Job

OUTCOMES = ("ok", "ended early", "diverged", "not struck", "hang", "wrong")
# No replica may wait for longer, in seconds.
TIMEOUT = 40.0
# With processes of replicas, which begin and end together, a busy machine is no
# fault; that they are killed is noticed at once.
_LONG_TIMEOUT = 100.0
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
    compared: how many fingerprints at least two processes have.
  """

  case: Case
  seconds: float = 0.0
  steps: int = 0
  problems: list[str] = dataclasses.field(default_factory=list)
  struck: bool = False
  compared: int = 0

  @property
  def outcome(self) -> str:
    """One of `OUTCOMES`."""
    # How a problem begins: a replica's own words may be of an exchange.
    for word in OUTCOMES[1:-1]:
      if any(problem.startswith(word) for problem in self.problems):
        return word
    return "wrong" if self.problems else "ok"


def run(folder: pathlib.Path, case: Case) -> Result:
  """Runs one case, and checks the invariants.

  Args:
    folder: an existing folder, for a folder of the run in it.
    case: the case.
  """
  start = time.monotonic()
  if case.fault == "cut-host":
    result = _cut(folder, case)
  else:
    result = _strike(folder / f"run-{case.seed}", case)
  if not result.struck:
    result.problems.append("not struck: the phase was not reached")
  result.seconds = time.monotonic() - start
  return result


def _cut(folder: pathlib.Path, case: Case) -> Result:
  """Cuts one host off, again and again, for longer than deadlines."""
  result = Result(case)
  if reason := hosts.not_permitted():
    result.problems.append(f"not struck: hosts can't be made: {reason}")
    return result
  folder = folder / f"hosts-{case.seed}"
  folder.mkdir(exist_ok=True)
  between = between_hosts.Run(
    folder,
    case.replicas,
    method="fork",
    replicas_to_aggregate=case.aggregate,
    max_staleness=case.max_staleness,
    # The deadlines that a cut is to exceed are the usual ones.
    transfer_timeout=None,
    silence_timeout=None,
  )
  with between:
    try:
      result.struck = True
      between.cut_repeatedly(case.times, case.seconds, case.healed)
      result.steps, result.problems = between.finish()
    except Stuck:
      result.problems = between.run.problems
  return result


def _job(case: Case, folder: pathlib.Path) -> Job:
  several = case.processes > 1
  deadlines = {
    "timeout": _LONG_TIMEOUT if several else TIMEOUT,
    "transfer_timeout": 10.0 if several else 1.5,
    "silence_timeout": 10.0 if several else 1.0,
  }
  return Job(
    models.sharded if several else models.flat,
    {
      "total_num_replicas": case.replicas,
      "replicas_to_aggregate": case.aggregate,
      "max_staleness": case.max_staleness,
      "lower_on_loss": case.lowers,
      "bind": "127.0.0.1" if case.loopback else None,
      "inline_bytes": Options.inline_bytes if case.inline else 0,
      "fingerprint_every": 1,
      "data": samples.batches(case.data, case.aggregate) if case.data else None,
      # The deadlines that outages are to exceed are the usual ones.
      **({} if case.phase == OUTAGE else deadlines),
    },
    saves=str(folder / "saves") if case.phase == "checkpointing" else "",
    processes=case.processes,
  )


def _strike(folder: pathlib.Path, case: Case) -> Result:
  result, job = Result(case), _job(case, folder)
  with Processes(folder, job, method="fork", restarts="replica") as run:
    with contextlib.suppress(Stuck):  # It is among the problems.
      _Strike(run, case, result).play()
    run.end()
    result.problems += run.problems
    contents, reports, data = run.records(), run.reports(), job.join["data"]
    if contents.problems:
      result.problems.append("the journal has a bad line")
    result.steps, problems = checks.check(
      contents.records, reports, job.join.get("timeout", TIMEOUT), data
    )
    if case.keeps_all:
      problems += checks.nobody_removed(reports)
    shared = [p for p in prints(run.everyone).values() if len(p) > 1]
    result.compared = len(shared)
    if any(len(set(digests)) > 1 for digests in shared):
      problems.append("diverged: by what processes have said")
    result.problems += problems
  return result


class _Strike:
  """What happens in a run."""

  def __init__(self, run: Processes, case: Case, result: Result):
    self._run, self._case, self._result = run, case, result
    self._seconds = DEADLINE + case.times * case.seconds

  def play(self) -> None:
    """Starts all, has the fault strike, and ends the run some steps later."""
    run, case = self._run, self._case
    for replica in range(case.replicas):
      run.start(replica)
    aim = case.after
    if case.phase == OUTAGE:
      for _ in range(case.times):
        self._wait_for(aim)
        self._begin_outage()
        aim = self._furthest() + case.after
    else:
      self._wait_for(aim)
      self._strike(self._enter(case.phase))
    aim = self._furthest() + _STEPS_AFTER
    if not case.ends:
      self._wait_for(aim)
    run.finish()

  def _furthest(self) -> int:
    return max(m.step for m in self._run.everyone)

  def _wait_for(self, step: int) -> None:
    """Waits until all have come to a step, and none is stopped."""
    run = self._run
    self._run.wait(
      lambda: (
        run.live
        and all(m.step >= step for m in run.live)
        and not run.any_stopped
      ),
      f"not all come to step {step}",
      self._seconds,
    )

  def _enter(self, phase: str) -> Member:
    """Waits until a process enters a phase; it waits there."""
    run, case = self._run, self._case
    replica, _ = case.process or (case.replicas - 1, 0)

    def is_back(before):
      """Whether the replica has joined, and nobody has served it."""
      now = run.of(replica)[0]
      return case.joins and now is not before and len(now.steps) > 5

    for _ in range(_LIVES if case.joins else 1):
      run.arm(phase, case.skip, case.process)
      before = run.of(replica)[0]
      if case.joins:
        run.kill(before)
      if case.ends:
        run.tell_to_finish()
      run.wait(
        lambda before=before: run.entered or is_back(before),
        f"no process enters {phase}",
        self._seconds,
      )
      if run.entered:
        self._result.struck = True
        return run.entered
    run.problems.append(f"not struck: nobody enters {phase}")
    raise Stuck

  def _strike(self, member: Member) -> None:
    """Injects the fault while a process is in the phase."""
    run, case = self._run, self._case
    of_coordinator = case.who == "coordinator"
    fault = {
      "fault": case.fault,
      "seconds": case.seconds,
      "seed": case.seed,
      "coordinator": of_coordinator,
    }
    inflicted: dict = {}
    match case.fault, of_coordinator:
      case "kill", True:
        run.coordinator.kill(case.times)
      case "kill", False:
        run.kill(member)
      case "stop", False:
        run.stop([member], case.seconds)
      case "stop" | "delay", True:
        run.coordinator.stop(case.seconds, case.replaced)
      case "disconnect", True:
        # All lose it, and it loses all.
        run.tell(do="inflict", **fault)
      case _:
        inflicted = fault
    # One that is stopped reads this once it goes on.
    member.process.send(do="go", **inflicted)

  def _begin_outage(self) -> None:
    """Stops all, or one."""
    run, case = self._run, self._case
    if case.at:
      self._enter(case.at).process.send(do="go")
    of_coordinator = case.who == "coordinator"
    victims = run.live
    if case.fault == "stop-one":
      victims = [] if of_coordinator else run.live[-1:]
    run.stop(victims, case.seconds)
    if of_coordinator:
      run.coordinator.stop(case.seconds)
    self._result.struck = True
