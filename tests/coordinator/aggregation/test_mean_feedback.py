"""Means of few bits, and what they leave out: DoubleSqueeze's equations."""

import numpy as np
import pytest
from averages import average, decoded

from optax_dist.coordinator.aggregation import encoder, wire_formats

BLOCK = 4032
FEW = [w for w in wire_formats.WIRES if wire_formats.feeds_back(w)]


def gradient(step, worker, size):
  rng = np.random.default_rng([step, worker])
  return rng.normal(size=size).astype(np.float32)


def levels(bits):
  most = np.float32(2 ** (bits - 1) - 1)

  def compress(v):
    scale = np.abs(v).max() / most
    return np.rint(v / scale) * scale

  return compress


def largest(v):
  out = np.zeros_like(v)
  at = np.argsort(np.abs(v))[-121:]
  scale = np.abs(v[at]).max()
  out[at] = (np.rint((v[at] / scale + 1) * 1.5) / 1.5 - 1) * scale
  return out


# The paper's Q, of one block.
COMPRESS = {
  "int8": levels(8),
  "int4": levels(4),
  "int2": levels(2),
  "top_k": largest,
}


@pytest.mark.parametrize("wire", FEW)
@pytest.mark.parametrize("mean_wire", FEW)
def test_it_is_error_feedback_both_ways(wire, mean_wire):
  """Worker: v_i = g_i + d_i, d_i = v_i - Q(v_i). Server: the same of the mean.

  Also where most of the block is padding, which is not to count.
  """
  size, workers = BLOCK - 900, 3
  like = [np.zeros(size, np.float32)]
  sides = [
    encoder.Encoder(like, wire, mean_wire=mean_wire) for _ in range(workers)
  ]
  raw = np.zeros(sides[0].place.nbytes, np.uint8)
  theirs, own = np.zeros((workers, size), np.float32), np.zeros(size, "f4")
  for step in range(4):
    sent = []
    for i, side in enumerate(sides):
      assert side.write([gradient(step, i, size)], raw, step)
      side.settle(step, True)
      sent.append(raw.tobytes())
    (found,) = sides[0].read(average(sides[0], sent))
    heard = []
    for i, one in enumerate(sent):
      v = gradient(step, i, size) + theirs[i]
      (was,) = decoded(sides[i], np.frombuffer(one, np.uint8))
      alike(was, COMPRESS[wire](v), v)
      heard.append(was)
      theirs[i] = v - was
    v = np.mean(heard, 0, dtype=np.float32) + own
    alike(found, COMPRESS[mean_wire](v), v)
    own = v - found


def alike(found, expected, v):
  """Both are Q(v), in which what lies in the middle may go either way.

  It often does: means of values of 2 bits are alike, or cancel to nearly zero.
  """
  np.testing.assert_allclose(
    np.linalg.norm(v - found), np.linalg.norm(v - expected), rtol=1e-3
  )
  assert np.isclose(found, expected, rtol=1e-3, atol=1e-3).mean() > 0.8


@pytest.mark.parametrize("mean_wire", FEW)
def test_the_sent_mean_and_its_residual_add_up(mean_wire):
  size = 2 * BLOCK + 77
  made = encoder.Encoder(
    [np.zeros(size, np.float32)], "int8", mean_wire=mean_wire
  )
  raw = np.zeros(made.place.nbytes, np.uint8)
  told, true = np.zeros(size), np.zeros(size)
  for step in range(20):
    sent = []
    for worker in range(2):
      made.write([gradient(step, worker, size)], raw)
      sent.append(raw.tobytes())
      true += decoded(made, raw)[0] / 2.0
    told += made.read(average(made, sent))[0]
  kept = made.mean_feedback.residual(0, size)
  np.testing.assert_allclose(told + kept, true, atol=2e-5)
  assert np.abs(kept).max() > 1e-3


@pytest.mark.parametrize("mean_wire", FEW)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_mean_that_is_not_finite_leaves_no_trace(mean_wire, bad):
  """It is told as no number, and the next one is as if it had not been."""
  like = [np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)]
  made = encoder.Encoder(like, "int8", mean_wire=mean_wire)
  raw = np.zeros(made.place.nbytes, np.uint8)
  leaves = [gradient(0, i, BLOCK) for i in range(2)]
  assert made.write(leaves, raw)
  # A weight may be anything: gradients themselves are looked at.
  first, second = made.read(average(made, [raw.tobytes()], [bad]))
  assert not np.isfinite(first).all()
  assert not np.isfinite(second).all()
  again = encoder.Encoder(like, "int8", mean_wire=mean_wire)
  raw = raw.tobytes()
  assert average(made, [raw]) == average(again, [raw])


def test_a_mean_of_zeros_can_be_read():
  like = [np.zeros(9000, np.float32), np.zeros(3, np.float16)]
  for wire in wire_formats.WIRES:
    made = encoder.Encoder(like, "int4", mean_wire=wire)
    for leaf in made.read(made.no_mean()):
      np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


@pytest.mark.parametrize("mean_wire", wire_formats.WIRES)
@pytest.mark.parametrize("wire", wire_formats.WIRES)
def test_any_mean_goes_with_any_wire_of_few_bits(wire, mean_wire):
  like = [np.zeros(5000, np.float32), np.zeros(3, np.float64)]
  if wire not in FEW and mean_wire in FEW:
    with pytest.raises(
      ValueError, match=f"mean_wire='{mean_wire}' needs .*'{wire}'"
    ):
      encoder.Encoder(like, wire, mean_wire=mean_wire)
    return
  made = encoder.Encoder(like, wire, mean_wire=mean_wire)
  leaves = [gradient(0, 0, 5000), np.ones(3)]
  raw = np.zeros(made.place.nbytes, np.uint8)
  assert made.write(leaves, raw)
  mean = average(made, [raw.tobytes()] * 2)
  assert len(mean) == made.mean_place.nbytes
  found, exact = made.read(mean)
  np.testing.assert_array_equal(exact, np.ones(3))
  lost = found.astype(np.float32) - leaves[0]
  assert np.sum(lost**2) < np.sum(leaves[0] ** 2)
