"""Sums of a deterministic step's slots, as trees of which nothing is known.

A gradient stands for its slot and the parameters that it was computed on, and the
sum of two is a number that only the same two in the same order give. So two sums
are equal if all additions were the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from optax_dist.ledger import Batches, tree
from optax_dist.ledger import spans as sp
from optax_dist.ledger.spans import Span

# The nodes that a replica has, and the number of each.
Nodes = tuple[tuple[Span, int], ...]

_MASK = (1 << 63) - 1


def slot(data: Batches, version: int, position: int) -> Nodes:
  """The gradient of the slot that begins at a position, on these parameters."""
  ((start, stop),) = tree.slots(data, ((position, position + _size(data)),))
  return (((start, stop), hash((version, position)) & _MASK),)


def is_finite(position: int, not_finite: float) -> bool:
  """Whether a slot's gradient is finite: it is so for all who compute it."""
  return random.Random(position).random() >= not_finite


def added(data: Batches, one: Nodes, other: Nodes) -> Nodes:
  """The sum of both, as far as their slots are whole nodes."""
  spans = sp.union(span for span, _ in (*one, *other))
  return _made((*one, *other), tree.nodes(spans, data.slots))


def whole(data: Batches, parts: Iterable[Nodes]) -> int:
  """The sum of a step."""
  rows = tuple(node for part in parts for node in part)
  ((_, value),) = _made(rows, ((0, data.slots),))
  return value


def right(data: Batches, version: int, step: int) -> int:
  """The sum of a step, if one replica computes it."""
  first = step * data.global_batch
  positions = range(first, first + data.global_batch, _size(data))
  return whole(data, [slot(data, version, position) for position in positions])


def _made(rows: Nodes, wanted: Iterable[Span]) -> Nodes:
  wanted = tuple(wanted)
  spans = [span for span, _ in rows]
  values = [value for _, value in rows]
  for left, right in tree.additions(spans, wanted):
    values[left] = hash((values[left], values[right])) & _MASK
  places = {span[0]: row for row, span in enumerate(spans)}
  return tuple((span, values[places[span[0]]]) for span in wanted)


def _size(data: Batches) -> int:
  assert data.micro_batch is not None
  return data.micro_batch
