"""Memory that peers can read, used again and again.

Fresh pages cost as much as a copy, so buffers are kept for their size. They lie
in regions, each a file in memory that a process of the same user can open
through ``/proc``; where there is no such thing, in plain memory.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import mmap
import os
import threading
from collections.abc import Callable

import numpy as np

_ALIGNMENT = 64

# Buffers above this have a region to themselves.
LARGE = 1 << 20

# Small buffers share one of this size; pages that nobody touches cost nothing.
_SHARED = 64 << 20

# A buffer rests until so many others of its size have been given back: who
# still reads it can notice that it is gone, and finish.
_REST = 2

_NO_FILE = -1


@dataclasses.dataclass
class Buffer:
  """A piece of a region.

  Attributes:
    start: its address in this process.
    capacity: its bytes; one more at least than what was asked for, so that
      its end is no other buffer's start.
    file: descriptor of its region, -1 in plain memory.
    offset: where it starts in the region.
    size: of the region.
    holds: who still needs its bytes after it is given back.
    out: whether it is handed out.
    on_recycle: what is to be done when it is given back.
  """

  start: int
  capacity: int
  file: int
  offset: int
  size: int
  memory: np.ndarray = dataclasses.field(repr=False)
  holds: int = 0
  out: bool = True
  on_recycle: list[Callable[[], None]] = dataclasses.field(default_factory=list)


class BufferPool:
  """Hands out buffers, and takes them back."""

  def __init__(self, *, shared: bool):
    """Makes an empty pool.

    Args:
      shared: whether other processes can open the regions.
    """
    self._shared = shared
    self._lock = threading.Lock()
    self._files: list[int] = []
    self._starts: list[int] = []  # Of all buffers, ascending.
    self._buffers: dict[int, Buffer] = {}  # By start.
    self._resting: dict[int, collections.deque[Buffer]] = {}  # By capacity.
    self._region: np.ndarray | None = None  # Of small buffers.
    self._region_file = _NO_FILE
    self._region_used = 0

  def take(self, nbytes: int) -> np.ndarray:
    """A buffer: uint8, aligned, not cleared."""
    if nbytes < 0:
      raise ValueError(f"A buffer can't have {nbytes} bytes.")
    capacity = (nbytes // _ALIGNMENT + 1) * _ALIGNMENT
    with self._lock:
      buffer = self._rested(capacity) or self._made(capacity)
      buffer.out = True
      return buffer.memory[:nbytes]

  def find(self, array: np.ndarray) -> tuple[Buffer, int]:
    """The buffer that the array is a view into, and where in its region."""
    if array.dtype != np.uint8 or array.ndim != 1 or not _dense(array):
      raise ValueError(
        "Only one-dimensional, contiguous uint8 arrays can be offered; got"
        f" {array.dtype} of shape {array.shape}."
      )
    start = _address(array)
    with self._lock:
      at = bisect.bisect_right(self._starts, start) - 1
      buffer = self._buffers[self._starts[at]] if at >= 0 else None
    if (
      buffer is None
      or not buffer.out
      or start + array.size > buffer.start + buffer.capacity
    ):
      raise ValueError(
        "Only views into a buffer of `buffer` that has not been given back"
        " can be offered."
      )
    return buffer, buffer.offset + start - buffer.start

  def hold(self, buffer: Buffer) -> None:
    """Keeps the buffer's bytes as they are until `release`."""
    with self._lock:
      buffer.holds += 1

  def release(self, buffer: Buffer) -> None:
    """Undoes one `hold`."""
    with self._lock:
      buffer.holds -= 1

  def recycle(self, array: np.ndarray) -> None:
    """Takes a buffer back."""
    start = _address(array)
    with self._lock:
      buffer = self._buffers.get(start)
      if buffer is None or not buffer.out:
        raise ValueError(
          "What is recycled must come from `buffer`, and only once."
        )
      buffer.out = False
      actions, buffer.on_recycle = buffer.on_recycle, []
    # Its offers disappear before it can be handed out again.
    for action in actions:
      action()
    with self._lock:
      self._resting.setdefault(buffer.capacity, collections.deque()).append(
        buffer
      )

  def close(self) -> None:
    """Makes the regions unreachable; memory goes with the last view."""
    with self._lock:
      files, self._files = self._files, []
      self._starts.clear()
      self._buffers.clear()
      self._resting.clear()
      self._region = None
    for file in files:
      with contextlib.suppress(OSError):
        os.close(file)

  def _rested(self, capacity: int) -> Buffer | None:
    resting = self._resting.get(capacity)
    if resting is None:
      return None
    for i in range(len(resting) - _REST):
      if not resting[i].holds:
        buffer = resting[i]
        del resting[i]
        return buffer
    return None

  def _made(self, capacity: int) -> Buffer:
    if capacity > LARGE:
      file, region = self._new_region(capacity, populate=True)
      offset = 0
    else:
      if self._region is None or self._region_used + capacity > _SHARED:
        self._region_file, self._region = self._new_region(
          _SHARED, populate=False
        )
        self._region_used = 0
      file, region = self._region_file, self._region
      offset = self._region_used
      self._region_used += capacity
    memory = region[offset : offset + capacity]
    start = _address(memory)
    buffer = Buffer(start, capacity, file, offset, region.size, memory)
    bisect.insort(self._starts, start)
    self._buffers[start] = buffer
    return buffer

  def _new_region(self, size: int, *, populate: bool) -> tuple[int, np.ndarray]:
    flags = getattr(mmap, "MAP_POPULATE", 0) if populate else 0
    if not self._shared:
      memory = mmap.mmap(-1, size)
      return _NO_FILE, np.frombuffer(memory, np.uint8)
    file = memory_file("optax-dist", size)
    self._files.append(file)
    memory = mmap.mmap(file, size, flags=mmap.MAP_SHARED | flags)
    return file, np.frombuffer(memory, np.uint8)


def memory_file(name: str, size: int) -> int:
  """A file in memory, of a size that nobody can change any more."""
  import fcntl

  file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
  os.ftruncate(file, size)
  # Who maps a file that then shrinks is killed when it reads.
  fcntl.fcntl(file, _F_ADD_SEALS, _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW)
  return file


def is_sealed(file: int) -> bool:
  """Whether it is a file in memory that can't shrink."""
  import fcntl

  try:
    return bool(fcntl.fcntl(file, _F_GET_SEALS) & _F_SEAL_SHRINK)
  except OSError:
    return False


# Of Linux's <fcntl.h>; Python names them from 3.13 on.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4


def _address(array: np.ndarray) -> int:
  return array.__array_interface__["data"][0]


def _dense(array: np.ndarray) -> bool:
  return array.flags.c_contiguous
