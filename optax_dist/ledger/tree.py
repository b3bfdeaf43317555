"""The fixed binary tree in which the micro-batches of a step are added up.

Floating-point sums depend on the order of the additions. So the gradients of a
step's M micro-batches, numbered from 0 and called *slots*, are always added in the
order of one tree, whichever replicas compute them:

    level 2          (0, 4)            a node is the range of slots that
    level 1     (0, 2)   (2, 4)        it is the sum of: at level l from
    level 0     0    1   2    3        i * 2**l to min(M, (i + 1) * 2**l)

A node is its left half plus its right half; where M cuts the right half off, the node
is its left half. A replica adds up its own slots as far as they form whole nodes, and
the replica that averages adds up the nodes of all replicas. This module is pure: only
the caller has the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from optax_dist.ledger import spans as sp
from optax_dist.ledger.batches import Batches
from optax_dist.ledger.spans import Span, Spans


def slots(data: Batches, positions: Spans) -> Spans:
  """The slots of a step whose samples are at these positions, sorted.

  Args:
    data: deterministic; each of its steps has `global_batch` positions.
    positions: whole micro-batches of one step.

  Raises:
    ValueError: they are of several steps.

  Example:
    >>> data = Batches(32, 8, micro_batch=2, deterministic=True)
    >>> slots(data, ((12, 16), (8, 10)))
    ((0, 1), (2, 4))
  """
  size = data.micro_batch
  assert size is not None
  spans = []
  for start, stop in positions:
    first = start // data.global_batch * data.global_batch
    if stop > first + data.global_batch:
      raise ValueError(f"{positions} are not positions of one step.")
    spans.append(((start - first) // size, (stop - first) // size))
  return sp.union(spans)


def nodes(own: Spans, count: int) -> Spans:
  """The fewest nodes that slots consist of.

  Args:
    own: slots, sorted.
    count: all slots of the step.

  Returns:
    The nodes, sorted.

  Example:
    >>> nodes(((0, 5),), count=8), nodes(((3, 7),), count=7)
    (((0, 4), (4, 5)), ((3, 4), (4, 7)))
  """
  covering = []
  for start, stop in own:
    while start < stop:
      end = start + 1
      size = 2
      while start % size == 0 and min(start + size, count) <= stop:
        end = min(start + size, count)
        if end == count:
          break
        size *= 2
      covering.append((start, end))
      start = end
  return tuple(covering)


def nodes_at(data: Batches, positions: Spans) -> Spans:
  """The nodes of the slots whose samples are at these positions.

  Example:
    >>> data = Batches(32, 8, micro_batch=2, deterministic=True)
    >>> nodes_at(data, ((8, 14),))
    ((0, 2), (2, 3))
  """
  return nodes(slots(data, positions), data.slots)


def additions(
  rows: Sequence[Span], wanted: Iterable[Span]
) -> tuple[tuple[int, int], ...]:
  """The additions that make nodes out of other nodes.

  Args:
    rows: the nodes that are there, in any order.
    wanted: the nodes to make; each consists of some of these.

  Returns:
    Pairs of indices of rows, in order: the second is added to the first, whose row
    then has the sum. In the end each wanted node is in the row of its first slot.

  Raises:
    ValueError: a slot is in no row, or in two.

  Example:
    >>> additions([(0, 2), (3, 4), (2, 3)], [(0, 4)])
    ((2, 1), (0, 2))
  """
  starts = {start: i for i, (start, _) in enumerate(rows)}
  if len(starts) < len(rows):
    raise ValueError(f"A slot is in two of the nodes {sorted(rows)}.")
  pairs: list[tuple[int, int]] = []

  def make(start: int, stop: int) -> int:
    row = starts.get(start)
    if row is None or rows[row][1] > stop:
      raise ValueError(
        f"The nodes {sorted(rows)} don't make up the node ({start}, {stop})."
      )
    if rows[row][1] == stop:
      return row
    # The largest power of two below its size: its right half may be cut off.
    middle = start + (1 << (stop - start - 1).bit_length() - 1)
    left, right = make(start, middle), make(middle, stop)
    pairs.append((left, right))
    return left

  wanted = list(wanted)
  for start, stop in wanted:
    make(start, stop)
  if sp.size(wanted) != sp.size(rows):
    raise ValueError(f"The nodes {sorted(rows)} are more than {wanted}.")
  return tuple(pairs)


def whole(rows: Iterable[Span], count: int) -> tuple[tuple[int, int], ...]:
  """The additions that make the sum of a step; see `additions`.

  Args:
    rows: the nodes that are there, in any order.
    count: all slots of the step.

  Example:
    >>> whole([(0, 2), (2, 3)], count=3)
    ((0, 1),)
  """
  return additions(list(rows), [(0, count)])
