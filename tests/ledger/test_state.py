"""What a ledger may lease, and what is left, against counting one by one."""

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
def test_an_epoch_is_open_until_the_rest_fills_no_step(
  size, batch, epochs, done, samples
):
  data = ledger.Batches(max(size, batch), batch, epochs=epochs)
  state = dataclasses.replace(
    ledger.init(data, batch, ledger.Progress(done)), need=samples
  )
  assert states.limit_of(state) == limit_by_counting(data, done, samples)


@pytest.mark.parametrize(("epochs", "limit"), [(None, None), (3, 30)])
def test_a_stream_has_no_limit_before_its_end(epochs, limit):
  data = ledger.Batches(10, 4, epochs=epochs, mode="streaming")
  assert ledger.init(data, 4).limit == limit


def test_a_ledger_begins_where_the_log_ends():
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


def test_what_is_given_up_is_not_left():
  data = ledger.Batches(8, 4, shuffle=False)
  state = ledger.init(data, 2)
  assert (state.left, state.exhausted) == (8, False)
  state = dataclasses.replace(state, progress=state.progress.commit(((0, 4),)))
  assert (state.left, state.exhausted) == (4, False)
  # Two of the last four: no step can be filled any more.
  state = dataclasses.replace(state, abandoned=((4, 6),))
  assert (state.left, state.exhausted) == (2, True)
  # A smaller step can.
  assert not dataclasses.replace(state, need=1).exhausted


def test_what_is_given_up_opens_the_next_epoch():
  """Otherwise a step that lacks samples would wait for ones that never come."""
  data = ledger.Batches(8, 4, epochs=2, shuffle=False)
  state = ledger.init(data, 2)
  state = dataclasses.replace(state, progress=state.progress.commit(((0, 4),)))
  assert states.limit_of(state) == 8
  assert states.limit_of(dataclasses.replace(state, abandoned=((4, 6),))) == 16


def test_without_a_last_epoch_samples_never_run_out():
  state = ledger.init(ledger.Batches(4, 4, epochs=None), 1)
  state = dataclasses.replace(state, progress=ledger.Progress(4 * 10**9))
  assert state.left is None
  assert not state.exhausted


def test_free_is_what_no_replica_holds_of_a_deterministic_step():
  data = ledger.Batches(16, 8, micro_batch=2, deterministic=True)
  state = ledger.init(data, 4)
  assert state.free == 8
  state, (lease,) = ledger.step(state, ledger.Ask("a", 2))
  assert state.free == 8 - sum(b - a for a, b in lease.spans)
  state, _ = ledger.step(state, ledger.HolderLost("a"))
  assert state.free == 8
