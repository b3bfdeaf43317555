"""Cases that cover a grid by its pairs: most faults need two values, not all.

A whole grid is ``pytest.mark.parametrize`` once per factor, and stays where each
cell is a case of its own.
"""

import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def every_pair(**factors: Sequence[Any] | Mapping[str, Any]):
  """Parametrizes a test so that each two values of two factors meet.

  Args:
    **factors: the values of each argument of the test, or a dict of them by the
      names that they have in the names of tests.
  """
  return _parametrize(factors, 2)


def every_value(**factors: Sequence[Any] | Mapping[str, Any]):
  """Parametrizes a test so that each value of each factor is used once."""
  return _parametrize(factors, 1)


def cover(sizes: Sequence[int], strength: int) -> list[tuple[int, ...]]:
  """Returns rows of indices in which each ``strength`` of them meet.

  Args:
    sizes: the number of values of each factor.
    strength: 1 for each value, 2 for each pair, and so on.

  Returns:
    Rows in the order of the grid, the same in each process: workers of xdist
    must collect equal tests.
  """
  grid = list(itertools.product(*map(range, sizes)))
  missing = {part for row in grid for part in _parts(row, strength)}
  used = collections.Counter()
  chosen = []
  while missing:
    best = max(
      grid,
      key=lambda row: (
        sum(part in missing for part in _parts(row, strength)),
        # Of equal rows the one whose values were used least, then the first.
        -sum(used[part] for part in _parts(row, 1)),
      ),
    )
    chosen.append(best)
    missing.difference_update(_parts(best, strength))
    used.update(_parts(best, 1))
  return sorted(chosen)


def _parts(row, strength):
  return itertools.combinations(enumerate(row), strength)


def _parametrize(factors, strength):
  named = [_named(name, values) for name, values in factors.items()]
  cases = [
    [values[index] for values, index in zip(named, row, strict=True)]
    for row in cover(list(map(len, named)), min(strength, len(named)))
  ]
  return pytest.mark.parametrize(
    tuple(factors),
    [
      pytest.param(
        *(value for _, value in case), id="-".join(name for name, _ in case)
      )
      for case in cases
    ],
  )


def _named(factor, values):
  """Pairs of the name that pytest would give a value, and the value."""
  if isinstance(values, Mapping):
    return list(values.items())
  plain = (str, bool, int, float, type(None))
  return [
    (str(value) if isinstance(value, plain) else f"{factor}{index}", value)
    for index, value in enumerate(values)
  ]
