"""The next entry of the log: by the line, by a note, or from the board."""

import queue
import threading
import time

import near_engines
import pytest

from optax_dist.coordinator import (
  board_log,
  engine,
  local_line,
  log_reader,
  message_ring,
  messages,
)

SECRET = b"secret"

pytestmark = near_engines.needs_notes


def _tick(number):
  return {"kind": "save_at", "step": number}


class _Both:
  """A chief's log and a follower's reader.

  Attributes:
    log: where the chief writes.
    reader: of another process of the host.
    prepared: what it was foretold.
  """

  def __init__(self, near):
    self.near = near
    self.address = near.one.exchange.address
    self.log = board_log.BoardLog(near.one.board, SECRET, notes=near.one.notes)
    self.line = local_line.LocalLine()
    self.prepared = []
    self.reader = log_reader.LogReader(
      board_log.BoardLog(near.two.board, SECRET),
      self.line,
      near.two.notes,
      self.prepared.append,
    )

  def read(self, position, timeout=5.0):
    return self.reader.read(position, self.address, timeout)

  def calls(self):
    return [name for name, _ in self.near.two.board.calls]


@pytest.fixture
def both():
  with near_engines.near() as near:
    yield _Both(near)


def test_who_is_up_to_date_does_not_ask_the_board(both):
  got = []
  for number in range(200):
    thread = threading.Thread(target=lambda n=number: got.append(both.read(n)))
    thread.start()
    if number % 50 == 0:
      time.sleep(0.01)
    both.log.append(number, _tick(number), b"%d" % number)
    thread.join(5.0)
  assert got == [(_tick(n), b"%d" % n) for n in range(200)]
  # Once, to see that there is nothing yet.
  assert both.calls() in ([], ["try_get"])


def test_who_has_fallen_behind_waits_for_nothing(both):
  count = 3 * message_ring.SLOTS
  for number in range(count):
    both.log.append(number, _tick(number))
  began = time.monotonic()
  for number in range(count):
    assert both.read(number, timeout=10.0)[0] == _tick(number)
  assert time.monotonic() - began < 10.0
  # The last ones stand in notes.
  read = both.calls().count("try_get")
  assert read < count - message_ring.SLOTS // 2
  # For each of these it looks where the log begins.
  assert len(both.calls()) <= 2 * read


def test_what_was_overwritten_while_it_looked_away_is_found(both):
  both.log.append(0, _tick(0))
  assert both.read(0)[0] == _tick(0)
  for number in range(1, 2 * message_ring.SLOTS):
    both.log.append(number, _tick(number))
  for number in range(1, 2 * message_ring.SLOTS):
    # Of these, the first one waits until the deadline.
    assert both.read(number, timeout=0.05)[0] == _tick(number)


def test_an_entry_too_large_for_a_note_is_read_from_the_board(both):
  payload = b"x" * (message_ring.LARGEST + 1)
  for number in range(4):
    thread_got = []
    thread = threading.Thread(
      target=lambda n=number, g=thread_got: g.append(both.read(n, 60.0))
    )
    thread.start()
    both.log.append(number, _tick(number), payload, foretell=True)
    thread.join(20.0)
    assert thread_got == [(_tick(number), payload)]


def test_a_note_that_no_member_wrote_is_passed_over(both, caplog):
  ticket = both.log.ticket(0)
  both.near.one.notes.leave(ticket, b"garbage")
  with pytest.raises(engine.EngineTimeout):
    both.read(0, timeout=0.05)
  assert "a note of entry 0 is ignored" in caplog.text
  both.log.append(0, _tick(0))
  assert both.read(0)[0] == _tick(0)
  # Another entry's is none of this one.
  blob = messages.pack(SECRET, "log/0/0", _tick(0))
  both.near.one.notes.leave(both.log.ticket(1), blob)
  with pytest.raises(engine.EngineTimeout):
    both.read(1, timeout=0.05)


def test_garbage_on_the_board_is_told_of(both):
  both.near.one.board.put("log/0/0", b"garbage")
  with pytest.raises(messages.BadMessage):
    both.read(0, timeout=0.05)


def test_what_is_foretold_is_prepared_and_no_more(both):
  both.log.append(0, _tick(0), b"mean", foretell=True)
  assert both.read(0) == (_tick(0), b"mean")
  assert both.prepared in ([], [(_tick(0), b"mean")])
  both.prepared.clear()
  # Another chief is quicker: what was foretold never comes to stand there.
  both.near.two.board.put(
    "log/0/1", messages.pack(SECRET, "log/0/1", _tick(77))
  )
  assert not both.log.append(1, _tick(1), b"mean", foretell=True)
  assert both.read(1, timeout=0.05) == (_tick(77), b"")
  assert both.prepared == [(_tick(1), b"mean")]


def test_it_is_foretold_before_it_stands(both):
  key = both.log.foretelling(0)
  blob = messages.pack(SECRET, "log/0/0", _tick(0), b"mean")
  got = []
  thread = threading.Thread(target=lambda: got.append(both.read(0, 20.0)))
  thread.start()
  both.near.one.notes.leave(key, blob)
  end = time.monotonic() + 5.0
  while not both.prepared and time.monotonic() < end:
    time.sleep(0.01)
  assert both.prepared == [(_tick(0), b"mean")]
  assert not got
  both.log.append(0, _tick(0), b"mean", foretell=True)
  thread.join(5.0)
  assert got == [(_tick(0), b"mean")]
  assert len(both.prepared) == 1


def test_a_chief_that_has_ended_leaves_the_board(both):
  both.log.append(0, _tick(0))
  both.near.one.exchange.close()
  both.near.one.board.put("log/0/1", messages.pack(SECRET, "log/0/1", _tick(1)))
  # Its table was not opened while it lived.
  assert [both.read(n)[0] for n in (0, 1)] == [_tick(0), _tick(1)]
  with pytest.raises(engine.EngineTimeout):
    both.read(2, timeout=0.05)


def test_a_wait_is_given_up_when_it_is_in_vain(both):
  began = time.monotonic()
  with pytest.raises(engine.EngineTimeout):
    both.reader.read(0, both.address, 30.0, lambda: True)
  assert time.monotonic() - began < 10.0


def test_a_chief_of_this_process_comes_first(both):
  both.line.open(0, queue.SimpleQueue())
  both.line.deliver(0, _tick(5), b"")
  assert both.read(0)[0] == _tick(5)
  both.log.append(1, _tick(6))
  with pytest.raises(engine.EngineTimeout):
    both.read(2, timeout=0.01)
  assert both.read(1, timeout=0.01)[0] == _tick(6)
