"""The latest messages of a process: whole ones, by their keys."""

import threading

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from optax_dist.coordinator import message_ring

SIZE, SLOTS = message_ring.SIZE, message_ring.SLOTS
LARGEST, CAPACITY = message_ring.LARGEST, message_ring.CAPACITY


def _ring():
  memory = np.zeros(SIZE, np.uint8)
  return (
    memory,
    message_ring.RingWriter(memory),
    message_ring.RingReader(memory),
  )


def test_the_latest_under_a_key_is_found():
  _, writer, reader = _ring()
  assert reader.find(0) is None
  for key in (0, 2**62 - 1):
    writer.put(key, b"old")
    writer.put(key, b"")
    assert reader.find(key) == b""
    writer.put(key, b"new")
  assert reader.find(0) == reader.find(2**62 - 1) == b"new"
  assert writer.count.value == reader.count.value == 6


def test_others_take_its_place():
  _, writer, reader = _ring()
  writer.put(1, b"one")
  for i in range(SLOTS - 1):
    writer.put(100 + i, b"")
    assert reader.find(1) == b"one"
  writer.put(99, b"")
  assert reader.find(1) is None
  writer.put(1, b"again")
  assert reader.find(1) == b"again"


def test_large_messages_take_the_place_of_many():
  _, writer, reader = _ring()
  writer.put(1, b"one")
  for i in range(CAPACITY // LARGEST - 1):
    writer.put(2 + i, b"x" * LARGEST)
    assert reader.find(1) == b"one"
  writer.put(50, b"y" * LARGEST)
  assert reader.find(1) is None
  assert reader.find(50) == b"y" * LARGEST
  with pytest.raises(ValueError, match=f"at most {LARGEST} bytes"):
    writer.put(3, b"z" * (LARGEST + 1))


@hypothesis.given(
  st.lists(
    st.tuples(
      st.integers(0, 40), st.sampled_from([0, 1, 300, 70_000, LARGEST])
    ),
    max_size=120,
  )
)
@hypothesis.settings(max_examples=40)
def test_what_is_recent_is_there_and_nothing_is_mixed_up(puts):
  _, writer, reader = _ring()
  latest = {}
  for number, (key, size) in enumerate(puts):
    message = (b"%d/%d " % (key, number)).ljust(size, b"-")[:LARGEST]
    writer.put(key, message)
    latest[key] = number, message
  for key in range(41):
    found = reader.find(key)
    if key not in latest:
      assert found is None
      continue
    number, message = latest[key]
    assert found in (None, message)
    # Half of the memory at least is in use.
    since = sum(len(latest[k][1]) for k, _ in puts[number:])
    if since <= CAPACITY // 4 and len(puts) - number <= SLOTS:
      assert found == message


def test_a_reader_beside_a_writer_is_given_whole_messages_only():
  memory, writer, _ = _ring()
  over = threading.Event()

  def write():
    number = 0
    while not over.is_set():
      number += 1
      writer.put(number % 7, bytes([number % 251]) * (number % 9_000))

  thread = threading.Thread(target=write)
  thread.start()
  reader = message_ring.RingReader(memory)
  seen = 0
  try:
    for number in range(20_000):
      found = reader.find(number % 7)
      if found:
        assert found == found[:1] * len(found)
        seen += 1
  finally:
    over.set()
    thread.join()
  assert seen > 100


@hypothesis.given(st.randoms(use_true_random=False), st.integers(0, 3))
@hypothesis.settings(max_examples=60)
def test_any_bytes_are_no_more_than_a_message_or_none(random, key):
  memory, writer, reader = _ring()
  for number in range(20):
    writer.put(number % 4, b"x" * random.randrange(1000))
  words = memory[: SIZE - CAPACITY].view(np.uint64)
  for _ in range(200):
    words[random.randrange(words.size)] = random.getrandbits(
      random.choice([3, 16, 64])
    )
  found = reader.find(key)
  assert found is None or len(found) <= LARGEST


def test_a_ring_needs_its_memory():
  with pytest.raises(ValueError, match=f"needs {SIZE} bytes; got uint8 of 7"):
    message_ring.RingReader(np.zeros(7, np.uint8))
