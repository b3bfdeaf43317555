"""The latest messages of a process, in memory that others read.

One writes, any number read, and nobody waits for anybody: a message stays until
others have taken its place. A reader is given whole messages only.
"""

from __future__ import annotations

import threading

import numpy as np

from optax_dist.coordinator import futex

SLOTS = 512
CAPACITY = 2 << 20
# Larger messages would take the place of too many others.
LARGEST = CAPACITY // 8

# How many are looked at before all are.
_RECENT = 2

_HEAD = 8
_COUNT, _FLOOR = 0, 1
_KEY, _START, _LENGTH, _NUMBER = range(4)  # Columns.
_WORDS = _HEAD + 4 * SLOTS
# Bytes of the memory that a ring needs.
SIZE = 8 * _WORDS + CAPACITY


class _Ring:
  def __init__(self, memory: np.ndarray):
    if memory.dtype != np.uint8 or memory.size != SIZE:
      raise ValueError(
        f"A ring needs {SIZE} bytes; got {memory.dtype} of {memory.size}."
      )
    words = memory[: 8 * _WORDS].view(np.uint64)
    self._keys = words[_HEAD : _HEAD + SLOTS]
    # Single words are read several times as fast as from an array.
    self._words = words.data
    self._data = memory[8 * _WORDS :]
    #: How many messages there were.
    self.count = futex.Word(words[_COUNT : _COUNT + 1])

  def _slot(self, number: int) -> list[int]:
    """Where the words of a message are."""
    at = _HEAD + number % SLOTS
    return [at + column * SLOTS for column in range(4)]


class RingWriter(_Ring):
  """The end of the one who writes.

  Example:
    >>> memory = np.zeros(SIZE, np.uint8)
    >>> writer, reader = RingWriter(memory), RingReader(memory)
    >>> writer.put(7, b"one")
    >>> reader.find(7), reader.find(8)
    (b'one', None)
  """

  def __init__(self, memory: np.ndarray):
    super().__init__(memory)
    self._lock = threading.Lock()
    self._fence = threading.Lock()
    self._end = 0  # Of all that was ever written.

  def put(self, key: int, message: bytes) -> None:
    """Writes a message, in the place of the oldest.

    Args:
      key: a number below 2**62 by which it is found.
      message: of `LARGEST` bytes at most.
    """
    size = len(message)
    if size > LARGEST:
      raise ValueError(f"A message has at most {LARGEST} bytes; got {size}.")
    with self._lock:
      start = self._end
      if start % CAPACITY + size > CAPACITY:
        start += CAPACITY - start % CAPACITY  # It lies in one piece.
      self._end = start + size
      number, words = self.count.value, self._words
      at = self._slot(number)
      words[at[_NUMBER]] = 0
      words[_FLOOR] = max(0, self._end - CAPACITY)
      self._keep_order()
      first = start % CAPACITY
      self._data[first : first + size] = np.frombuffer(message, np.uint8)
      words[at[_KEY]] = key + 1
      words[at[_START]] = start
      words[at[_LENGTH]] = size
      self._keep_order()
      words[at[_NUMBER]] = number + 1
      self._keep_order()
      self.count.value = number + 1
    self.count.wake()

  def _keep_order(self) -> None:
    with self._fence:  # What was written is seen before what follows.
      pass


class RingReader(_Ring):
  """The end of one who reads."""

  def find(self, key: int) -> bytes | None:
    """The latest message under the key, if it is still there."""
    count = self.count.value
    first = max(0, count - _RECENT)
    for number in range(count - 1, first - 1, -1):
      found = self._read(number, key)
      if found is not None:
        return found
    if not first:
      return None
    at = np.flatnonzero(self._keys == key + 1)
    # From the slots to the messages, the latest first.
    numbers = sorted((count - 1 - (count - 1 - at) % SLOTS).tolist())
    found = None
    while numbers and found is None:
      found = self._read(numbers.pop(), key)
    return found

  def _read(self, number: int, key: int) -> bytes | None:
    """A message, if it is under this key, and whole."""
    words, at = self._words, self._slot(number)
    if words[at[_KEY]] != key + 1 or words[at[_NUMBER]] != number + 1:
      return None
    start, size = words[at[_START]], words[at[_LENGTH]]
    first = start % CAPACITY
    if size > LARGEST or first + size > CAPACITY:
      return None
    message = self._data[first : first + size].tobytes()
    # What has been overwritten meanwhile has lost its number, or its place.
    whole = words[at[_NUMBER]] == number + 1 and start >= words[_FLOOR]
    return message if whole else None
