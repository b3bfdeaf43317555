"""A state served to one process and fetched by it, or not."""

import re
import time

import near_transports
import numpy as np
import pytest

from optax_dist.coordinator.aggregation import layout, snapshots
from optax_dist.coordinator.protocol import inputs, messages

STATE = np.arange(640, dtype=np.uint8) % 251


class Side:
  def __init__(self, transport, timeout=5.0, nbytes=STATE.size):
    self.transport = transport
    self.work, self.answers = [], []
    self.all = snapshots.Snapshots(
      self.transport,
      nbytes,
      lambda *both: self.work.append(both),
      timeout,
      self.answers.append,
    )

  def pump(self):
    work, self.work = self.work, []
    for do, done in work:
      do()
      if done is not None:
        done()
    for event in self.transport.poll(0):
      self.all.handle(event)


@pytest.fixture(autouse=True)
def pieces(monkeypatch):
  """A state has several pieces, of which the last one is smaller."""
  monkeypatch.setattr(snapshots, "_LEAST", 150)


def pair(**options):
  a, b = near_transports.connected("a", "b")
  return Side(a, **options), Side(b, **options)


def serve(one, to, step=7, transfer=3):
  name, address = to.transport.name, to.transport.address
  message = messages.Serve(transfer, name, address, 0)
  one.all.serve(message, step, lambda: [STATE.data])


def fetch(one, source, transfer=3):
  one.all.fetch(
    messages.Fetch(transfer, source.transport.name, source.transport.address)
  )


def pump(*sides):
  for _ in range(12):
    for side in sides:
      side.pump()


@pytest.mark.parametrize("order", ["serve first", "fetch first"])
def test_fetched_state_has_its_step(order):
  a, b = pair()
  if order == "serve first":
    serve(a, b)
    pump(a, b)
  fetch(b, a)
  pump(a, b)
  if order == "fetch first":
    serve(a, b)
    pump(a, b)
  assert b.answers == [inputs.SnapshotFetched(3, 7)]
  taken = b.all.take(3)
  np.testing.assert_array_equal(taken, STATE)
  assert taken.ctypes.data % layout.ALIGNED_BYTES == 0
  assert a.transport.pending() == b.transport.pending() == 0
  assert a.transport.bytes_out == b.transport.bytes_in == STATE.size + 16


def test_state_with_a_wrong_checksum_is_refused():
  a, b = pair()
  sent = a.transport.send_array

  def flipped(peer, number, data):
    changed = bytearray(b"".join(data) if isinstance(data, list) else data)
    changed[0] ^= 4
    sent(peer, number, changed)

  a.transport.send_array = flipped
  serve(a, b)
  fetch(b, a)
  pump(a, b)
  (answer,) = b.answers
  assert isinstance(answer, inputs.SnapshotFailed)
  assert "its checksum is another one" in answer.reason
  assert b.transport.pending() == 0


def test_state_that_is_requested_anew_during_its_check_is_discarded():
  a, b = pair()
  serve(a, b)
  fetch(b, a)
  pump(a)
  for event in b.transport.poll(0):
    b.all.handle(event)
  pump(a)
  for event in b.transport.poll(0):
    b.all.handle(event)
  assert len(b.work) == 6
  fetch(b, a, transfer=4)
  pump(a, b)
  assert b.answers == []


def test_silent_transfer_times_out():
  a, b = pair(timeout=0.05)
  fetch(b, a)
  pump(a, b)
  time.sleep(0.06)
  b.all.check()
  (failed,) = b.answers
  assert failed.transfer == 3
  # On a busy machine it was silent for longer.
  assert re.fullmatch(r"no byte of it came for \d+\.\d s", failed.reason)
  assert b.transport.pending() == 0
