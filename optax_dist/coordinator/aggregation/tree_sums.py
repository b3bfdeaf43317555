"""Sums of encoded numbers, in an order that is given."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optax_dist.coordinator.aggregation import wire_formats as wires


def tree_sum(
  codec: wires.Codec,
  rows: Sequence[np.ndarray],
  order: Sequence[tuple[int, int]],
) -> list[np.ndarray]:
  """Adds encoded numbers in an order, and rounds each sum as it is sent.

  Args:
    codec: how they are encoded.
    rows: the bytes of each; they stay as they are.
    order: pairs of rows: the second is added to the first.

  Returns:
    The bytes of each row after all additions.
  """
  sums, made = list(rows), set()
  for left, right in order:
    numbers = codec.decode(sums[left]), codec.decode(sums[right])
    if left not in made:
      made.add(left)
      sums[left] = np.empty(sums[left].size, np.uint8)
    if isinstance(codec, wires.Plain) and codec.is_exact:
      np.add(*numbers, out=sums[left].view(codec.work))
    else:
      codec.encode(np.add(*numbers), sums[left])
  return sums
