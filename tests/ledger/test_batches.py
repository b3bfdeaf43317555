"""Tests of a run's data, and of invalid arguments."""

import numpy as np
import pytest

from optax_dist import ledger


@pytest.mark.parametrize("mode", ["exact", "streaming"])
def test_an_epoch_has_each_sample_once(mode):
  data = ledger.Batches(103, 10, seed=4, epochs=3, mode=mode)
  for epoch in range(3):
    start = epoch * data.per_epoch
    result = data.indices(((start, start + data.per_epoch),))
    left_out = data.left_out(epoch)
    assert len(left_out) == (3 if mode == "exact" else 0)
    everything = np.sort(np.concatenate([result, left_out]))
    assert np.array_equal(everything, np.arange(103))


@pytest.mark.parametrize(
  ("arguments", "what"),
  [
    ({"global_batch": 11}, "global_batch must be at most num_samples=10"),
    ({"epochs": 2**62}, r"num_samples \* epochs must be below 2\*\*63"),
    (
      {"micro_batch": 0, "deterministic": True},
      "`micro_batch` must be a positive integer, got 0",
    ),
    ({"deterministic": True}, "deterministic=True needs micro_batch"),
    ({"micro_batch": 2}, "micro_batch needs deterministic=True"),
    (
      {"micro_batch": 3, "deterministic": True},
      "micro_batch must divide global_batch=4",
    ),
  ],
)
def test_impossible_batches_are_refused(arguments, what):
  with pytest.raises(ValueError, match=what):
    ledger.Batches(**{"num_samples": 10, "global_batch": 4} | arguments)
