import contextlib
import dataclasses
import gc
import json
import os
import threading
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from optax_dist.coordinator import buffer_pool, engine, shared_memory


@dataclasses.dataclass
class _Side:
  pool: buffer_pool.BufferPool
  table: shared_memory.OfferTable


@pytest.fixture
def side():
  pool = buffer_pool.BufferPool(shared=True)
  side = _Side(pool, shared_memory.OfferTable(pool))
  yield side
  side.table.close()
  pool.close()


@pytest.fixture
def reader():
  reader = shared_memory.Reader()
  yield reader
  reader.close()


def _given(side, ticket, nbytes, value):
  array = side.pool.take(nbytes)
  array[:] = value
  side.table.offer(ticket, array)
  return array


def test_the_reader_sees_the_memory_itself(side, reader):
  for ticket, nbytes in [(0, 1000), (2**62 - 1, 3_000_000)]:
    given = _given(side, ticket, nbytes, 5)
    fetched = reader.fetch(side.table.place, ticket, nbytes, 1.0)
    assert not fetched.array.flags.writeable
    given[7] = 6
    assert fetched.array[7] == 6
    fetched.check()


def test_what_is_recycled_is_gone_before_it_is_used_again(side, reader):
  given = _given(side, 1, 1000, 5)
  fetched = reader.fetch(side.table.place, 1, 1000, 1.0)
  side.pool.recycle(given)
  with pytest.raises(engine.OfferGone, match="under 1"):
    fetched.check()
  assert (fetched.array == 5).all()
  with pytest.raises(engine.EngineTimeout):
    reader.fetch(side.table.place, 1, 1000, 0.0)
  # Also when row and memory are those of another offer now.
  others = [_given(side, 2 + i, 1000, 9) for i in range(8)]
  with pytest.raises(engine.OfferGone):
    fetched.check()
  for other in others:
    side.pool.recycle(other)
  assert side.table.count() == 0


def test_a_reader_never_takes_one_offer_for_another(side, reader):
  """While the same few buffers are offered, recycled and filled anew."""
  done = threading.Event()
  newest = [0]

  def offers():
    given = [_given(side, 0, 4096, 0)]
    for ticket in range(1, 3000):
      newest[0] = ticket
      given.append(_given(side, ticket, 4096, ticket % 251))
      if len(given) > 2:
        side.pool.recycle(given.pop(0))
    done.set()

  thread = threading.Thread(target=offers)
  thread.start()
  good = 0
  while not (done.is_set() and good):
    ticket = newest[0]
    with contextlib.suppress(engine.OfferGone, engine.EngineTimeout):
      fetched = reader.fetch(side.table.place, ticket, 4096, 0.001)
      values = np.unique(fetched.array)
      fetched.check()
      assert values.tolist() == [ticket % 251]
      good += 1
  thread.join()


def test_half_written_and_impossible_rows_are_not_believed(side, reader):
  given = _given(side, 1, 1000, 5)
  row = side.table._rows[:, 0]
  right = row.copy()
  row[shared_memory._OFFSET] += 64
  with pytest.raises(engine.EngineTimeout):
    reader.fetch(side.table.place, 1, 1000, 0.01)
  # A row that was made to look whole.
  size = os.fstat(int(right[shared_memory._FILE])).st_size
  plain = os.open(__file__, os.O_RDONLY)
  for offset, file, why in [
    (size, right[shared_memory._FILE], "beyond its memory"),
    (0, 2**20, "can't be opened"),
    (0, plain, "not sealed"),
  ]:
    row[1:3] = file, offset
    row[shared_memory._MIX] = shared_memory._mix(2, int(file), offset, 1000)
    with pytest.raises(engine.PeerLost, match=why):
      reader.fetch(side.table.place, 1, 1000, 1.0)
  os.close(plain)
  row[:] = right
  with pytest.raises(engine.PeerLost, match="offers 1000 bytes"):
    reader.fetch(side.table.place, 1, 999, 1.0)
  assert (reader.fetch(side.table.place, 1, 1000, 1.0).array == given).all()


def test_a_peer_that_closed_or_is_another_is_lost(side, reader):
  place = side.table.place
  strange = dataclasses.replace(place, nonce=place.nonce ^ 1)
  with pytest.raises(engine.PeerLost, match="not the one"):
    reader.fetch(strange, 1, 10, 1.0)
  errors = []

  def waits():
    with pytest.raises(engine.PeerLost) as error:
      reader.fetch(place, 1, 10, 10.0)
    errors.append(str(error.value))

  thread = threading.Thread(target=waits)
  thread.start()
  time.sleep(0.05)
  side.table.close()
  thread.join(5.0)
  assert errors == [f"Process {os.getpid()} is lost: it closed its exchange."]


def test_the_table_has_an_end(side):
  side.table._free.clear()
  with pytest.raises(RuntimeError, match="More than 4096 offers"):
    side.table.offer(1, side.pool.take(10))


def _files():
  """Descriptors of files in memory; others come and go."""
  count = 0
  for name in os.listdir("/proc/self/fd"):
    with contextlib.suppress(FileNotFoundError):
      link = os.readlink(f"/proc/self/fd/{name}")
      count += "optax-dist" in link or "pidfd" in link
  return count


def test_nothing_is_mapped_or_open_after_close():
  gc.collect()
  pool = buffer_pool.BufferPool(shared=True)
  reader = shared_memory.Reader()
  before = _files()
  table = shared_memory.OfferTable(pool)
  place = table.place
  array = pool.take(2_000_000)
  table.offer(1, array)
  reader.fetch(place, 1, array.size, 1.0)
  for end in (reader.close, table.close, table.close, pool.close):
    end()
  del array, table
  gc.collect()
  assert _files() == before
  with pytest.raises(engine.PeerLost, match="closed"):
    reader.fetch(place, 1, 10, 1.0)
  with open("/proc/self/maps") as maps:
    assert "optax-dist-offers" not in maps.read()


@hypothesis.given(
  st.one_of(
    st.text(),
    st.recursive(
      st.none() | st.booleans() | st.integers() | st.text(),
      lambda inner: st.lists(inner, max_size=6),
    ).map(json.dumps),
  )
)
def test_places_of_strangers(text):
  try:
    place = shared_memory.Place.load(text)
  except ValueError:
    return
  assert shared_memory.Place.load(place.dump()) == place
