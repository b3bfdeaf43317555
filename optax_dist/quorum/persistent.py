"""Persistent values with cheap changed copies: a map and a queue.

The rules keep every earlier state usable, and a state may hold ten thousand
replicas. Copying a dict of that size on every event would cost more than the
event, so these two share the unchanged parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_BITS = 5
_WIDTH = 1 << _BITS
# Keys whose hashes agree in this many bits share one leaf, however large.
_DEPTH = 12

_ABSENT: Any = object()

# A leaf is a dict; an inner node is a tuple of _WIDTH nodes.
_Node = Any


class PersistentMap(Generic[K, V]):
  """An immutable map whose changed copies cost O(log n).

  Iteration order is not defined (it follows hashes): sort what you list.

  Example:
    >>> one = PersistentMap().set("a", 1)
    >>> two = one.set("b", 2)
    >>> dict(one.items()), sorted(two.items()), len(two.delete("a"))
    ({'a': 1}, [('a', 1), ('b', 2)], 1)
  """

  __slots__ = ("_root", "_size")
  _root: _Node
  _size: int

  def __init__(self) -> None:
    self._root = {}
    self._size = 0

  @classmethod
  def _make(cls, root: _Node, size: int) -> PersistentMap[K, V]:
    new = cls.__new__(cls)
    new._root, new._size = root, size
    return new

  def get(self, key: K, default: Any = None) -> Any:
    """The value of `key`, or `default` if there is none."""
    node, bits = self._root, hash(key)
    while type(node) is tuple:
      node = node[bits & (_WIDTH - 1)]
      bits >>= _BITS
    return node.get(key, default)

  def set(self, key: K, value: V) -> PersistentMap[K, V]:
    """A copy in which `key` has `value`."""
    root, bits = self._root, hash(key)
    new = PersistentMap.__new__(PersistentMap)
    if type(root) is tuple:
      at = bits & (_WIDTH - 1)
      leaf = root[at]
      if type(leaf) is dict and len(leaf) < _WIDTH:
        # The usual case, up to some hundred keys.
        new._size = self._size + (key not in leaf)
        new._root = (*root[:at], {**leaf, key: value}, *root[at + 1 :])
        return new
    new._size = self._size + (self.get(key, _ABSENT) is _ABSENT)
    new._root = _set(root, bits, 0, key, value)
    return new

  def update(self, pairs: Mapping[K, V]) -> PersistentMap[K, V]:
    """A copy with all these pairs, which costs less than a `set` for each."""
    if len(pairs) < 2:
      for key, value in pairs.items():
        return self.set(key, value)
      return self
    items = [(hash(key), key, value) for key, value in pairs.items()]
    root, grown = _update(self._root, 0, items)
    return self._make(root, self._size + grown)

  def delete(self, key: K) -> PersistentMap[K, V]:
    """A copy without `key`; the map itself if it has no such key."""
    if self.get(key, _ABSENT) is _ABSENT:
      return self
    return self._make(_delete(self._root, hash(key), key), self._size - 1)

  def items(self) -> Iterator[tuple[K, V]]:
    """All pairs, in no defined order."""
    nodes = [self._root]
    while nodes:
      node = nodes.pop()
      if type(node) is tuple:
        nodes.extend(node)
      else:
        yield from node.items()

  def values(self) -> Iterator[V]:
    """All values, in no defined order."""
    return (value for _, value in self.items())

  def __iter__(self) -> Iterator[K]:
    return (key for key, _ in self.items())

  def __contains__(self, key: object) -> bool:
    return self.get(key, _ABSENT) is not _ABSENT  # type: ignore[arg-type]

  def __len__(self) -> int:
    return self._size

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, PersistentMap):
      return NotImplemented
    return self._size == other._size and dict(self.items()) == dict(
      other.items()
    )

  def __hash__(self) -> int:
    return hash(frozenset(self.items()))

  def __repr__(self) -> str:
    return f"PersistentMap({dict(self.items())!r})"

  def __reduce__(self) -> tuple[Any, ...]:
    # Hashes of strings differ between processes, so the tree is not pickled.
    return (persistent_map, (list(self.items()),))


def persistent_map(
  items: Iterable[tuple[Any, Any]] = (),
) -> PersistentMap[Any, Any]:
  """A `PersistentMap` of the given pairs."""
  return PersistentMap().update(dict(items))


def _set(node: _Node, bits: int, depth: int, key: Any, value: Any) -> _Node:
  if type(node) is tuple:
    at = bits & (_WIDTH - 1)
    copy = list(node)
    copy[at] = _set(node[at], bits >> _BITS, depth + 1, key, value)
    return tuple(copy)
  leaf = node.copy()
  leaf[key] = value
  return _split(leaf, depth)


def _update(
  node: _Node, depth: int, items: Sequence[tuple[int, Any, Any]]
) -> tuple[_Node, int]:
  """A node with all these hashes, keys and values, and how many are new."""
  if type(node) is dict:
    leaf = node.copy()
    for _, key, value in items:
      leaf[key] = value
    return _split(leaf, depth), len(leaf) - len(node)
  below: dict[int, list[tuple[int, Any, Any]]] = {}
  shift = _BITS * depth
  for item in items:
    at = (item[0] >> shift) & (_WIDTH - 1)
    if at in below:
      below[at].append(item)
    else:
      below[at] = [item]
  copy, grown = list(node), 0
  for at, some in below.items():
    copy[at], more = _update(node[at], depth + 1, some)
    grown += more
  return tuple(copy), grown


def _split(leaf: dict[Any, Any], depth: int) -> _Node:
  """A leaf, or the nodes that replace it if it is too large."""
  if len(leaf) <= _WIDTH or depth >= _DEPTH:
    return leaf
  children: list[dict[Any, Any]] = [{} for _ in range(_WIDTH)]
  for key, value in leaf.items():
    children[(hash(key) >> (_BITS * depth)) & (_WIDTH - 1)][key] = value
  return tuple(_split(child, depth + 1) for child in children)


def _delete(node: _Node, bits: int, key: Any) -> _Node:
  if type(node) is tuple:
    at = bits & (_WIDTH - 1)
    child = _delete(node[at], bits >> _BITS, key)
    return (*node[:at], child, *node[at + 1 :])
  leaf = dict(node)
  del leaf[key]
  return leaf


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Fifo:
  """An immutable first-in first-out queue, O(1) amortised.

  Two linked lists: `front` in order, `back` reversed.

  Example:
    >>> queue = Fifo().push(1).push(2)
    >>> queue.pop()[0], list(queue), len(queue)
    (1, [1, 2], 2)
  """

  front: Any = None
  back: Any = None
  size: int = 0

  def push(self, item: Any) -> Fifo:
    """The queue with `item` at its end."""
    return Fifo(self.front, (item, self.back), self.size + 1)

  def pop(self) -> tuple[Any, Fifo]:
    """The first item and the rest; IndexError if it is empty."""
    front, back = self.front, self.back
    if front is None:
      while back is not None:
        item, back = back
        front = (item, front)
    if front is None:
      raise IndexError("pop from an empty Fifo")
    item, front = front
    return item, Fifo(front, back, self.size - 1)

  def without(self, item: Any) -> Fifo:
    """The queue without `item`, in O(n)."""
    return fifo(other for other in self if other != item)

  def __iter__(self) -> Iterator[Any]:
    node = self.front
    while node is not None:
      item, node = node
      yield item
    late, node = [], self.back
    while node is not None:
      item, node = node
      late.append(item)
    yield from reversed(late)

  def __len__(self) -> int:
    return self.size

  # A queue is its items, however they are split over the two lists.
  def __eq__(self, other: object) -> bool:
    return isinstance(other, Fifo) and list(self) == list(other)

  def __hash__(self) -> int:
    return hash(tuple(self))

  def __repr__(self) -> str:
    return f"fifo({list(self)!r})"

  def __reduce__(self) -> tuple[Any, ...]:
    # Linked lists nest too deeply to be pickled as they are.
    return (fifo, (list(self),))


def fifo(items: Iterable[Any] = ()) -> Fifo:
  """A `Fifo` of the given items."""
  queue = Fifo()
  for item in items:
    queue = queue.push(item)
  return queue
