"""TensorFlow's conditional accumulators, event for event.

Bookkeeping only: counts, steps, and tags. The sums are in `sums.py`. Source:
tensorflow/core/kernels/conditional_accumulator_base.cc and
sparse_conditional_accumulator.h, and recordings of TensorFlow 2.21.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from optax_dist.quorum.arguments import accepts
from tests.tensorflow1.events.outcomes import Applied, Completed

Shape = Sequence[int | None]

TAKE_CANCELLED = "CancelledError: TakeGrad operation was cancelled"
TIMED_OUT = "DeadlineExceededError"


@dataclasses.dataclass(frozen=True, slots=True)
class Accumulator:
  """The bookkeeping of a `ConditionalAccumulator`.

  Methods return the changed accumulator and the outcomes.

  Attributes:
    shape: static shape of the gradients; None if it is unknown, with None for
      an unknown dimension.
    step: its time step: older gradients are ignored.
    count: number of accumulated gradients.
    takes: the pending takes, in order, as (id, num_required).
    tags: tags of the accumulated gradients, latest first, as linked pairs.
    filled: the shape of the accumulated gradients, or None.

  Example:
    >>> books = Accumulator()
    >>> books, _ = books.take("t", 2)
    >>> books, _ = books.apply(0, "a")
    >>> books, out = books.apply(0, "b")
    >>> out[-1].value, books.step, books.count
    (('a', 'b'), 1, 0)
  """

  shape: Shape | None = None
  step: int = 0
  count: int = 0
  takes: tuple[tuple[Hashable, int], ...] = ()
  tags: Any = None
  filled: tuple[int, ...] | None = None

  @property
  def pending(self) -> tuple[Hashable, ...]:
    """The ids of the pending takes, in order."""
    return tuple(id for id, _ in self.takes)

  def apply(
    self, local_step: int, tag: Any = None, shape: Sequence[int] | None = None
  ) -> tuple[Accumulator, tuple[Applied | Completed, ...]]:
    """Applies a gradient computed at `local_step`; checks a given shape."""
    return self._apply(local_step, tag, shape, lambda: self._fault(shape))

  def _apply(self, local_step: Any, tag: Any, shape: Any, fault: Any) -> Any:
    # A stale gradient is not checked.
    if not accepts(local_step, self.step):
      return self, (Applied(tag, False),)
    error = fault()
    if error is not None:
      return self, (Applied(tag, False, f"InvalidArgumentError: {error}"),)
    filled = self.filled
    if filled is None and shape is not None:
      filled = tuple(shape)
    new = dataclasses.replace(
      self, count=self.count + 1, tags=(tag, self.tags), filled=filled
    )
    new, completed = new._flush()
    return new, (Applied(tag, True), *completed)

  def _fault(self, shape: Sequence[int] | None) -> str | None:
    if shape is None:
      return None
    for expected in (self.filled, self.shape):
      if expected is not None and not _compatible(expected, shape):
        return f"Shape mismatch: expected {_text(expected)}, got {_text(shape)}"
    return None

  def take(
    self, id: Hashable, num_required: int
  ) -> tuple[Accumulator, tuple[Completed, ...]]:
    """Requests the mean as soon as `num_required` gradients are accumulated.

    Takes are served in order: a pending one blocks smaller ones after it.
    """
    if num_required <= 0:
      error = (
        "InvalidArgumentError: Argument num_required must be positive, but "
        f"was {num_required}"
      )
      return self, (Completed(id, "take", error=error),)
    waiting = (*self.takes, (id, num_required))
    return dataclasses.replace(self, takes=waiting)._flush()

  def take_with_timeout(
    self, id: Hashable, num_required: int
  ) -> tuple[Accumulator, tuple[Completed, ...]]:
    """A take that times out before anything else happens."""
    new, completed = self.take(id, num_required)
    if id in new.pending:
      new, more = new.cancel(id, TIMED_OUT)
      completed += more
    return new, completed

  def cancel(
    self, id: Hashable, error: str = TAKE_CANCELLED
  ) -> tuple[Accumulator, tuple[Completed, ...]]:
    """Cancels a pending take; smaller ones after it may then complete."""
    if id not in self.pending:
      return self, ()
    rest = tuple(take for take in self.takes if take[0] != id)
    new, completed = dataclasses.replace(self, takes=rest)._flush()
    return new, (Completed(id, "take", error=error), *completed)

  def set_global_step(
    self, step: int
  ) -> tuple[Accumulator, tuple[Completed, ...]]:
    """Sets the step, also backwards; accumulated gradients are kept."""
    return dataclasses.replace(self, step=step), ()

  def close(self) -> tuple[Accumulator, tuple[Completed, ...]]:
    """Cancels every pending take.

    TensorFlow does so in an undefined order, and a take that becomes the first
    may still complete. Here all are cancelled, in order.
    """
    ended = (Completed(id, "take", error=TAKE_CANCELLED) for id in self.pending)
    return dataclasses.replace(self, takes=()), tuple(ended)

  def _shape_taken(self) -> tuple[int, ...] | None:
    return self.filled

  def _flush(self) -> tuple[Accumulator, tuple[Completed, ...]]:
    # After a take the count is 0 and every other take needs at least 1.
    if not self.takes or self.count < self.takes[0][1]:
      return self, ()
    tags, node = [], self.tags
    while node is not None:
      tag, node = node
      tags.append(tag)
    (id, _), *rest = self.takes
    value = tuple(reversed(tags))
    done = Completed(id, "take", value, self.step, self._shape_taken())
    new = dataclasses.replace(
        self, step=self.step + 1, count=0, takes=tuple(rest), tags=None,
        filled=None,
    )  # fmt: skip
    return new, (done,)


@dataclasses.dataclass(frozen=True, slots=True)
class SparseAccumulator(Accumulator):
  """The bookkeeping of a `SparseConditionalAccumulator`.

  `filled` is the shape of the accumulated values; only their number of rows may
  differ.
  """

  def apply_slices(
    self,
    local_step: int,
    tag: Any = None,
    *,
    indices: Any,
    values_shape: Sequence[int],
    dense_shape: Sequence[int] | None = None,
  ) -> tuple[SparseAccumulator, tuple[Applied | Completed, ...]]:
    """Applies a gradient of some rows.

    Args:
      local_step: the step it was computed at.
      tag: a name chosen by the caller.
      indices: the rows, a sequence of integers; anything else (a number, or
        nested sequences) is refused as in TensorFlow.
      values_shape: the shape of the values, `[len(indices), ...]`.
      dense_shape: the shape of the dense gradient, if known.

    Returns:
      The changed accumulator, and the outcomes.
    """
    return self._apply(
      local_step,
      tag,
      tuple(values_shape),
      lambda: self._fault_of_slices(indices, values_shape, dense_shape),
    )

  def _shape_taken(self) -> tuple[int, ...] | None:
    if self.filled is None:
      return None
    rows = self.shape[0] if self.shape else None
    return (-1 if rows is None else rows, *self.filled[1:])

  def _fault_of_slices(
    self, indices: Any, values_shape: Any, dense_shape: Any
  ) -> Any:
    index_shape = _shape_of(indices)
    if len(index_shape) != 1:
      return (
        "Input indices should be vector but received shape: "
        f"{_text(index_shape)}"
      )
    if not values_shape:
      return "Values cannot be 0-dimensional."
    if values_shape[0] != index_shape[0]:
      return (
        f"Expected {index_shape[0]} non-empty input values, got "
        f"{values_shape[0]}"
      )
    shape = () if self.shape is None else tuple(self.shape)
    return (
      _mismatch("shape", shape, dense_shape, 0)
      or _beyond(indices, shape)
      or self._fault_of_values(values_shape, shape)
    )

  def _fault_of_values(self, values_shape: Any, shape: Any) -> Any:
    if self.filled is None:
      return _mismatch("values", shape, values_shape, 1)
    if len(self.filled) != len(values_shape):
      return (
        f"Shape mismatch: expected values rank {len(self.filled)}, got "
        f"{len(values_shape)}"
      )
    return _mismatch("values", self.filled, values_shape, 1)


def _compatible(expected: Shape, shape: Sequence[int]) -> bool:
  return len(expected) == len(shape) and all(
    want in (None, got) for want, got in zip(expected, shape, strict=True)
  )


def _text(shape: Shape) -> str:
  return "[" + ",".join("?" if d is None else str(d) for d in shape) + "]"


def _shape_of(nested: Any) -> tuple[int, ...]:
  shape = getattr(nested, "shape", None)
  if shape is not None:
    return tuple(shape)
  dims = []
  while isinstance(nested, Sequence):
    dims.append(len(nested))
    nested = nested[0] if nested else None
  return tuple(dims)


def _mismatch(what: str, expected: Shape, got: Any, first: int) -> str | None:
  """Describes how `got` differs from `expected` in rank or from `first` on."""
  if got is None:
    return None
  if len(expected) > len(got):
    return (
      f"Shape mismatch: expected {what} rank at least {len(expected)}, got "
      f"{len(got)}"
    )
  for i in range(first, len(expected)):
    if expected[i] not in (None, -1, got[i]):
      return (
        f"Shape mismatch: expected {what} dim {i} to be {expected[i]}, got "
        f"{got[i]}"
      )
  return None


def _beyond(indices: Sequence[int], shape: Shape) -> str | None:
  """Whether a row exceeds a known number of rows."""
  rows = shape[0] if shape else None
  if rows in (None, -1):
    return None
  for i, index in enumerate(indices):
    if index >= rows:
      return (
        f"Shape mismatch: index of slice {i} exceeded limits of shape; "
        f"index is {index} exceeded {rows}"
      )
  return None
