"""Kills processes of multi-process replicas, or the coordinator, in one long run."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal

from tests.chaos import cases, checks, groups
from tests.chaos.members import Stuck, read_journal

TIMEOUT = 100.0
_PAUSE = 0.005  # Seconds before a gradient, which takes no time.
REPLICAS = 2
# All of them except the end, and serving: with two replicas, the parameters are
# lost if one is killed while it serves the other.
PHASES = tuple(p for p in cases.PHASES if p not in ("serving", "ending"))
# Phases of process 0 only, which represents its replica.
_SPEAKERS = ("joining",)
# Phases that occur once after a start.
_AT_START = ("joining", "fetching_snapshot")


@dataclasses.dataclass(frozen=True)
class Case:
  """One kill.

  Attributes:
    seed: the seed of the case.
    phase: the phase of a process in which the kill comes.
    replica: its replica.
    rank: its index in the replica.
    time: at which occurrence of the phase it comes.
    victim: what is killed: that process, or the coordinator.
  """

  seed: int
  phase: str
  replica: int
  rank: int
  time: int
  victim: Literal["process", "coordinator"]

  @property
  def at_start(self) -> bool:
    """Whether the phase only occurs at a start."""
    return self.phase in _AT_START

  @property
  def who(self) -> str:
    """The process, as in outputs: the indices of its replica and its own."""
    return f"{self.replica}.{self.rank}"

  def __str__(self) -> str:
    return f"{self.phase}/{self.victim}/{self.who}"


def cells(processes: int) -> list[tuple[str, int, int, str]]:
  """The whole matrix: phase, replica, process, and what is killed.

  Example:
    >>> len(cells(2))
    68
  """
  return [
    (phase, replica, rank, victim)
    for phase in PHASES
    for replica in range(REPLICAS)
    for rank in range(1 if phase in _SPEAKERS else processes)
    for victim in ("process", "coordinator")
  ]


def case(seed: int, processes: int) -> Case:
  """The case of a seed; consecutive seeds go through all cells.

  Example:
    >>> str(case(7, processes=2))
    'computing/coordinator/0.1'
  """
  every = cells(processes)
  phase, replica, rank, victim = every[seed % len(every)]
  once = phase in (*_AT_START, "checkpointing")
  time = 1 if once else random.Random(seed).randint(1, 30)
  return Case(seed, phase, replica, rank, time, victim)  # type: ignore[arg-type]


@dataclasses.dataclass
class Result:
  """The result of a kill.

  Attributes:
    case: the case.
    seconds: how long it took until all went on.
    steps: the run's step at that time.
    problems: violations; empty in a good run.
    struck: whether the kill came.
    next_commit: seconds from the kill to the next commit of a replica that lives.
  """

  case: Case
  seconds: float = 0.0
  steps: int = 0
  problems: list[str] = dataclasses.field(default_factory=list)
  struck: bool = False
  next_commit: float = 0.0


class Strikes:
  """A run whose processes are killed repeatedly; a context manager.

  After a kill that caused a hang, the next one uses a new run.

  Attributes:
    compared: how many fingerprints `finish` has compared, and the differing
      steps.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    processes: int,
    deadline: float = groups.DEADLINE,
  ):
    """Sets the folder for outputs, and the deadline.

    Args:
      folder: an existing folder for journals and outputs.
      processes: processes of each replica.
      deadline: seconds after which the run counts as hanging.
    """
    self._folder, self._processes = folder, processes
    self._deadline = deadline
    self._runs = 0
    self._groups: groups.Groups | None = None
    self._left: list[str] = []
    self.compared = 0

  def __enter__(self) -> Strikes:
    return self

  def __exit__(self, *error: object) -> None:
    self._end()

  def strike(self, case: Case) -> Result:
    """Kills a process, and waits until the replica is back."""
    result = Result(case)
    start = time.monotonic()
    try:
      self._strike(case, result)
    except Stuck as error:
      result.problems.append(
        f"hang: {error}" if result.struck else f"not struck: {error}"
      )
      self._end()
    result.seconds = time.monotonic() - start
    return result

  def finish(self) -> list[str]:
    """Ends the run, and checks it; returns the violations."""
    return [*self._finish(), *self._left]

  def _finish(self) -> list[str]:
    run = self._groups
    if run is None:
      return []
    try:
      run.finish()
      ended = run.run(self._deadline)
    except Stuck as error:
      self._end()
      return [f"hang at the end: {error}"]
    # In the form that `checks` needs: one report per replica, from process 0.
    reports: list[tuple[int, int, dict[str, Any]]] = []
    for one in ended:
      assert one.result is not None
      if one.rank == 0:
        reports.append((one.replica, one.incarnation, one.result))
    result, _ = read_journal(run.journal)
    # Fingerprints are of shards, and compared below.
    bare = [(r, i, {**seen, "prints": {}}) for r, i, seen in reports]
    _, problems = checks.check(result, bare, TIMEOUT)
    compared, apart = groups.compare(run.members.everyone)
    self.compared += compared
    if apart:
      problems.append(f"diverged: after steps {apart}")
    self._end()
    return problems

  def _end(self) -> None:
    if self._groups is not None:
      self._left += self._groups.members.end()
      self._groups.__exit__()
      self._groups = None

  def _running(self) -> groups.Groups:
    """The run, with both replicas in it."""
    if self._groups is not None:
      return self._groups
    self._runs += 1
    run = groups.Groups(
      self._folder,
      REPLICAS,
      self._processes,
      target=10**9,
      pause=_PAUSE,
      name=f"run-{self._runs}",
      method="fork",
      join={"timeout": TIMEOUT},
    )
    self._groups = run.__enter__()
    run.restarts = False
    for replica in range(REPLICAS):
      run.start(replica)
    self._wait_for_both(run, 0.0, "the replicas do not begin")
    return run

  def _wait_for_both(self, run: groups.Groups, after: float, what: str) -> None:
    everyone = range(REPLICAS)
    both = lambda: all(
      run.live[r][0].steps_of(*everyone, after=after) for r in everyone
    )
    run.wait(both, what, self._deadline)

  def _strike(self, case: Case, result: Result) -> None:
    run = self._running()
    fault = {"phase": case.phase, "time": case.time, "victim": case.victim}
    if case.at_start:
      run.kill(case.replica)
      group = run.start(case.replica, {case.rank: fault})
    else:
      group = run.live[case.replica]
      group[case.rank].process.send(do="arm", **fault)
      heard = lambda: group[case.rank].said("armed")
      run.wait(heard, f"{group[case.rank]} does not hear", self._deadline)
      if case.phase == "checkpointing":
        run.tell("save", case.replica)
    one = group[case.rank]
    before = len(one.said("struck"))
    struck = lambda: len(one.said("struck")) > before
    run.wait(struck, f"{one} does not come to {case.phase}", self._deadline)
    result.struck = True
    if case.victim == "process":
      self._restart(run, case.replica, one, result)
    else:
      self._restart_coordinator(run, case.at_start, result)
    result.steps = run.live[case.replica][0].step

  def _restart(
    self, run: groups.Groups, victim: int, one: Any, result: Result
  ) -> None:
    """Starts a replica again of which a process has died."""
    other = REPLICAS - 1 - victim
    run.wait(lambda: one.killed, f"{one} does not end", self._deadline)
    killed = one.said("struck")[-1]["at"]
    alone = lambda: run.live[other][0].steps_of(other, after=killed)
    run.wait(alone, f"nobody goes on after {one}", self._deadline)
    result.next_commit = alone()[0]["at"] - killed
    run.kill(victim)  # The replica's other processes.
    started = time.monotonic()
    run.start(victim)
    self._wait_for_both(
      run, started, f"the replica of {one} does not come back"
    )

  def _restart_coordinator(
    self, run: groups.Groups, joins: bool, result: Result
  ) -> None:
    """Kills the coordinator, and starts it again: nobody else may be lost."""
    removed = _removals(run)
    killed = time.monotonic()
    run.kill_coordinator()
    self._wait_for_both(run, killed, "they do not go on with the coordinator")
    first = min(
      run.live[r][0].steps_of(*range(REPLICAS), after=killed)[0]["at"]
      for r in range(REPLICAS)
    )
    result.next_commit = first - killed
    # One that was about to join may have to do it once more.
    if not joins and _removals(run) != removed:
      result.problems.append(
        "a replica was removed with the coordinator's death"
      )


def _removals(run: groups.Groups) -> int:
  result, _ = read_journal(run.journal)
  return sum(record["kind"] == "lost" for record in result)


def run(
  folder: pathlib.Path, seeds: Sequence[int] | None, processes: int
) -> bool:
  """Kills processes of two replicas or the coordinator, and prints the results.

  Args:
    folder: an existing folder for journals and outputs.
    seeds: seeds of the kills; None for the whole matrix.
    processes: processes of each replica.

  Returns:
    Whether anything was wrong.
  """
  seeds = seeds or range(len(cells(processes)))
  results: list[Result] = []
  with Strikes(folder, processes) as strikes:
    for seed in seeds:
      result = strikes.strike(case(seed, processes))
      results.append(result)
      print(
        f"seed {seed}, {result.case}: {result.seconds:.0f} s,"
        f" {'; '.join(result.problems) or 'ok'}",
        flush=True,
      )
    problems = strikes.finish()
  good = sum(not r.problems for r in results)
  print(
    f"{good} of {len(results)} kills went well;"
    f" {strikes.compared:,} fingerprints compared"
  )
  for problem in problems:
    print(f"the run: {problem}")
  if stalls := [r.next_commit for r in results if r.next_commit]:
    print(
      "next commit of who lives:"
      f" median {statistics.median(stalls):.3f} s, longest {max(stalls):.3f} s"
    )
  return bool(problems) or good < len(results)
