"""Buffers that others read where they lie."""

import os
import resource

import descriptors
import numpy as np
import pytest

from optax_dist.coordinator.transport import shared_memory

pytestmark = pytest.mark.skipif(
  not hasattr(os, "memfd_create"), reason="this system shares no memory so"
)


def _map(region, **others):
  offered = {
    "process": os.getpid(),
    "file": region.file,
    "nbytes": region.array.size,
    "inode": region.inode,
  }
  return shared_memory.map_buffer(**offered | others)


def _files():
  """Descriptors of buffers, those that earlier tests have left over included."""
  return descriptors.of_files("memfd:")


def test_peers_map_memory_read_only():
  pool = shared_memory.Pool()
  memory = pool.allocate(100_000)
  region = pool.find(memory)
  seen = _map(region)
  memory[:5] = b"hello"
  assert bytes(seen[:5]) == b"hello"
  assert not seen.flags.writeable
  with pytest.raises(ValueError, match="read-only"):
    seen[0] = 1
  pool.close()
  assert bytes(seen[:5]) == b"hello"


@pytest.mark.parametrize(
  "view",
  [
    lambda memory: memory[3:],
    lambda memory: np.frombuffer(memory, np.uint8)[3:].view(np.int8)[:5],
    lambda memory: np.frombuffer(memory[3:], np.uint8).data[:5],
  ],
)
def test_buffer_is_reused_once_there_is_no_view_of_it(view):
  files = _files()
  pool = shared_memory.Pool()
  one = pool.allocate(100_000)
  one[:3] = b"abc"
  region = pool.find(one)
  one = view(one)
  other = pool.allocate(99_000)
  assert pool.find(other) is not region
  del one
  two = pool.allocate(99_000)
  assert bytes(two[:3]) == b"abc"
  assert pool.find(two[500:]) is region
  assert pool.find(memoryview(bytearray(10))) is None
  pool.close()
  del region, other, two
  assert not _files() - files


def test_memory_is_private_when_descriptors_run_out(monkeypatch):
  make, limits = os.memfd_create, resource.getrlimit(resource.RLIMIT_NOFILE)

  def make_the_last(*arguments):
    file = make(*arguments)  # The lowest number that is free.
    resource.setrlimit(resource.RLIMIT_NOFILE, (file, limits[1]))
    return file

  files = _files()
  pool = shared_memory.Pool()
  monkeypatch.setattr(os, "memfd_create", make_the_last)
  try:
    memory = pool.allocate(100_000)
    again = pool.allocate(200_000)
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
  for some in (memory, again):
    assert pool.find(some).file == -1
    some[:5] = b"hello"
  pool.close()
  assert not _files() - files


def test_memory_that_could_shrink_is_not_mapped():
  pool = shared_memory.Pool()
  region = pool.find(pool.allocate(shared_memory.LEAST))
  file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
  os.ftruncate(file, region.array.size)  # Large enough, and without a seal.
  with pytest.raises(OSError, match="shrink"):
    _map(region, file=file, inode=os.fstat(file).st_ino)
  os.close(file)
  with pytest.raises(OSError, match="shrink"):
    _map(region, nbytes=region.array.size + 1)
  with pytest.raises(OSError, match="another file"):
    _map(region, inode=0)
  with pytest.raises(OSError, match="Operation not permitted"):
    os.ftruncate(region.file, 0)
  pool.close()


def test_pipe_is_not_mapped(tmp_path):
  pool = shared_memory.Pool()
  region = pool.find(pool.allocate(shared_memory.LEAST))
  os.mkfifo(tmp_path / "pipe")
  file = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
  with pytest.raises(OSError, match="Invalid argument"):
    _map(region, file=file, inode=os.fstat(file).st_ino)
  os.close(file)
  with pytest.raises(OSError, match="No such file"):
    _map(region, file=file)
  with pytest.raises(OSError, match="No such file"):
    _map(region, process=0)
  pool.close()
