"""Frames, without sockets: cut anywhere, changed, or made up."""

import contextlib
import os
import struct

import numpy as np
import pytest

from optax_dist.coordinator.transport import (
  clock,
  frames,
  interface,
  session,
  shared_memory,
)

_KEYS = (b"k" * 32, b"K" * 32)
_REFUSED = (frames.Faulty, struct.error)


class _Side:
  def __init__(self, keys, process=0):
    self.events = []
    self.pool = shared_memory.Pool()
    self.session = session.Session(
      "peer", self.pool, self.events.append, clock.AwakeClock(1.0)
    )
    self.session.start(keys, process)

  def written(self, rng=None):
    """All that this side has to write, in writes of any length."""
    text = []
    while output := self.session.output():
      joined = b"".join(output)
      n = len(joined) if rng is None else int(rng.integers(1, len(joined) + 1))
      text.append(joined[:n])
      self.session.sent(n)
    return b"".join(text)

  def read(self, text, rng=None):
    """Takes bytes, in reads of any length."""
    text = memoryview(text)
    while text:
      room = self.session.room()
      most = min(len(text), sum(map(len, room)))
      n = most if rng is None else int(rng.integers(1, most + 1))
      rest = text[:n]
      for part in room:
        part[: len(rest[: len(part)])] = rest[: len(part)]
        rest = rest[len(part) :]
      self.session.received(n)
      text = text[n:]


def test_backlog_is_counted_until_it_is_written():
  """Otherwise twice the limit could wait for a peer that does not read."""
  side = _Side(None)
  for _ in range(20):
    side.session.send([bytes(100_000)])
  taken = sum(map(len, side.session.output()))
  assert taken < 200_000
  assert side.session.frames.backlog > 2_000_000 - taken


def _sides(signed=True):
  return (
    _Side(_KEYS if signed else None),
    _Side(_KEYS[::-1] if signed else None),
  )


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_frames_may_be_cut_anywhere(signed, seed):
  rng = np.random.default_rng(seed)
  one, other = _sides(signed)
  messages, arrays = [], {}
  for transfer in range(8):
    size = int(rng.choice([0, 3, 70_000, 300_000, 600_001]))
    arrays[transfer] = rng.integers(0, 256, size, np.uint8)
    if rng.integers(2):
      other.session.receiving.expect(transfer, bytearray(size), False)
    one.session.sending.send(transfer, arrays[transfer].data)
    payload = rng.bytes(int(rng.choice([0, 5, 60_000, 65_500, 200_000])))
    messages.append(payload)
    one.session.send([payload])
  for _ in range(4):
    other.read(one.written(rng), rng)
    for transfer, array in arrays.items():
      begun = any(
        getattr(e, "transfer", None) == transfer for e in other.events
      )
      if other.session.receiving.idle(transfer) is None and not begun:
        other.session.receiving.expect(transfer, bytearray(array.size), False)
    one.read(other.written(rng), rng)
  got = [e.payload for e in other.events if isinstance(e, interface.Message)]
  assert got == messages
  received = {
    e.transfer: bytes(e.data)
    for e in other.events
    if isinstance(e, interface.ArrayReceived)
  }
  assert received == {t: a.tobytes() for t, a in arrays.items()}
  sent = [e for e in one.events if isinstance(e, interface.ArraySent)]
  assert len(sent) == len(arrays)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("how", ["cancelled", "closed in order"])
def test_memory_of_a_cancelled_array_may_be_reused(signed, how):
  array = np.arange(300_000).astype(np.uint8)
  complete = 0
  for cut in range(0, array.size, 29_989):
    one, other = _sides(signed)
    memory = array.copy()
    one.session.sending.send(3, memory.data)
    other.session.receiving.expect(3, bytearray(array.size), False)
    one.read(other.written())
    text = b""
    while len(text) < cut:
      rest = b"".join(one.session.output())[: cut - len(text)]
      one.session.sent(len(rest))
      text += rest
    one.session.output()  # The next piece, if none was half written.
    if how == "cancelled":
      one.session.cancel(3)
    else:
      one.session.announce_close("done")
    memory[:] = 255
    other.read(text + one.written())
    for event in other.events:
      if isinstance(event, interface.ArrayReceived):
        complete += 1
        assert bytes(event.data) == array.tobytes(), cut
  assert complete


def test_each_changed_byte_of_a_signed_frame_is_found():
  one, other = _sides()
  other.session.receiving.expect(3, bytearray(17), False)
  one.read(expected := other.written())
  assert expected
  one.session.send([b"commit 7"])
  one.session.sending.send(3, b"the array's bytes")
  text = one.written()
  first = 13 + 16 + len(b"commit 7")
  body = text.index(b"the array's bytes")
  for at in range(body):
    other = _sides()[1]
    other.session.receiving.expect(3, bytearray(17), False)
    bad = bytearray(text)
    bad[at] ^= 0x80
    with contextlib.suppress(*_REFUSED):
      other.read(bytes(bad))
    # A length that grew waits for bytes that never come.
    assert len(other.events) == (at >= first), at


def test_frames_out_of_order_or_of_another_connection_are_refused():
  one, other = _sides()
  one.session.send([b"first"])
  first = one.written()
  one.session.send([b"other"])
  second = one.written()
  with pytest.raises(frames.Faulty, match="signature"):
    other.read(second)
  other = _sides()[1]
  other.read(first)
  with pytest.raises(frames.Faulty, match="signature"):
    other.read(first)
  with pytest.raises(frames.Faulty, match="signature"):
    one.read(first)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("signed", [True, False])
def test_random_bytes_are_refused_or_do_nothing(seed, signed):
  rng = np.random.default_rng(seed)
  side = _Side(_KEYS if signed else None, os.getpid())
  side.session.receiving.expect(1, bytearray(100), False)
  side.session.sending.send(2, bytes(100))
  text = bytearray(rng.bytes(4000))
  if seed % 2:
    # Plausible headers get further.
    text = bytearray()
    for _ in range(200):
      length = int(rng.integers(0, 40))
      text += length.to_bytes(4, "little") + bytes([rng.integers(0, 10)])
      text += int(rng.integers(0, 4)).to_bytes(8, "little") + rng.bytes(length)
  try:
    side.read(bytes(text), rng)
  except _REFUSED:
    return
  assert not signed or not side.events


@pytest.mark.parametrize(
  ("kind", "number", "body"),
  [
    (0, 0, bytes(5 << 20)),
    (1, 0, bytes(600)),
    (3, 1, b""),
    (4, 9, b"a piece of nothing"),
    (4, 9, b""),
    (6, 1, bytes(3)),
    (6, 1, bytes(24)),
    (6, 1, bytes(32)),
    (7, 1, b""),
    (9, 1, b""),
    (255, 1, b""),
  ],
)
def test_faulty_frames_are_refused(kind, number, body):
  side = _Side(None)
  head = len(body).to_bytes(4, "little") + bytes([kind])
  with pytest.raises(_REFUSED):
    side.read(head + number.to_bytes(8, "little") + body)


def test_more_bytes_than_expected_are_refused():
  def piece(nbytes):
    head = nbytes.to_bytes(4, "little") + bytes([4])
    return head + (5).to_bytes(8, "little") + bytes(nbytes)

  side = _Side(None)
  side.session.receiving.expect(5, bytearray(10), False)
  with pytest.raises(frames.Faulty, match="too many"):
    side.read(piece(4) + piece(7))
  side = _Side(None)
  side.session.receiving.expect(5, bytearray(10), False)
  with pytest.raises(frames.Faulty, match="not expected"):
    side.read(piece(10) + piece(1))
  side = _Side(None)
  side.session.receiving.expect(5, bytearray(1 << 30), False)
  with pytest.raises(frames.Faulty, match="a piece of"):
    side.read(piece(frames.PIECE + 1))
