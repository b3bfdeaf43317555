"""A state served to one process and fetched by it, or not."""

import re
import time

import near_transports
import numpy as np
import pytest

from optax_dist.coordinator.aggregation import snapshots
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
      done()
    for event in self.transport.poll(0):
      self.all.handle(event)


def pair(**options):
  a, b = near_transports.connected("a", "b")
  return Side(a, **options), Side(b, **options)


def serve(one, to, step=7, transfer=3):
  name, address = to.transport.name, to.transport.address
  message = messages.Serve(transfer, name, address, 0)
  one.all.serve(message, step, lambda out: np.copyto(out, STATE))


def fetch(one, source, transfer=3):
  one.all.fetch(
    messages.Fetch(transfer, source.transport.name, source.transport.address)
  )


def pump(*sides):
  for _ in range(6):
    for side in sides:
      side.pump()


@pytest.mark.parametrize("order", ["serve first", "fetch first"])
def test_a_state_comes_with_its_step(order):
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
  np.testing.assert_array_equal(b.all.take(3), STATE)
  assert a.transport.pending() == b.transport.pending() == 0
  assert a.transport.bytes_out == b.transport.bytes_in == 64 + STATE.size


def test_a_state_that_changes_on_the_way_is_not_accepted():
  a, b = pair()
  flipped = lambda memory: memory.__setitem__(64 + 100, memory[64 + 100] ^ 4)
  sent = a.transport.send_array
  a.transport.send_array = lambda peer, number, memory: (
    flipped(memory),
    sent(peer, number, memory),
  )
  serve(a, b)
  fetch(b, a)
  pump(a, b)
  (answer,) = b.answers
  assert isinstance(answer, inputs.SnapshotFailed)
  assert "its digest is another one" in answer.reason
  assert b.transport.pending() == 0


def test_a_state_that_is_replaced_while_it_is_checked_is_no_answer():
  a, b = pair()
  serve(a, b)
  fetch(b, a)
  pump(a)
  for event in b.transport.poll(0):
    b.all.handle(event)
  pump(a)
  for event in b.transport.poll(0):
    b.all.handle(event)
  assert len(b.work) == 1
  fetch(b, a, transfer=4)
  pump(a, b)
  assert b.answers == []


def test_a_silent_attempt_times_out():
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
