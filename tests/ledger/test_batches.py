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
    ({"num_samples": 0}, "`num_samples` must be a positive integer, got 0"),
    ({"global_batch": 2.0}, "`global_batch` must be a positive integer"),
    ({"global_batch": 11}, "global_batch must be at most num_samples=10"),
    ({"seed": -1}, "`seed` must be an integer, not negative"),
    ({"seed": 2**63}, r"`seed` must be at most 9223372036854775807"),
    ({"epochs": 2**62}, r"num_samples \* epochs must be below 2\*\*63"),
    ({"shuffle": "no"}, "`shuffle` must be True or False, got 'no'"),
    ({"epochs": 0}, "`epochs` must be a positive integer"),
    ({"mode": "fast"}, "`mode` must be one of 'exact', 'streaming'"),
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
