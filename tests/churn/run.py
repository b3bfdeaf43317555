"""Runs plans with real processes, one after another, and checks them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import secrets
import time

from optax_dist.coordinator import journal
from optax_dist.coordinator.options import Options
from tests.churn import checks, models
from tests.churn.plans import MOST_REPLICAS, Event, Plan, Setting
from tests.runs.processes import Member, Processes, Stuck, prints
from tests.runs.replica import Job

_DEADLINES = {
  "timeout": 30.0,
  "transfer_timeout": 1.5,
  "silence_timeout": 1.0,
}
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
  """

  plan: Plan
  seconds: float = 0.0
  problems: list[str] = dataclasses.field(default_factory=list)
  happened: list[str] = dataclasses.field(default_factory=list)
  digests: dict[int, list[str]] = dataclasses.field(default_factory=dict)

  @property
  def compared(self) -> int:
    """How many digests of a step were said, by all replicas."""
    return sum(map(len, self.digests.values()))


def run(
  folder: pathlib.Path, plan: Plan, want: dict[int, str] | None
) -> Result:
  """Runs one plan, and checks it.

  Args:
    folder: an existing folder, for a folder of the run in it.
    plan: what happens.
    want: the digest after each step of a run without events; None: this is it.
  """
  # Traced here, for all processes that are forked.
  setting, start = plan.setting, time.monotonic()
  model = functools.partial(models.model, setting)
  model()
  result = Result(plan)
  name = "undisturbed" if want is None else f"seed-{plan.seed}"
  job = Job(
    model,
    {
      "total_num_replicas": MOST_REPLICAS,
      "lower_on_loss": True,
      "inline_bytes": Options.inline_bytes if plan.inline else 0,
      "wire": setting.wire,
      "data": setting.data,
      **_DEADLINES,
    },
    # So that faults come in the middle of a step.
    pause=0.004,
    checkpoints=str(folder / name / "checkpoints") if plan.events else "",
  )
  with Processes(folder / name, job, method="fork") as processes:
    processes.may_end = True
    churn = _Churn(processes, plan, result)
    with contextlib.suppress(Stuck):  # It is among the problems.
      churn.play()
    processes.end()
    churn.check(want or {})
  result.seconds = time.monotonic() - start
  return result


class _Churn:
  """What happens in a run: a job, and its successors after the end of all."""

  def __init__(self, processes: Processes, plan: Plan, result: Result):
    self._run, self._plan, self._result = processes, plan, result
    # Where the journal of each job is, which is also the name of its run.
    self._journals: list[str] = []
    # From which member on they are of the last job.
    self._first = 0

  def play(self) -> None:
    """Runs the plan."""
    run, events = self._run, self._plan.events
    limits = [*(e.step for e in events), math.inf]
    self._limit_steps(limits[0])
    self._begin(self._plan.replicas)
    for event, limit in zip(events, limits[1:], strict=True):
      run.wait(
        lambda step=event.step: (
          run.live
          and not run.any_stopped
          # One that was stopped may have been removed, and be about to join.
          and all(m.step >= step for m in run.live)
        ),
        f"not all come to step {event.step}",
      )
      self._happen(event, limit)
      self._result.happened.append(event.kind)
    run.wait(lambda: not run.live, "not all come to the end")

  def _limit_steps(self, limit: float) -> None:
    """Has nobody compute that step yet."""
    self._run.job = dataclasses.replace(self._run.job, limit=limit)
    self._run.tell(do="limit", step=limit)

  def _begin(self, replicas: int) -> None:
    """Begins a job, from the last checkpoint if there is one."""
    run, name = self._run, f"{len(self._journals)}-{secrets.token_hex(4)}"
    self._journals.append(f"journal-{name}.jsonl")
    self._first = len(run.everyone)
    own = {"run": name, "journal": str(run.folder / self._journals[-1])}
    run.job = dataclasses.replace(run.job, join=run.job.join | own)
    for replica in range(replicas):
      run.start(replica)

  def _happen(self, event: Event, limit: float) -> None:
    """Has an event happen, and lets all compute up to the next one."""
    run, live = self._run, self._run.live
    match event.kind:
      case "kill-all" | "lose-coordinator":
        run.errors_expected = True
        if event.kind == "lose-coordinator":
          run.coordinator.end()
          # Without its coordinator a job ends with an error, in the end.
          run.sleep(event.seconds)
        for member in run.live:
          run.kill(member)
        run.wait(lambda: not run.live, "not all are dead")
        run.errors_expected = False
        self._limit_steps(limit)
        self._begin(event.replicas)
      case "join":
        self._limit_steps(limit)
        taken = {m.replica for m in live}
        run.start(min(set(range(len(taken) + 1)) - taken))
      case "leave":
        live[-1].process.send(do="leave")
        self._limit_steps(limit)
      case _:
        self._strike(live[-1], event, limit)

  def _strike(self, member: Member, event: Event, limit: float) -> None:
    """Injects a fault, in the phase of a process if it comes to it in time."""
    run, end = self._run, time.monotonic() + _EVENT_TIMEOUT
    if event.phase:
      run.arm(event.phase, event.after, (member.replica, member.rank))
    self._limit_steps(limit)
    # The phase may not come, for example as another one did all.
    waits = lambda: event.phase and time.monotonic() < end and not member.over
    run.wait(lambda: run.entered or not waits(), "no phase")
    entered = run.entered
    run.arm("")
    match event.kind:
      case "kill":
        run.kill(member)
        run.wait(lambda: member.over, f"{member} is not dead")
      case "stop":
        run.stop([member], event.seconds)
      case "kill-coordinator":
        run.coordinator.kill()
      case "cut-power":
        run.coordinator.cut_power(event.lost)
    if entered:
      # One that is stopped reads this once it goes on.
      member.process.send(do="go")

  def check(self, want: dict[int, str]) -> None:
    """Notes in the result what is wrong.

    Args:
      want: the digest after each step of a run without events; empty: this is it.
    """
    result, run, data = self._result, self._run, self._plan.setting.data
    everyone = prints(run.everyone)
    result.digests = {step: some for (_, step), some in everyone.items()}
    result.problems += run.problems
    result.problems += checks.digests(result.digests, want)
    ends = [m.result for m in run.everyone[self._first :] if m.result]
    result.problems += checks.ends([e for e in ends if "next" in e], data)
    for name in self._journals:
      # Its writer may have been killed while it wrote a line.
      path, last = run.folder / name, name == self._journals[-1]
      records = journal.read(path).records if path.exists() else []
      result.problems += checks.slots(records, data, last)


class References:
  """The digests of runs without events, of one replica, by setting."""

  def __init__(self, folder: pathlib.Path):
    """Sets the folder for outputs."""
    self._folder = folder
    self._results: dict[Setting, dict[int, str]] = {}

  def __call__(self, setting: Setting) -> dict[int, str]:
    """The digest after each step, from 0 on.

    Raises:
      RuntimeError: the run was not good.
    """
    if setting not in self._results:
      result = run(self._folder, Plan(-1, setting, True, 1, ()), None)
      if result.problems:
        raise RuntimeError(f"A run without events: {result.problems}")
      digests = {step: min(some) for step, some in result.digests.items()}
      self._results[setting] = digests
    return self._results[setting]
