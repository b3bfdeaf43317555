"""Messages to a chief of the same host: in order, once, and none is lost."""

import logging
import threading

import near_engines
import pytest

from optax_dist.coordinator import (
  engine,
  message_ring,
  messages,
  near_inbox,
)

SECRET = b"secret"

pytestmark = near_engines.needs_notes


@pytest.fixture
def near():
  with near_engines.near() as near:
    yield near


def _ends(near):
  """The sender's end and the reader's."""
  return (
    near_inbox.NearInbox(near.one, SECRET, 3, 7, near.two.exchange.address),
    near_inbox.NearInbox(near.two, SECRET, 3, 7, near.one.exchange.address),
  )


def _ack(number):
  return {"kind": "ack", "applied": number}


def test_messages_come_in_order_and_past_the_board(near):
  sender, reader = _ends(near)
  with pytest.raises(engine.EngineTimeout, match="near/3/7/0"):
    reader.receive(0.01)
  near.two.board.calls.clear()
  for number in range(1_000):
    sender.send(_ack(number), b"payload %d" % number)
    assert reader.receive(5.0) == (_ack(number), b"payload %d" % number)
  assert not near.one.board.calls + near.two.board.calls


def test_a_reader_is_woken(near):
  sender, reader = _ends(near)
  got = []
  thread = threading.Thread(target=lambda: got.append(reader.receive(20.0)))
  thread.start()
  sender.send(_ack(5))
  thread.join(10.0)
  assert got == [(_ack(5), b"")]


@pytest.mark.parametrize(
  ("count", "nbytes"), [(3 * message_ring.SLOTS, 10), (60, 100_000)]
)
def test_what_a_reader_that_stood_still_has_not_had_waits_for_it(
  near, count, nbytes
):
  sender, reader = _ends(near)
  for number in range(count):
    sender.send(_ack(number), bytes([number % 256]) * nbytes)
  assert near.one.board.calls
  for number in range(count):
    payload = bytes([number % 256]) * nbytes
    assert reader.receive(0.05) == (_ack(number), payload)
  # What was read is removed, and the short way is taken again.
  assert not near.one.board.items("near")
  near.one.board.calls.clear()
  for number in range(300):
    sender.send(_ack(number))
    assert reader.receive(5.0) == (_ack(number), b"")
  assert not [c for c in near.one.board.calls if c[0] == "put"]


def test_what_is_too_large_for_a_note_comes_in_its_turn(near):
  sender, reader = _ends(near)
  large = b"x" * (message_ring.LARGEST + 1)
  sent = [b"", large, b"small", large, large, b""]
  for number, payload in enumerate(sent):
    sender.send(_ack(number), payload)
  for number, payload in enumerate(sent):
    assert reader.receive(5.0) == (_ack(number), payload)
  assert not near.one.board.items("near")


def test_what_no_member_wrote_is_told_once_and_waited_past(near):
  sender, reader = _ends(near)
  sender.send(_ack(0))
  reader.receive(5.0)
  ticket = messages.ticket(SECRET, "note", "near/3/7/1")
  near.one.notes.leave(ticket, b"garbage")
  with pytest.raises(messages.BadMessage):
    reader.receive(1.0)
  with pytest.raises(engine.EngineTimeout):
    reader.receive(1.0)
  # A message of another place is none of this one.
  other = messages.pack(SECRET, "near/3/7/0", _ack(9))
  near.one.notes.leave(ticket, other)
  with pytest.raises(messages.BadMessage):
    reader.receive(1.0)
  sender.send(_ack(1))
  assert reader.receive(1.0)[0] == _ack(1)


def test_a_stranger_on_the_board_keeps_nothing_back(near):
  sender, reader = _ends(near)
  near.two.board.put("near/3/7/0", b"garbage")
  with pytest.raises(messages.BadMessage):
    reader.receive(0.01)
  sender.send(_ack(0))
  assert reader.receive(5.0)[0] == _ack(0)
  # Where it has the place of one that must go there.
  near.two.board.put("near/3/7/1", b"garbage")
  for number in range(1, 2 * message_ring.SLOTS):
    sender.send(_ack(number))
  for number in range(1, 2 * message_ring.SLOTS):
    assert reader.receive(1.0)[0] == _ack(number)


def test_the_last_words_of_one_who_has_ended_are_read(near):
  sender, reader = _ends(near)
  sender.send(_ack(0))
  assert reader.receive(5.0)[0] == _ack(0)
  sender.send(_ack(1))
  sender.send(_ack(2), b"x" * (message_ring.LARGEST + 1))
  near.one.exchange.close()
  assert [reader.receive(5.0)[0]["applied"] for _ in range(2)] == [1, 2]
  with pytest.raises(engine.PeerLost, match="closed its exchange"):
    reader.receive(5.0)
  with pytest.raises(engine.BoardLost, match="closed"):
    sender.send(_ack(3))


def test_a_sender_whose_chief_is_gone_keeps_nothing(near):
  sender, reader = _ends(near)
  sender.send(_ack(0))
  reader.receive(5.0)
  near.two.exchange.close()
  for number in range(3 * message_ring.SLOTS):
    sender.send(_ack(number))
  assert not near.one.board.items("near")


def test_terms_and_replicas_have_messages_of_their_own(near, caplog):
  caplog.set_level(logging.WARNING)
  sender, _ = _ends(near)
  sender.send(_ack(0))
  for term, incarnation in ((4, 7), (3, 8)):
    other = near_inbox.NearInbox(
      near.two, SECRET, term, incarnation, near.one.exchange.address
    )
    with pytest.raises(engine.EngineTimeout):
      other.receive(0.01)
  assert not caplog.records
