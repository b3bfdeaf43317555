import contextlib
import gc
import os

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from optax_dist.coordinator import buffer_pool


@pytest.fixture(params=[True, False], ids=["shared", "plain"])
def pool(request):
  pool = buffer_pool.BufferPool(shared=request.param)
  yield pool
  pool.close()


@hypothesis.given(
  steps=st.lists(
    st.tuples(st.sampled_from([1, 64, 1000, 2_000_000]), st.booleans()),
    max_size=30,
  )
)
@hypothesis.settings(max_examples=30)
def test_buffers_never_overlap_and_rest(steps):
  pool = buffer_pool.BufferPool(shared=False)
  out: list[np.ndarray] = []
  rested: dict[int, list[int]] = {}
  for nbytes, back in steps:
    mine = [b for b in out if b.size == nbytes]
    if back and mine:
      out = [b for b in out if b is not mine[0]]
      rested.setdefault(nbytes, []).append(mine[0].ctypes.data)
      pool.recycle(mine[0])
      continue
    new = pool.take(nbytes)
    assert new.size == nbytes
    assert new.ctypes.data % 64 == 0
    # Sizes 1 and 1000 have others of their size only, as here all differ.
    waiting = rested.get(nbytes, [])
    assert new.ctypes.data not in waiting[-2:]
    if new.ctypes.data in waiting:
      waiting.remove(new.ctypes.data)
    assert not any(np.shares_memory(new, other) for other in out)
    out.append(new)


def test_held_memory_is_not_handed_out(pool):
  first = pool.take(100)
  start = first.ctypes.data
  buffer, _ = pool.find(first)
  pool.hold(buffer)
  pool.recycle(first)
  for _ in range(5):
    others = [pool.take(100) for _ in range(3)]
    assert start not in [b.ctypes.data for b in others]
    for other in others:
      pool.recycle(other)
  pool.release(buffer)
  assert start in [pool.take(100).ctypes.data for _ in range(30)]


def test_views_are_found(pool):
  small, large = pool.take(1000), pool.take(3_000_000)
  for array in (small, large):
    buffer, at = pool.find(array[100:200])
    assert at == buffer.offset + 100
    assert pool.find(array[:0])[0] is buffer
    # The end of one is not the start of the next.
    assert pool.find(array[array.size :])[0] is buffer
  with pytest.raises(ValueError, match="uint8"):
    pool.find(small[::2])
  with pytest.raises(ValueError, match="uint8"):
    pool.find(small.view(np.int8))
  with pytest.raises(ValueError, match="views into a buffer"):
    pool.find(np.zeros(10, np.uint8))
  pool.recycle(small)
  with pytest.raises(ValueError, match="given back"):
    pool.find(small)
  with pytest.raises(ValueError, match="only once"):
    pool.recycle(small)
  with pytest.raises(ValueError, match="-1 bytes"):
    pool.take(-1)


def test_offers_disappear_before_memory_rests(pool):
  seen = []
  buffer, _ = pool.find(array := pool.take(10))
  buffer.on_recycle.append(lambda: seen.append(buffer.out))
  pool.recycle(array)
  assert seen == [False]


def _files():
  """Descriptors of files in memory; others come and go."""
  count = 0
  for name in os.listdir("/proc/self/fd"):
    with contextlib.suppress(FileNotFoundError):
      count += "optax-dist" in os.readlink(f"/proc/self/fd/{name}")
  return count


def test_close_frees_files_and_leaves_views():
  gc.collect()
  before = _files()
  own = buffer_pool.BufferPool(shared=True)
  view = own.take(5_000_000)
  view[:] = 7
  assert _files() > before
  own.close()
  gc.collect()
  assert int(view[-1]) == 7
  del view
  gc.collect()
  assert _files() == before


def test_memory_files_can_not_shrink():
  file = buffer_pool.memory_file("test", 4096)
  try:
    assert buffer_pool.is_sealed(file)
    with pytest.raises(OSError, match="not permitted"):
      os.ftruncate(file, 0)
  finally:
    os.close(file)
  with open(__file__) as plain:
    assert not buffer_pool.is_sealed(plain.fileno())
