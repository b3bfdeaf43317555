"""The mean of encoded gradients: of one slice, or of whole gradients.

If members exchange gradients, each averages one slice; the coordinator averages
gradients that are sent inline, in messages. Each element is summed from the first
gradient to the last, or in the order of a tree, and divided once. So the mean does not
depend on the order of arrival, nor on how the work is divided.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from optax_dist import ledger
from optax_dist.coordinator.aggregation import layout as layouts
from optax_dist.coordinator.aggregation import tree_sums
from optax_dist.coordinator.aggregation import wire_formats as wires
from optax_dist.coordinator.protocol import entries
from optax_dist.ledger import tree


class Sum(NamedTuple):
  """How gradients are added up.

  Attributes:
    rows: how many encoded arrays each gradient consists of: one, or one for each node
      of a tree.
    weights: the weight of each gradient; all are 1.0 if there is a tree.
    divisor: what the sum is divided by: the number of gradients, of which a member may
      have several.
    order: the additions of a tree's nodes, see `ledger.tree.additions`; None: from
      the first gradient to the last.
  """

  rows: tuple[int, ...]
  weights: tuple[float, ...]
  divisor: int
  order: tuple[tuple[int, int], ...] | None


class Reducer:
  """Averages gradients of one model.

  Attributes:
    layout: the layout of gradients, and of means.
  """

  def __init__(
    self, layout: layouts.Layout, data: ledger.Batches | None = None
  ):
    """Takes the layout.

    Args:
      layout: the layout of gradients, and of means.
      data: deterministic data, whose micro-batches are added in the order of a
        tree; None: members are added from first to last.
    """
    self.layout, self._data = layout, data

  def sum_of(self, parts: Sequence[entries.Part]) -> Sum:
    """How these gradients are added up, in their order."""
    weights = tuple(part.weight for part in parts)
    divisor = sum(part.count for part in parts)
    if self._data is None:
      return Sum((1,) * len(parts), weights, divisor, None)
    nodes_of_parts = [tree.nodes_at(self._data, part.data) for part in parts]
    order = tree.whole(itertools.chain(*nodes_of_parts), self._data.slots)
    return Sum(tuple(map(len, nodes_of_parts)), weights, divisor, order)

  def whole(
    self, parts: Sequence[entries.Part], gradients: Sequence[bytes]
  ) -> bytes:
    """The mean of whole gradients.

    Args:
      parts: the gradients, in order.
      gradients: their bytes, of the size that `Sum.rows` says.
    """
    # A single array for all members: there may be hundreds of them.
    rows = np.frombuffer(b"".join(gradients), np.uint8)
    rows = rows.reshape(-1, self.layout.nbytes)
    out = np.zeros(self.layout.nbytes, np.uint8)
    self.slice(self.sum_of(parts), rows, 0, self.layout.elements, out)
    return out.tobytes()

  # Padding between leaves may contain any values.
  @np.errstate(all="ignore")
  def slice(
    self,
    total: Sum,
    rows: Sequence[np.ndarray] | np.ndarray,
    start: int,
    stop: int,
    out: np.ndarray,
  ) -> None:
    """Averages a slice.

    Args:
      total: how the gradients are added up.
      rows: the slice's bytes of each of their arrays; or one array with a row for
        each.
      start: the slice's first element.
      stop: the element after its last.
      out: the slice's bytes of the mean; uint8.
    """
    for chunk in self.layout.chunks(start, stop):
      codec, target = chunk.codec, out[chunk.bytes]
      direct = isinstance(codec, wires.Plain) and codec.is_exact
      size, work = chunk.size, codec.work
      mean = target.view(work) if direct else np.empty(size, work)
      _add_up(codec, total, [raw[chunk.bytes] for raw in rows], mean)
      if total.divisor != 1:
        np.divide(mean, np.asarray(total.divisor, codec.work), out=mean)
      if not direct:
        codec.encode(mean, target)


def _add_up(
  codec: wires.Codec, total: Sum, rows: Sequence[np.ndarray], out: np.ndarray
) -> None:
  """The sum of encoded numbers."""
  if total.order is not None:
    root = total.order[-1][0] if total.order else 0
    summed = tree_sums.tree_sum(codec, rows, total.order)[root]
    np.copyto(out, codec.decode(summed))
    return
  numbers = []
  for raw, weight in zip(rows, total.weights, strict=True):
    more = codec.decode(raw)
    if weight != 1.0:
      more = np.multiply(more, np.asarray(weight, more.dtype))
    numbers.append(more)
  if len(numbers) == 1:
    np.copyto(out, numbers[0])
  for i, more in enumerate(numbers[1:]):
    np.add(out if i else numbers[0], more, out=out)
