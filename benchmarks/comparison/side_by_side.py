"""Runs what is compared in turns, and says how they compare."""

import dataclasses
import os
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import processes

HERE = pathlib.Path(__file__).resolve().parent
# One measurement: a script of this folder, and its options.
Contender = tuple[str, Mapping[str, Any]]
Runs = dict[str, list[dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Line:
  """One figure.

  Attributes:
    what: what was measured.
    value: the median.
    unit: of the value.
    against: what it is compared with; "" for nothing.
    other: the other's median.
    ratio: the median over the rounds of the ratio of the two; the value itself
      where it is compared with nothing.
    goal: the least and the most that `ratio` should be.
    note: anything else.
  """

  what: str
  value: float
  unit: str
  against: str = ""
  other: float | None = None
  ratio: float | None = None
  goal: tuple[float, float] | None = None
  note: str = ""

  @property
  def met(self) -> bool | None:
    """Whether the goal is met; None without one."""
    if self.goal is None or self.ratio is None:
      return None
    return self.goal[0] <= self.ratio <= self.goal[1]

  def text(self) -> str:
    """The figure in a row of the table."""
    number = lambda x: "" if x is None else f"{x:.4g}"
    least, most = self.goal or (0.0, float("inf"))
    wanted = []
    if least > 0:
      wanted.append(f">= {least:g}")
    if most < float("inf"):
      wanted.append(f"<= {most:g}")
    met = {None: "", True: "met", False: "MISSED"}[self.met]
    return (
      f"{self.what:<44} {number(self.value):>9} {self.unit:<8}"
      f" {self.against:<26} {number(self.other):>9} {number(self.ratio):>7}"
      f"  {' '.join([*wanted, met, self.note]).strip()}"
    ).rstrip()


HEADER = (
  f"{'what':<44} {'ours':>9} {'':<8} {'against':<26} {'other':>9}"
  f" {'ratio':>7}  goal"
)


def in_turns(
  contenders: Mapping[str, Contender],
  repeats: int,
  timeout: float = 240.0,
) -> Runs:
  """Runs each of them this many times, one after the other.

  Args:
    contenders: by name.
    repeats: rounds; each other one goes backwards, so that none always follows
      the same.
    timeout: seconds for one of them.

  Returns:
    What each run said, by name.

  Raises:
    processes.Failed: if a run fails or is not done in time.
  """
  runs: Runs = {name: [] for name in contenders}
  for i in range(repeats):
    for name in reversed(contenders) if i % 2 else contenders:
      script, options = contenders[name]
      runs[name].append(run(script, options, timeout, i))
      print(f"  round {i + 1} of {repeats}: {name}", file=sys.stderr)
  return runs


def run(
  script: str, options: Mapping[str, Any], timeout: float, number: int = 0
) -> dict[str, Any]:
  """Runs a script of this folder, which prints a line of JSON.

  Args:
    script: its name.
    options: of its command line; True for a flag, False for none. A function
      is called with `number`.
    timeout: seconds.
    number: of the round.

  Returns:
    What it printed.

  Raises:
    processes.Failed: if it fails or is not done in time.
  """
  command = [sys.executable, str(HERE / script), "--timeout", str(timeout - 10)]
  for name, value in options.items():
    if callable(value):
      value = value(number)
    if value is not False:
      command.append(f"--{name}")
      command.extend([] if value is True else [str(value)])
  with processes.group(timeout) as group:
    return group.wait_for(group.start(f"{script} {dict(options)}", command))


def values(runs: Sequence[Mapping[str, Any]], key: str) -> list[float]:
  """One number of each run."""
  return [float(one[key]) for one in runs]


def against(
  what: str,
  unit: str,
  ours: Sequence[float],
  peer: str,
  theirs: Sequence[float],
  goal: tuple[float, float] | None = None,
) -> Line:
  """Compares two, run in turns.

  Args:
    what: what was measured.
    unit: of the values.
    ours: a value for each round.
    peer: who the other is.
    theirs: its values.
    goal: the least and the most that the ratio should be.
  """
  ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
  return Line(
    what,
    statistics.median(ours),
    unit,
    peer,
    statistics.median(theirs),
    statistics.median(ratios),
    goal,
    f"[{min(ratios):.3g} to {max(ratios):.3g}]" if len(ratios) > 1 else "",
  )


def machine() -> dict[str, Any]:
  """What the figures depend on, besides the code."""
  import jax

  import optax_dist

  return {
    "cores": os.cpu_count(),
    "load": os.getloadavg()[0],
    "jax": jax.__version__,
    "optax_dist": getattr(optax_dist, "__version__", None),
    "python": sys.version.split()[0],
  }
