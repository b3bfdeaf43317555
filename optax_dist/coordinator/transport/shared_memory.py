"""Memory of one process that other processes on its host read in place.

Each buffer is a file in memory. A peer opens its descriptor in /proc, which only
processes of the same user can, and maps it read-only. A killed process leaves
nothing behind.

A buffer need not be returned: it is reused once no view of it is left in this process,
and no peer reads it. So mapped bytes don't change while a peer reads them, even if the
connection was lost or this process has ended.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  import numpy as np

LEAST = 64 << 10  # Smaller arrays are sent even if memory is shared.
_FREE_BUFFERS_KEPT = 8  # Free buffers kept for reuse.
# From fcntl.h; Python 3.11 does not define them on every system.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4


class Region:
  """A buffer that can be lent.

  Attributes:
    file: its descriptor; -1 if memory can't be shared.
    inode: its file's inode; 0 if it can't be shared.
    array: its bytes.
    readers: how many peers read it.
    retired: whether a peer was lost that may still read it: it is not used again.
  """

  def __init__(self, nbytes: int, shared: bool):
    self.file = _memory_file(nbytes) if shared else -1
    try:
      mapped = mmap.mmap(self.file, nbytes)
    except OSError:
      if self.file < 0:
        raise
      # A mapping of a file takes another descriptor, and the process may be out of
      # them: then memory without a file is used.
      self.close()
      mapped = mmap.mmap(-1, nbytes)
    # Without a file (-1) the memory is not shared.
    self.array = bytes_of(mapped)
    self.inode = os.fstat(self.file).st_ino if self.file >= 0 else 0
    self.start = _address(self.array)
    self.readers, self.retired = 0, False
    # The last array that `use` returned; alive while there are views of it.
    self._user: weakref.ref[np.ndarray] | None = None

  def use(self, nbytes: int) -> memoryview:
    """The buffer's first bytes; it is in use as long as there are views of them."""
    # Views of an array on top of a memoryview keep this array, and not only the
    # memory below it.
    array = bytes_of(self.array.data[:nbytes])
    self._user = weakref.ref(array)
    return array.data

  @property
  def is_idle(self) -> bool:
    """Whether neither this process nor a peer uses the buffer."""
    return not self.readers and (self._user is None or self._user() is None)

  def close(self) -> None:
    """Stops sharing it; existing views stay valid."""
    if self.file >= 0:
      os.close(self.file)
      self.file = -1


class Pool:
  """The buffers of a process; any thread may allocate them."""

  def __init__(self) -> None:
    self._regions: list[Region] = []
    self._lock = threading.Lock()
    self._closed = False

  def allocate(self, nbytes: int) -> memoryview:
    """See `Transport.allocate`."""
    with self._lock:
      fitting = [
        r
        for r in self._regions
        if r.is_idle
        and not r.retired
        and nbytes <= r.array.size <= 2 * nbytes + 65536
      ]
      if fitting:
        region = min(fitting, key=lambda r: r.array.size)
      else:
        whole = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        # Memory that is never lent needs no descriptor.
        region = Region(whole, nbytes >= LEAST and not self._closed)
        self._regions.append(region)
      memory = region.use(nbytes)
      self._trim()
      return memory

  def find(self, memory: memoryview) -> Region | None:
    """The buffer that contains these bytes."""
    start = _address(bytes_of(memory)) if memory.nbytes else 0
    for region in list(self._regions):
      if 0 <= start - region.start < region.array.size:
        return region
    return None

  def returned(self, region: Region) -> None:
    """Called when a reader has finished with it, or is lost."""
    with self._lock:
      region.readers -= 1
      self._trim()

  def _trim(self) -> None:
    idle = [r for r in self._regions if r.is_idle]
    kept = [r for r in idle if not r.retired][-_FREE_BUFFERS_KEPT:]
    for region in idle:
      if region not in kept:
        self._regions.remove(region)
        region.close()

  def close(self) -> None:
    """Stops sharing all buffers."""
    # Without the lock: in a forked child, another thread may have held it.
    self._closed = True
    for region in list(self._regions):
      region.close()
    self._regions.clear()


def map_buffer(process: int, file: int, nbytes: int, inode: int) -> np.ndarray:
  """Maps a peer's buffer read-only.

  Args:
    process: the peer's process.
    file: the descriptor of the buffer there.
    nbytes: its size.
    inode: its file's inode.

  Raises:
    OSError: it can't be mapped, is another file, or could shrink while it is
      read, which would kill the reader's process.
  """
  # A faulty peer may name any file, so the open must not block.
  how = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
  descriptor = os.open(f"/proc/{process}/fd/{file}", how)
  try:
    if os.fstat(descriptor).st_ino != inode:
      raise OSError("the descriptor is of another file")
    seals = fcntl.fcntl(descriptor, _GET_SEALS)
    if not seals & _SEAL_SHRINK or os.fstat(descriptor).st_size < nbytes:
      raise OSError("the peer's memory could shrink")
    whole = mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ)
    return bytes_of(whole)
  finally:
    os.close(descriptor)


def address_within(memory: memoryview, region: Region) -> int:
  """The offset of these bytes in a buffer."""
  return _address(bytes_of(memory)) - region.start


def bytes_of(memory: memoryview | mmap.mmap) -> np.ndarray:
  """An array of a memory's bytes."""
  # Imported here, as a coordinator's process has no arrays, and has to start quickly.
  import numpy as np

  return np.frombuffer(memory, np.uint8)


def empty(nbytes: int) -> memoryview:
  """Memory of this process alone, of any content."""
  import numpy as np

  return np.empty(nbytes, np.uint8).data


def _address(array: np.ndarray) -> int:
  return int(array.__array_interface__["data"][0])


def _memory_file(nbytes: int) -> int:
  if not hasattr(os, "memfd_create"):
    return -1
  try:
    file = os.memfd_create("optax-dist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
  except OSError:
    return -1
  try:
    os.ftruncate(file, nbytes)
    fcntl.fcntl(file, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
  except OSError:
    os.close(file)
    return -1
  return file
