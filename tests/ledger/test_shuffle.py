"""The permutation: one, in every epoch another, and a good one."""

import hashlib

import numpy as np
import pytest

from optax_dist.ledger import shuffle


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 99, 100, 1000, 4097])
def test_shuffle_is_a_permutation(size):
  for seed, epoch in ((0, 0), (1, 0), (1, 7), (2**70, 3)):
    result = shuffle.permuted(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(result), np.arange(size))


def test_the_order_of_a_seed_stays_the_same():
  """Logs and checkpoints name positions, so a run goes on in the same order."""
  result = hashlib.sha256()
  for size in range(1, 40):
    for seed in (0, 5, 2**70 + 3):
      for epoch in (0, 7):
        order = shuffle.permuted(np.arange(size), size, seed, epoch)
        result.update(bytes(order.tolist()))
  assert result.hexdigest().startswith("d4a160080659f813")


def test_large_sizes_stay_within_range():
  size = 10**13 + 7
  some = np.array([0, 1, size // 2, size - 1])
  result = shuffle.permuted(some, size, 5, 0)
  assert len(set(result.tolist())) == 4
  assert result.min() >= 0
  assert result.max() < size


def test_shuffle_is_uniform():
  """Where a number lands says nothing of its place, nor do its neighbours."""
  size, cells = 20_000, 20
  for seed in range(5):
    result = shuffle.permuted(np.arange(size), size, seed, 0)
    counts = np.histogram2d(np.arange(size), result, bins=cells)[0]
    expected = size / cells**2
    squares = ((counts - expected) ** 2 / expected).sum()
    # Degrees of freedom 361: its mean, and 27 its standard deviation.
    assert 361 - 6 * 27 < squares < 361 + 6 * 27
    correlation = np.corrcoef(result[:-1], result[1:])[0, 1]
    assert abs(correlation) < 6 / np.sqrt(size)
