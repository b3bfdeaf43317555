"""Kills processes of multi-process replicas, one after another, in one run."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from tests.chaos import cases, checks, groups
from tests.chaos.members import Stuck, read_journal

TIMEOUT = 100.0
_PAUSE = 0.005  # Seconds before a gradient, which takes no time.
REPLICAS = 2
# All of them except serving: with two replicas, the parameters are lost if one
# is killed while it serves the other.
PHASES = tuple(phase for phase in cases.PHASES if phase != "serving")
# Phases of process 0 only, which represents its replica.
_SPEAKERS = ("committing", "joining")
# Phases that occur once after a start.
_AT_START = ("joining", "fetching_snapshot")


@dataclasses.dataclass(frozen=True)
class Case:
  """One kill.

  Attributes:
    seed: the seed of the case.
    phase: the phase in which the process is killed.
    replica: its replica.
    rank: its index in the replica.
    time: at which occurrence of the phase it is killed.
  """

  seed: int
  phase: str
  replica: int
  rank: int
  time: int

  @property
  def at_start(self) -> bool:
    """Whether the phase only occurs at a start."""
    return self.phase in _AT_START

  @property
  def by_leader(self) -> bool:
    """Whether only the leader enters the phase."""
    return self.phase == "committing"

  @property
  def fault(self) -> str:
    """The kind of fault."""
    return "kill"

  @property
  def who(self) -> str:
    """The process, as in outputs: the indices of its replica and its own."""
    return f"{self.replica}.{self.rank}"

  def __str__(self) -> str:
    return f"{self.phase}/{self.fault}/{self.who}"


def cells(processes: int) -> list[tuple[str, int, int]]:
  """The whole matrix: phase, replica and process.

  Example:
    >>> len(cells(2))
    36
  """
  return [
    (phase, replica, rank)
    for phase in PHASES
    for replica in range(REPLICAS)
    for rank in range(1 if phase in _SPEAKERS else processes)
  ]


def case(seed: int, processes: int) -> Case:
  """The case of a seed; consecutive seeds go through all cells.

  Example:
    >>> str(case(3, processes=2))
    'computing/kill/0.1'
  """
  every = cells(processes)
  phase, replica, rank = every[seed % len(every)]
  once = phase in (*_AT_START, "checkpointing")
  time = 1 if once else random.Random(seed).randint(1, 30)
  return Case(seed, phase, replica, rank, time)


@dataclasses.dataclass
class Result:
  """The result of a kill.

  Attributes:
    case: the case.
    seconds: how long it took until the replica was back.
    steps: the run's step at that time.
    problems: violations; empty in a good run.
    struck: whether the process was killed.
    next_commit: seconds from the kill to the next commit of the other replica.
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
    found, _ = read_journal(run.journal)
    # Fingerprints are of shards, and compared below.
    bare = [(r, i, {**seen, "prints": {}}) for r, i, seen in reports]
    _, problems = checks.check(found, bare, TIMEOUT)
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
    victim, other = case.replica, REPLICAS - 1 - case.replica
    if case.by_leader and not run.live[victim][0].is_leader:
      # The remaining one becomes the leader.
      run.kill(other)
      since = time.monotonic()
      run.start(other)
      self._wait_for_both(run, since, "the other replica does not come back")
    fault = {"phase": case.phase, "time": case.time}
    if case.at_start:
      run.kill(victim)
      group = run.start(victim, {case.rank: fault})
    else:
      group = run.live[victim]
      group[case.rank].process.send(do="arm", **fault)
      heard = lambda: group[case.rank].said("armed")
      run.wait(heard, f"{group[case.rank]} does not hear", self._deadline)
      if case.phase == "checkpointing":
        run.tell("save", victim)
    one = group[case.rank]
    ended = lambda: one.said("struck") and one.killed
    run.wait(ended, f"{one} does not come to {case.phase}", self._deadline)
    result.struck = True
    killed = one.said("struck")[0]["at"]
    alone = lambda: run.live[other][0].steps_of(other, after=killed)
    run.wait(alone, f"nobody goes on after {one}", self._deadline)
    result.next_commit = alone()[0]["at"] - killed
    run.kill(victim)  # The replica's other processes.
    started = time.monotonic()
    again = run.start(victim)[0]
    self._wait_for_both(
      run, started, f"the replica of {one} does not come back"
    )
    result.steps = again.step


def run(
  folder: pathlib.Path, seeds: Sequence[int] | None, processes: int
) -> bool:
  """Kills processes of two replicas, and prints the results.

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
      "next commit of the other replica:"
      f" median {statistics.median(stalls):.3f} s, longest {max(stalls):.3f} s"
    )
  return bool(problems) or good < len(results)
