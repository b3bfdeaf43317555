"""The short way between a chief and the replica of its own process."""

import queue
import threading
import time

import pytest

from optax_dist.coordinator import local_line

ENTRY = {"kind": "tick", "ack": False}


@pytest.fixture
def line():
  made = local_line.LocalLine()
  made.open(3, queue.Queue())
  return made


def test_each_entry_is_read_once_and_by_its_position(line):
  line.deliver(8, {"kind": "save_at", "step": 2}, b"")
  line.deliver(7, ENTRY, b"payload")
  assert line.read(7, 0.0) == (ENTRY, b"payload")
  assert line.read(7, 0.0) is None
  assert line.read(8, 0.0) == ({"kind": "save_at", "step": 2}, b"")


def test_a_reader_is_woken_by_what_it_waits_for(line):
  got = []
  reader = threading.Thread(target=lambda: got.append(line.read(5, 10.0)))
  reader.start()
  line.deliver(4, ENTRY, b"another")
  line.deliver(5, ENTRY, b"this")
  reader.join(5.0)
  assert got == [(ENTRY, b"this")]


def test_a_wait_ends_at_its_deadline(line):
  began = time.monotonic()
  assert line.read(5, 0.05) is None
  assert 0.04 <= time.monotonic() - began < 2.0


def test_the_end_of_the_chief_ends_the_wait(line):
  got = []
  reader = threading.Thread(target=lambda: got.append(line.read(5, 10.0)))
  reader.start()
  line.shut(3)
  reader.join(5.0)
  assert got == [None]
  assert not line.is_open
  assert not line.send(3, 0, ENTRY, b"")


def test_what_was_delivered_before_the_end_can_still_be_read(line):
  line.deliver(5, ENTRY, b"last")
  line.shut(3)
  assert line.read(5, 0.0) == (ENTRY, b"last")


def test_without_a_chief_nobody_waits():
  line = local_line.LocalLine()
  began = time.monotonic()
  assert line.read(0, 10.0) is None
  assert time.monotonic() - began < 5.0


def test_mail_is_for_the_chief_of_its_term_alone():
  line, mail = local_line.LocalLine(), queue.Queue()
  assert not line.send(3, 0, ENTRY, b"")
  line.open(3, mail)
  assert not line.send(2, 0, ENTRY, b"")
  for number in range(3):
    assert line.send(3, number, ENTRY, b"payload")
  assert [mail.get_nowait()[0] for _ in range(3)] == [0, 1, 2]
  assert mail.empty()


def test_a_deposed_chief_does_not_shut_out_the_next_one(line):
  mail = queue.Queue()
  line.open(4, mail)
  line.shut(3)
  assert line.is_open
  assert line.send(4, 0, ENTRY, b"")
  assert mail.get_nowait() == (0, ENTRY, b"")


def test_the_next_chief_begins_without_the_entries_of_the_last(line):
  line.deliver(5, ENTRY, b"of term 3")
  line.open(4, queue.Queue())
  assert line.read(5, 0.0) is None


def test_what_nobody_reads_does_not_pile_up(line):
  for position in range(1000):
    line.deliver(position, ENTRY, b"")
  kept = [p for p in range(1000) if line.read(p, 0.0) is not None]
  assert kept == list(range(1000 - local_line._KEPT, 1000))


def test_an_entry_stays_as_it_was_when_it_was_delivered(line):
  entry = {"kind": "commit", "step": 1}
  line.deliver(5, entry, b"")
  entry["step"] = 2
  assert line.read(5, 0.0) == ({"kind": "commit", "step": 1}, b"")


def test_an_entry_that_was_passed_is_not_waited_for(line):
  for position in range(2 * local_line._KEPT):
    line.deliver(position, ENTRY, b"")
  began = time.monotonic()
  assert line.read(3, 10.0) is None
  assert time.monotonic() - began < 5.0
