"""Leases and remaining samples of a ledger, against counting one by one."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_dist import ledger
from optax_dist.ledger import state as states


def limit_by_counting(data, done, samples):
  """Opens epochs one by one, as soon as the rest of the last fills no step."""
  epochs = 0
  while epochs != data.epochs and epochs * data.per_epoch < done + samples:
    epochs += 1
  return epochs * data.per_epoch


@given(
  st.integers(1, 12),
  st.integers(1, 12),
  st.none() | st.integers(1, 4),
  st.integers(0, 60),
  st.integers(1, 12),
)
def test_epoch_ends_once_the_rest_fills_no_step(
  size, batch, epochs, done, samples
):
  data = ledger.Batches(max(size, batch), batch, epochs=epochs)
  state = dataclasses.replace(
    ledger.init(data, batch, ledger.Progress(done)), need=samples
  )
  assert states.limit_of(state) == limit_by_counting(data, done, samples)


def test_ledger_begins_at_the_end_of_the_log():
  data = ledger.Batches(12, 4, epochs=2)
  progress = ledger.Progress().commit(((0, 2), (4, 8)), ((8, 10),))
  state = ledger.init(data, 2, progress)
  assert (state.cursor, state.pool) == (10, ((2, 4),))
  # The first lease is of what an earlier step has left.
  state, (lease,) = ledger.step(state, ledger.Ask("a"))
  assert lease.spans == ((2, 4),)
  assert ledger.init(data, 2) == ledger.init(data, 2, ledger.NOTHING_DONE)
  with pytest.raises(ValueError, match="multiple of the 3 gradients"):
    ledger.init(data, 3)


def test_samples_that_are_not_leased_are_not_accepted():
  state = ledger.init(ledger.Batches(8, 2), 2)
  state, _ = ledger.step(state, ledger.Ask("a"))
  assert not ledger.fits(state, "a", ())
  with pytest.raises(ValueError, match="not leased to 'a'"):
    ledger.step(state, ledger.Accept("a", ((1, 2),)))
  with pytest.raises(ValueError, match="No gradient of 'a'"):
    ledger.step(state, ledger.Commit((("a", ((0, 1),)),)))


@pytest.mark.parametrize("count", [0, -1, 2.5, True, None])
def test_samples_are_requested_for_a_number_of_gradients(count):
  state = ledger.init(ledger.Batches(num_samples=8, global_batch=4), 2)
  for event in (ledger.Ask("a", count), ledger.Claim("a", ((5, 7),), count)):
    with pytest.raises(ValueError, match="count must be a positive integer"):
      ledger.step(state, event)
