"""Reads samples by index from a data source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def read(source: Any, indices: np.ndarray | Sequence[int]) -> Any:
  """The samples of a batch.

  Args:
    source: a NumPy array, or a tree of arrays in dictionaries and tuples (with
      samples along the first axis); or anything with `source[number]` and
      `len(source)`: Grain's `MapDataset`, a PyTorch data set, a sequence.
    indices: indices of samples, as from `coordinator.Replica.batches`.

  Returns:
    For arrays, the rows; otherwise the samples, stacked leaf by leaf. Without
    indices, arrays of no rows.

  Raises:
    IndexError: an index is negative or not in the source.

  Example:
    >>> read({"x": np.arange(4) * 10, "y": np.eye(4)[:, 0]}, [3, 0])
    {'x': array([30,  0]), 'y': array([0., 1.])}
    >>> read(["a", "b", "c"], [2, 1])
    array(['c', 'b'], dtype='<U1')
    >>> class Squares:
    ...   def __len__(self):
    ...     return 10
    ...   def __getitem__(self, number):
    ...     return {"number": number, "square": number**2}
    >>> read(Squares(), [4, 2])
    {'number': array([4, 2]), 'square': array([16,  4])}
  """
  # An empty list would become floats, which are no indices.
  numbers = np.asarray(indices) if len(indices) else np.zeros([0], np.int64)
  if _is_of_arrays(source):
    _check(numbers, _rows(source))
    return _map(lambda leaf: leaf[numbers], source)
  _check(numbers, len(source))
  if not len(numbers):
    # The shapes of an empty batch are taken from a sample.
    return _map(lambda leaf: leaf[:0], stack([source[0]]))
  return stack([source[number] for number in numbers.tolist()])


def stack(samples: Sequence[Any]) -> Any:
  """Stacks samples into one tree of arrays with a first axis.

  Example:
    >>> stack([(1, 2.0), (3, 4.0)])
    (array([1, 3]), array([2., 4.]))
  """
  first = samples[0]
  if isinstance(first, dict):
    return {key: stack([sample[key] for sample in samples]) for key in first}
  if isinstance(first, tuple | list):
    return _like(first, map(stack, zip(*samples, strict=True)))
  return np.stack([np.asarray(sample) for sample in samples])


def _is_of_arrays(tree: Any) -> bool:
  if isinstance(tree, dict):
    return bool(tree) and all(_is_of_arrays(leaf) for leaf in tree.values())
  if isinstance(tree, tuple):
    return bool(tree) and all(_is_of_arrays(leaf) for leaf in tree)
  return hasattr(tree, "dtype")  # A table of columns has a shape, too.


def _map(function: Any, tree: Any) -> Any:
  if isinstance(tree, dict):
    return {key: _map(function, leaf) for key, leaf in tree.items()}
  if isinstance(tree, tuple | list):
    return _like(tree, (_map(function, leaf) for leaf in tree))
  return function(tree)


def _like(tree: Any, parts: Iterable[Any]) -> Any:
  """The parts as a list or tuple; a NamedTuple takes each by itself."""
  return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def _rows(tree: Any) -> int:
  """Samples that all arrays of a tree have."""
  if isinstance(tree, dict):
    return min(map(_rows, tree.values()))
  return min(map(_rows, tree)) if isinstance(tree, tuple) else len(tree)


def _check(numbers: np.ndarray, size: int) -> None:
  # Some sources, like Grain's, would begin another epoch, and arrays count
  # negative indices from their end.
  if len(numbers) and not 0 <= numbers.min() <= numbers.max() < size:
    raise IndexError(
      f"samples must be from 0 to {size - 1}, got {numbers.min()} to "
      f"{numbers.max()}."
    )
