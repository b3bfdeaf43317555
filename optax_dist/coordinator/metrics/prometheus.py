"""Metrics in Prometheus' text format."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from optax_dist.coordinator.metrics import table


def text(numbers: Iterable[table.Number]) -> str:
  """The numbers in Prometheus' text format.

  Example:
    >>> steps = table.Number(
    ...   "steps", "counter", "Steps committed in this run.", 3)
    >>> print(text([steps]), end="")
    # HELP optax_dist_steps_total Steps committed in this run.
    # TYPE optax_dist_steps_total counter
    optax_dist_steps_total 3.0
  """
  lines = []
  for row in numbers:
    name = f"optax_dist_{row.name}"
    name += "_total" if row.kind == "counter" else ""
    lines += [f"# HELP {name} {row.help}", f"# TYPE {name} {row.kind}"]
    for key, value in row.cells():
      labels = {row.label: key} if row.label else {}
      for suffix, more, number in _samples(value):
        pairs = ",".join(
          f'{label}="{_escaped(text)}"'
          for label, text in (labels | more).items()
        )
        shown = f"{{{pairs}}}" if pairs else ""
        lines.append(f"{name}{suffix}{shown} {float(number)!r}")
  return "".join(f"{line}\n" for line in lines)


def _samples(
  value: float | table.Distribution,
) -> Iterator[tuple[str, dict[str, str], float]]:
  """Suffix of the name, labels, and number, of each line for a value."""
  if not isinstance(value, table.Distribution):
    yield "", {}, value
    return
  bounds = [*(f"{bound:g}" for bound in value.bounds), "+Inf"]
  at_most = itertools.accumulate(value.counts)
  for bound, count in zip(bounds, at_most, strict=True):
    yield "_bucket", {"le": bound}, count
  yield "_count", {}, value.count
  yield "_sum", {}, value.total


def _escaped(text: str) -> str:
  return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
