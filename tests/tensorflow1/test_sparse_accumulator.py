"""The sparse accumulator: TensorFlow's recordings, and its edges, under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scenario_recordings as recorded
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_dist.sparse.indexed_slices import IndexedSlices
from optax_dist.tensorflow1 import sparse_accumulator

_UNKNOWN = sparse_accumulator.UNKNOWN_ROWS
_SLOTS = 8
_CAPACITY = 64

_apply = jax.jit(sparse_accumulator.apply)
_take = jax.jit(
  sparse_accumulator.take, static_argnames=("reduction", "divide_by")
)


def _slices(indices, values, num_rows=_UNKNOWN, slots=_SLOTS):
  """Slices with unused slots, unchecked: recorded indices may be negative."""
  padded = np.full(slots, num_rows, np.int32)
  padded[: len(indices)] = indices
  rows = np.zeros((slots, *values.shape[1:]), values.dtype)
  rows[: len(indices)] = values
  shape = (num_rows, *values.shape[1:])
  return IndexedSlices.tree_unflatten(
    shape, (jnp.asarray(rows), jnp.asarray(padded))
  )


class _Jitted:
  """A jitted accumulator beside the rules."""

  def __init__(self, recording):
    self.config = recording["config"]
    self.state = None
    self.step = 0
    self.replay = recorded.SparseReplay(recording, self.on_apply, self.on_take)

  def on_apply(self, event, shape, accepted):
    row = shape[1:]
    values = recorded.array(event["values"], self.config["dtype"])
    if self.state is None or self.state.rows.shape[1:] != row:
      # The first gradient after a take fixes the shape of the rows.
      assert self.state is None or int(self.state.count) == 0
      self.state = sparse_accumulator.init(
        _CAPACITY, row, self.config["dtype"], global_step=self.step
      )
    before = int(self.state.count)
    self.state = _apply(
      self.state,
      _slices(event["indices"], values.reshape(shape)),
      event["local_step"],
    )
    sparse_accumulator.check_capacity(self.state)
    assert int(self.state.count) == before + accepted

  def on_take(self, done):
    assert int(self.state.count) == len(done.value)
    self.state, mean, taken = _take(
      self.state,
      len(done.value),
      reduction=self.config.get("reduction_type", "MEAN").lower(),
    )
    assert bool(taken)
    self.step = int(self.state.step)
    assert self.step == self.replay.books.step
    used = np.asarray(mean.indices) < _UNKNOWN
    return np.asarray(mean.indices)[used], np.asarray(mean.values)[used]


@pytest.mark.parametrize("id", recorded.ids(*recorded.SPARSE_ACCUMULATORS))
def test_recording_under_jit(id):
  recording = recorded.RECORDINGS[id]
  with jax.enable_x64(recording["config"]["dtype"] == "float64"):
    _Jitted(recording).replay.run()


def _merged(old, new):
  """TensorFlow's walk through two lists of (index, value, count)."""
  merged, old, new = [], list(old), list(new)
  while old and new:
    (a, x, n), (b, y, _) = old[0], new[0]
    if a <= b:
      old.pop(0)
    if b <= a:
      new.pop(0)
    if a == b:
      merged.append((a, y + x, n + 1))
    else:
      merged.append((a, x, n) if a < b else (b, y, 1))
  return merged + old + new


_gradient = st.lists(
  st.tuples(st.integers(0, 4), st.floats(-8, 8, width=32)), max_size=5
)


@given(gradients=st.lists(_gradient, min_size=1, max_size=4))
@settings(max_examples=40)
def test_any_order_and_repeats_merge_as_tensorflow_does(gradients):
  state = sparse_accumulator.init(32, num_rows=5)
  rows = []
  for gradient in gradients:
    indices = [index for index, _ in gradient]
    values = np.array([value for _, value in gradient], np.float32)
    state = _apply(state, _slices(indices, values, 5), 0)
    new = [(i, v, 1) for i, v in zip(indices, values, strict=True)]
    rows = _merged(rows, new)
  state, mean, taken = _take(state, len(gradients))
  assert taken
  size = len(rows)
  assert mean.indices[:size].tolist() == [i for i, _, _ in rows]
  assert set(mean.indices[size:].tolist()) <= {5}
  np.testing.assert_array_equal(
    np.asarray(mean.values)[:size],
    np.array([v / np.float32(n) for _, v, n in rows], np.float32),
  )
  assert not np.any(np.asarray(mean.values)[size:])


def test_rows_divide_by_their_own_count_or_by_that_of_gradients():
  state = sparse_accumulator.init(4, (1,), num_rows=3)
  for indices, values in (([0, 1], [[6.0], [3.0]]), ([1], [[5.0]])):
    values = np.array(values, np.float32)
    state = _apply(state, _slices(indices, values, 3), 0)
  by_rows = _take(state, 2)[1].to_dense()
  by_gradients = _take(state, 2, divide_by="gradients")[1].to_dense()
  assert by_rows[:, 0].tolist() == [6.0, 4.0, 0.0]
  assert by_gradients[:, 0].tolist() == [3.0, 4.0, 0.0]


def test_unused_slots_may_be_anywhere():
  state = sparse_accumulator.init(4, num_rows=9)
  slices = IndexedSlices([7.0, 1.0, 7.0, 2.0], [9, 3, 9, 5], (9,))
  state = _apply(state, slices, 0)
  _, mean, _ = _take(state, 1)
  assert mean.indices.tolist() == [3, 5, 9, 9]
  assert mean.values.tolist() == [1.0, 2.0, 0.0, 0.0]


def test_overflow_is_an_error_or_nan_and_never_silent():
  state = sparse_accumulator.init(2, num_rows=9)
  first = IndexedSlices([1.0, 2.0], [0, 1], (9,))
  second = IndexedSlices([3.0, 4.0], [1, 5], (9,))
  state = sparse_accumulator.apply(state, first, 0)
  with pytest.raises(ValueError, match=r"must fit capacity=2.*larger"):
    sparse_accumulator.apply(state, second, 0)
  state = _apply(state, second, 0)
  with pytest.raises(ValueError, match=r"must fit capacity=2.*larger"):
    sparse_accumulator.check_capacity(state)
  # The gradient that did not fit is not in, not even in part.
  assert int(state.count) == 1
  state, mean, _ = _take(state, 1)
  assert np.isnan(np.asarray(mean.values)).all()
  # The next step is free of it.
  state = _apply(state, first, 1)
  sparse_accumulator.check_capacity(state)
  assert _take(state, 1)[1].values.tolist() == [1.0, 2.0]


def test_a_stale_gradient_that_would_not_fit_is_only_stale():
  state = sparse_accumulator.init(1, num_rows=9, global_step=1)
  state = _apply(state, IndexedSlices([1.0, 2.0], [0, 1], (9,)), 0)
  sparse_accumulator.check_capacity(state)
  assert int(state.count) == 0


def test_a_row_of_another_type_or_shape_is_refused():
  state = sparse_accumulator.init(4, (2,), num_rows=9)
  with pytest.raises(ValueError, match=r"\(9, 2\).*float32.*\(9, 3\)"):
    sparse_accumulator.apply(
      state, IndexedSlices(np.ones((1, 3), np.float32), [0], (9, 3)), 0
    )
  with pytest.raises(ValueError, match=r"capacity must be a positive.*got 0"):
    sparse_accumulator.init(0)
  with pytest.raises(TypeError, match="floating type, got int32"):
    sparse_accumulator.init(1, dtype=jnp.int32)
  with pytest.raises(ValueError, match=r"divide_by must be.*'replicas'"):
    sparse_accumulator.take(state, divide_by="replicas")
