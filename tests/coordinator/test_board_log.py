"""The log: one writer for each position; and inboxes: in order, once."""

import pytest

from optax_dist.coordinator import board_log, embedded, engine, messages

SECRET = b"secret"
ENTRY = {"kind": "tick", "ack": False}


@pytest.fixture
def board():
  return embedded.World().connect("one").board


def test_an_entry_is_put_where_none_is(board):
  log = board_log.BoardLog(board, SECRET)
  assert log.append(0, ENTRY, b"first")
  assert not log.append(0, ENTRY, b"second")
  assert log.read(0, 0.1) == (ENTRY, b"first")
  assert log.has(0)
  assert not log.has(1)
  with pytest.raises(engine.EngineTimeout):
    log.read(1, 0.01)


def test_what_was_trimmed_is_told_from_what_is_yet_to_come(board):
  log = board_log.BoardLog(board, SECRET)
  count = 3 * board_log.BLOCK
  for position in range(count):
    log.append(position, ENTRY)
  log.trim(2 * board_log.BLOCK + 5)
  assert log.trimmed() == 2 * board_log.BLOCK
  with pytest.raises(board_log.Trimmed):
    log.read(7, 0.01)
  assert log.read(2 * board_log.BLOCK, 0.01)[0] == ENTRY
  with pytest.raises(engine.EngineTimeout):
    log.read(count, 0.01)
  log.trim(board_log.BLOCK)  # Never back again.
  assert log.trimmed() == 2 * board_log.BLOCK
  assert len(board.items("log")) == board_log.BLOCK


def test_an_inbox_keeps_the_order_and_removes_what_was_read(board):
  count = 2 * board_log.BLOCK + 3
  sender = board_log.Inbox(board, SECRET, 0, 4)
  reader = board_log.Inbox(board, SECRET, 0, 4)
  for step in range(count):
    sender.send({"kind": "ack", "applied": step}, b"payload")
  got = [reader.receive(0.1) for _ in range(count)]
  assert [header["applied"] for header, _ in got] == list(range(count))
  assert {payload for _, payload in got} == {b"payload"}
  assert len(board.items("in/0/4")) == 3
  with pytest.raises(engine.EngineTimeout):
    reader.receive(0.01)


def test_messages_of_another_term_or_replica_are_not_read(board):
  board_log.Inbox(board, SECRET, 0, 4).send(ENTRY)
  for term, incarnation in ((1, 4), (0, 5)):
    with pytest.raises(engine.EngineTimeout):
      board_log.Inbox(board, SECRET, term, incarnation).receive(0.01)


def test_a_bad_message_is_told_and_passed_over(board):
  board.put("in/0/4/0/0", b"junk")
  sender = board_log.Inbox(board, SECRET, 0, 4)
  reader = board_log.Inbox(board, SECRET, 0, 4)
  sender.send(ENTRY)
  with pytest.raises(messages.BadMessage):
    reader.receive(0.1)
  assert reader.receive(0.1)[0] == ENTRY


def test_what_a_stranger_puts_at_the_end_of_a_block_costs_no_message(board):
  # Were the block removed now, the sender would find room where nobody reads.
  sender = board_log.Inbox(board, SECRET, 0, 4)
  reader = board_log.Inbox(board, SECRET, 0, 4)
  for _ in range(board_log.BLOCK - 1):
    sender.send(ENTRY)
    reader.receive(0.1)
  board.put(f"in/0/4/0/{board_log.BLOCK - 1}", b"junk")
  with pytest.raises(messages.BadMessage):
    reader.receive(0.1)
  sender.send({"kind": "ack", "applied": 7})
  assert reader.receive(0.1)[0] == {"kind": "ack", "applied": 7}
  assert len(board.items("in/0/4")) == 1
