"""The mean of the members' gradients, in replica order, slice by slice.

Each element is summed from the first replica to the last and divided once, so
the outcome does not depend on who comes first, nor on how the work is cut.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from optax_dist.coordinator.aggregation import block_formats
from optax_dist.coordinator.aggregation import layout as layouts
from optax_dist.coordinator.aggregation import wire_formats as wires

# A multiple of every quantum, and small enough to stay in a core's cache.
CHUNK = 16 * 4032


# Non-finite numbers may be compared and added here, without warnings.
@np.errstate(all="ignore")
def write(
  leaves: Sequence[Any],
  place: layouts.Layout,
  out: np.ndarray,
  error: np.ndarray | None = None,
  but: Container[int] = (),
) -> bool:
  """Encodes leaves into a buffer of their layout.

  Args:
    leaves: arrays, in the order of the layout. Of one that is shorter than there,
      nobody reads the rest.
    place: their layout.
    out: uint8, of `place.nbytes`.
    error: what earlier encodings of float32 leaves lost, float32 of
      `place.elements`; it is added, and replaced by what is lost now. None
      where nothing is to be fed back.
    but: the indices of leaves that are neither encoded nor checked.

  Returns:
    Whether all numbers are finite.
  """
  finite = True
  for index, group in enumerate(place.groups):
    mine = [
      (leaf, array)
      for i, (leaf, array) in enumerate(zip(place.leaves, leaves, strict=True))
      if leaf.group == index and i not in but
    ]
    if isinstance(group.codec, wires.Plain):
      for leaf, array in mine:
        start, stop = place.bytes_of_leaf(leaf)
        if leaf.size >= CHUNK:  # So that fewer bytes leave its device.
          array = array.astype(group.codec.stored, copy=False)
        flat = np.asarray(array).reshape(-1)
        finite &= _write_plain(flat, group.codec, out[start:stop])
        out[start + group.codec.nbytes(flat.size) : stop] = 0
    else:
      finite &= _write_blocks(mine, group, out, error)
  return finite


def _write_plain(flat: np.ndarray, codec: wires.Codec, out: np.ndarray) -> bool:
  finite = True
  exact = flat.dtype.kind not in "fcV"
  for start in range(0, flat.size, CHUNK):
    numbers = flat[start : start + CHUNK]
    first, last = codec.nbytes(start), codec.nbytes(start + numbers.size)
    codec.encode(numbers, out[first:last])
    # Large numbers may be rounded to infinity.
    finite &= exact or _are_finite(codec.decode(out[first:last]))
  return finite


def _are_finite(numbers: np.ndarray) -> bool:
  # The sum of finite numbers may overflow; only then look at each.
  return bool(np.isfinite(np.add.reduce(numbers)) or np.isfinite(numbers).all())


def is_finite(leaves: Sequence[np.ndarray]) -> bool:
  """Whether all numbers are finite.

  Example:
    >>> is_finite([np.ones(3), np.arange(4)]), is_finite([np.array([np.inf])])
    (True, False)
  """
  with np.errstate(all="ignore"):
    return all(
      _are_finite(flat[start : start + CHUNK])
      for flat in (leaf.reshape(-1) for leaf in leaves)
      if flat.dtype.kind in "fcV"
      for start in range(0, flat.size, CHUNK)
    )


def _write_blocks(
  mine: Sequence[tuple[layouts.Leaf, Any]],
  group: layouts.Group,
  out: np.ndarray,
  error: np.ndarray | None,
) -> bool:
  numbers = np.zeros(group.elements, group.codec.work)
  for leaf, array in mine:
    flat = np.asarray(array).reshape(-1)
    numbers[leaf.start : leaf.start + flat.size] = flat
  if not np.isfinite(numbers).all():
    return False
  if error is not None:
    lost = error[group.start : group.start + group.elements]
    for leaf, array in mine:  # Between leaves nothing is lost.
      here = slice(leaf.start, leaf.start + array.size)
      numbers[here] += lost[here]
  codec, quantum = group.codec, group.codec.quantum
  filled = np.zeros(0)
  if isinstance(codec, block_formats.Signs):
    filled = _filled(mine, group)
  for start in range(0, group.elements, CHUNK):
    piece = numbers[start : start + CHUNK]
    first = group.offset + group.codec.nbytes(start)
    raw = out[first : min(group.stop, first + group.codec.nbytes(CHUNK))]
    if isinstance(codec, block_formats.Signs):
      codec.encode(
        piece, raw, filled[start // quantum : (start + CHUNK) // quantum]
      )
    else:
      codec.encode(piece, raw)
    if error is not None:
      lost[start : start + CHUNK] = piece - codec.decode(raw)
  return True


def _filled(
  mine: Sequence[tuple[layouts.Leaf, Any]], group: layouts.Group
) -> np.ndarray:
  """For each block, how many numbers belong to a leaf."""
  numbers = np.zeros(group.elements, bool)
  for leaf, array in mine:
    numbers[leaf.start : leaf.start + array.size] = True
  return numbers.reshape(-1, group.codec.quantum).sum(1)


def mean_slice(
  members: Sequence[np.ndarray] | np.ndarray,
  weights: Sequence[float],
  count: int,
  place: layouts.Layout,
  mean_place: layouts.Layout,
  start: int,
  stop: int,
  out: np.ndarray,
  error: np.ndarray | None = None,
  gaps: Sequence[tuple[int, int]] = (),
  order: Sequence[tuple[int, int]] | None = None,
) -> None:
  """Averages one slice over all members.

  Args:
    members: the slice's bytes of each, in replica order; or one array with a row
      for each. With an order, of each node of a tree instead.
    weights: the weight of each; 1.0 is skipped. With an order they are all 1.0.
    count: divisor of the sum: gradients, not members.
    place: the layout of the members' gradients.
    mean_place: the layout of the mean, with the same elements.
    start: the slice's first element.
    stop: the element after its last.
    out: the slice's bytes of the mean.
    error: the residual of earlier means in few bits, float32 of `stop - start`;
      it is added, and replaced by the new residual. None without error feedback.
    gaps: of the layout, see `Layout.gaps`; a mean in few bits does not depend on
      the numbers there.
    order: the additions, see `ledger.tree.additions`, after which the sum is in the
      row `order[-1][0]`; None: from the first member to the last.
  """
  base, _ = place.bytes_of(start, stop)
  mean_base, _ = mean_place.bytes_of(start, stop)
  for part, mean_part in zip(
    place.parts(start, stop), mean_place.parts(start, stop), strict=True
  ):
    codec, mean_codec = part.group.codec, mean_part.group.codec
    divisor = np.asarray(count, codec.work)
    direct = (
      isinstance(mean_codec, wires.Plain)
      and mean_codec.work == mean_codec.stored
    )
    at = max(start, part.group.start)
    for first in range(0, part.elements, CHUNK):
      last = min(part.elements, first + CHUNK)
      low = part.start - base + codec.nbytes(first)
      high = part.start - base + codec.nbytes(last)
      mean_low = mean_part.start - mean_base + mean_codec.nbytes(first)
      mean_high = mean_part.start - mean_base + mean_codec.nbytes(last)
      target = out[mean_low:mean_high]
      total = (
        target.view(codec.work)
        if direct
        else np.empty(last - first, codec.work)
      )
      mine = [raw[low:high] for raw in members]
      if order is None:
        _add_up(codec, mine, weights, total)
      else:
        row = order[-1][0] if order else 0
        np.copyto(total, codec.decode(added_up(codec, mine, order)[row]))
      if count != 1:
        np.divide(total, divisor, out=total)
      if mean_codec.blocks:
        lost = None
        if error is not None:
          lost = error[at - start + first : at - start + last]
        _encode_mean(total, mean_codec, target, lost, gaps, at + first)
      elif not direct:
        mean_codec.encode(total, target)


def _encode_mean(
  numbers: np.ndarray,
  codec: wires.Codec,
  out: np.ndarray,
  error: np.ndarray | None,
  gaps: Sequence[tuple[int, int]],
  start: int,
) -> None:
  """Rounds a mean of whole blocks to few bits, with error feedback.

  Numbers that are not finite stay so, and leave no residual.

  Args:
    numbers: the mean; overwritten.
    codec: encodes it.
    out: the bytes to write.
    error: the residual of these numbers, see `mean_slice`.
    gaps: see `mean_slice`.
    start: the first element of the numbers.
  """
  if error is not None:
    numbers += error
  real = np.ones(numbers.size, bool)
  first = bisect.bisect_right(gaps, start, key=lambda gap: gap[1])
  for low, high in itertools.islice(gaps, first, None):
    if low >= start + numbers.size:
      break
    here = slice(max(0, low - start), high - start)
    numbers[here], real[here] = 0.0, False
  if isinstance(codec, block_formats.Signs):
    codec.encode(numbers, out, real.reshape(-1, codec.quantum).sum(1))
  else:
    codec.encode(numbers, out)
  if error is not None:
    np.subtract(numbers, codec.decode(out), out=error)
    if not np.isfinite(np.add.reduce(error)):
      error[~np.isfinite(error)] = 0.0


def _add_up(
  codec: wires.Codec,
  members: Sequence[np.ndarray],
  weights: Sequence[float],
  out: np.ndarray,
) -> None:
  """The sum of encoded numbers, from the first member to the last."""
  numbers = [
    _weighted(codec.decode(raw), weight)
    for raw, weight in zip(members, weights, strict=True)
  ]
  if len(numbers) == 1:
    np.copyto(out, numbers[0])
  for i, more in enumerate(numbers[1:]):
    np.add(out if i else numbers[0], more, out=out)


def added_up(
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
  found, made = list(rows), set()
  for left, right in order:
    numbers = codec.decode(found[left]), codec.decode(found[right])
    if left not in made:
      made.add(left)
      found[left] = np.empty(found[left].size, np.uint8)
    if isinstance(codec, wires.Plain) and codec.stored == codec.work:
      np.add(*numbers, out=found[left].view(codec.work))
    else:
      codec.encode(np.add(*numbers), found[left])
  return found


def _weighted(numbers: np.ndarray, weight: float) -> np.ndarray:
  if weight == 1.0:
    return numbers
  return np.multiply(numbers, np.asarray(weight, numbers.dtype))


def read(place: layouts.Layout, raw: np.ndarray) -> list[np.ndarray]:
  """The leaves of a mean: views; numbers in few bits are decoded.

  Args:
    place: the layout of the mean.
    raw: its bytes.

  Returns:
    Arrays in the order of the layout, of the dtype in which they were sent, or
    float32 if that was few bits.
  """
  decoded: dict[int, np.ndarray] = {}
  leaves = []
  for leaf in place.leaves:
    group = place.groups[leaf.group]
    codec = group.codec
    if isinstance(codec, wires.Plain):
      start, stop = place.bytes_of_leaf(leaf)
      flat = raw[start:stop].view(codec.stored)
    else:
      if leaf.group not in decoded:
        blocks = raw[group.offset : group.stop]
        decoded[leaf.group] = _decoded(codec, blocks, group.elements)
      flat = decoded[leaf.group][leaf.start : leaf.start + leaf.size]
    leaves.append(flat.reshape(leaf.shape))
  return leaves


def _decoded(codec: wires.Codec, raw: np.ndarray, elements: int) -> np.ndarray:
  """The numbers of whole blocks, decoded within a core's cache."""
  out = np.empty(elements, codec.work)
  for start in range(0, elements, CHUNK):
    stop = min(elements, start + CHUNK)
    out[start:stop] = codec.decode(
      raw[codec.nbytes(start) : codec.nbytes(stop)]
    )
  return out
