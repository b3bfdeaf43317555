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


def test_indices_follow_the_order_of_the_spans():
  data = ledger.Batches(100, 10, epochs=None)
  whole = data.indices(((0, 200),))
  result = data.indices(((150, 155), (3, 7), (98, 102)))
  places = [*range(150, 155), *range(3, 7), *range(98, 102)]
  assert np.array_equal(result, whole[places])
  assert data.total is None


def test_without_shuffling_they_count_up():
  data = ledger.Batches(6, 4, epochs=2, shuffle=False)
  assert data.indices(((0, 8),)).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
  assert data.left_out(1).tolist() == [4, 5]


@pytest.mark.parametrize(
  ("arguments", "what"),
  [
    ({"num_samples": 0}, "num_samples must be a positive integer, got 0"),
    ({"global_batch": 2.0}, "global_batch must be a positive integer"),
    ({"global_batch": 11}, "global_batch must be at most num_samples=10"),
    ({"seed": -1}, "seed must be an integer of at least 0"),
    ({"epochs": 0}, "epochs must be a positive integer"),
    ({"mode": "fast"}, "mode must be 'exact' or 'streaming'"),
    (
      {"micro_batch": 0, "deterministic": True},
      "micro_batch must be a positive integer, got 0",
    ),
    ({"deterministic": True}, "deterministic=True needs micro_batch"),
    ({"micro_batch": 2}, "micro_batch needs deterministic=True"),
    (
      {"micro_batch": 3, "deterministic": True},
      "micro_batch must divide global_batch=4",
    ),
  ],
)
def test_what_cannot_be_is_refused(arguments, what):
  with pytest.raises(ValueError, match=what):
    ledger.Batches(**{"num_samples": 10, "global_batch": 4} | arguments)


def test_a_deterministic_step_has_a_fixed_number_of_slots():
  data = ledger.Batches(100, 24, micro_batch=2, deterministic=True)
  assert data.slots == 12
  assert data.unit(data.slots) == 2
  with pytest.raises(ValueError, match="slots needs deterministic=True"):
    _ = ledger.Batches(100, 24).slots


def test_without_a_seed_it_is_zero():
  spans = ((0, 9),)
  default = ledger.Batches(9, 3).indices(spans).tolist()
  assert default == ledger.Batches(9, 3, seed=0).indices(spans).tolist()
  assert default != ledger.Batches(9, 3, seed=1).indices(spans).tolist()


def test_gradients_must_share_a_batch_evenly():
  with pytest.raises(ValueError, match="a multiple of the 3 gradients"):
    ledger.init(ledger.Batches(10, 4), 3)
