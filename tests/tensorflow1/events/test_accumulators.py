"""Accumulators against lists, and the shapes that they refuse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tensorflow1 import events as tf
from tests.tensorflow1.events import accumulators


class Model:
  """An accumulator, as one would write it down with lists."""

  def __init__(self):
    self.step, self.members, self.takes, self.out = 0, [], [], []

  def serve(self):
    if self.takes and len(self.members) >= self.takes[0][1]:
      id, _ = self.takes.pop(0)
      self.out.append((id, tuple(self.members), self.step))
      self.members, self.step = [], self.step + 1

  def apply(self, local_step, tag):
    if local_step >= self.step:
      self.members.append(tag)
      self.serve()

  def take(self, id, number):
    self.takes.append((id, number))
    self.serve()

  def take_with_timeout(self, id, number):
    self.take(id, number)
    self.cancel(id)

  def cancel(self, id):
    self.takes = [take for take in self.takes if take[0] != id]
    self.serve()

  def set_global_step(self, step):
    self.step = step

  def close(self):
    self.takes = []


MOVES = st.lists(
  st.tuples(
    st.sampled_from(
      ["apply"] * 6
      + ["take"] * 4
      + ["take_with_timeout", "cancel", "set_global_step", "close"]
    ),
    st.integers(-1, 1),
    st.integers(1, 4),
  ),
  max_size=40,
)


@given(MOVES)
@settings(max_examples=150)
def test_events_in_any_order_are_as_on_lists(moves):
  books, model = tf.Accumulator(), Model()
  for i, (kind, offset, number) in enumerate(moves):
    told = {
      "apply": (model.step + offset, i),
      "take": (i, number),
      "take_with_timeout": (i, number),
      "cancel": (i - number,),
      "set_global_step": (max(0, model.step + offset),),
      "close": (),
    }[kind]
    waiting = set(books.pending)
    books, out = getattr(books, kind)(*told)
    model.out.clear()
    getattr(model, kind)(*told)
    done = [o for o in out if isinstance(o, tf.Completed)]
    served = [(o.id, o.value, o.step) for o in done if o.error is None]
    assert served == model.out
    assert books.pending == tuple(id for id, _ in model.takes)
    assert (books.step, books.count) == (model.step, len(model.members))
    # Each take that is over was told so, once.
    taken = {i} if kind.startswith("take") else set()
    over = (waiting | taken) - set(books.pending)
    assert sorted(o.id for o in done) == sorted(over)


def test_a_cancelled_take_lets_a_smaller_one_pass():
  books, _ = tf.Accumulator().take("three", 3)
  books, _ = books.take("one", 1)
  books, _ = books.apply(0, "g")
  books, out = books.cancel("three")
  assert [(done.id, done.value) for done in out] == [
    ("three", None),
    ("one", ("g",)),
  ]
  assert books.step == 1
  assert not books.pending


def test_a_timed_take_that_is_served_at_once_has_no_error():
  books, _ = tf.Accumulator().apply(0, "g")
  books, (done,) = books.take_with_timeout("t", 1)
  assert (done.value, done.error, books.count) == (("g",), None, 0)


@pytest.mark.parametrize("number", [0, -1])
def test_taking_zero_tokens_is_refused(number):
  books, (done,) = tf.Accumulator().take("none", number)
  assert done.error.endswith(f"must be positive, but was {number}")
  assert books.pending == ()


def test_the_first_gradient_after_a_take_fixes_the_shape():
  books, (one,) = tf.Accumulator((None, 3)).apply(0, "a", (2, 3))
  assert one.accepted
  books, (other,) = books.apply(0, "b", (4, 3))
  assert (other.accepted, other.error) == (
    False,
    "InvalidArgumentError: Shape mismatch: expected [2,3], got [4,3]",
  )
  assert books.count == 1
  books, (done,) = books.take("t", 1)
  assert done.shape == (2, 3)
  books, (after,) = books.apply(1, "c", (4, 3))
  assert after.accepted
  _, (wrong,) = tf.Accumulator((None, 3)).apply(0, "d", (2, 4))
  assert wrong.error.endswith("expected [?,3], got [2,4]")
  _, (rank,) = tf.Accumulator((3,)).apply(0, "e", (3, 1))
  assert rank.error.endswith("expected [3], got [3,1]")


def test_a_stale_gradient_of_a_wrong_shape_is_only_stale():
  books = tf.Accumulator((3,), step=2)
  assert books.apply(1, "a", (4,)) == (books, (tf.Applied("a", False),))


def test_a_closed_accumulator_cancels_all_takes_in_order():
  books, _ = tf.Accumulator().take("b", 2)
  books, _ = books.take("a", 1)
  books, out = books.close()
  assert [(o.id, o.error) for o in out] == [
    ("b", accumulators.TAKE_CANCELLED),
    ("a", accumulators.TAKE_CANCELLED),
  ]


@pytest.mark.parametrize(
  ("given", "words"),
  [
    ((3, (1, 2)), "Input indices should be vector but received shape: []"),
    (([[0, 1]], (1, 2)), "vector but received shape: [1,2]"),
    ((np.zeros((1, 1), int), (1, 2)), "vector but received shape: [1,1]"),
    (([0], ()), "Values cannot be 0-dimensional."),
    (([0, 1], (1, 2)), "Expected 2 non-empty input values, got 1"),
    (([0, 4], (2, 2)), "index of slice 1 exceeded limits of shape; index is 4"),
    (([0], (1, 3)), "expected values dim 1 to be 2, got 3"),
    (([0], (1,)), "expected values rank at least 2, got 1"),
    (([0], (1, 2), (4, 3)), "expected shape dim 1 to be 2, got 3"),
    (([0], (1, 2), (5, 2)), "expected shape dim 0 to be 4, got 5"),
    (([0], (1, 2), (4,)), "expected shape rank at least 2, got 1"),
  ],
)
def test_slices_that_do_not_fit_are_refused(given, words):
  books = tf.SparseAccumulator((4, 2))
  indices, values_shape, *dense_shape = given
  after, (applied,) = books.apply_slices(
    0,
    "a",
    indices=indices,
    values_shape=values_shape,
    dense_shape=dense_shape[0] if dense_shape else None,
  )
  assert not applied.accepted
  assert words in applied.error
  assert after == books


def test_only_the_rows_of_slices_may_differ():
  books = tf.SparseAccumulator()
  rows = lambda n, *row: {"indices": range(n), "values_shape": (n, *row)}
  books, (one,) = books.apply_slices(0, "a", **rows(2, 3))
  assert one.accepted
  books, (more,) = books.apply_slices(0, "b", **rows(7, 3))
  assert more.accepted
  _, (wide,) = books.apply_slices(0, "c", **rows(2, 4))
  assert "expected values dim 1 to be 3, got 4" in wide.error
  _, (deep,) = books.apply_slices(0, "d", **rows(2, 3, 1))
  assert "expected values rank 2, got 3" in deep.error
  books, (done,) = books.take("t", 2)
  assert (done.value, done.shape) == (("a", "b"), (-1, 3))
  # After a take any row will do.
  _, (fresh,) = books.apply_slices(1, "e", **rows(2, 4))
  assert fresh.accepted


def test_the_mean_of_slices_has_the_rows_of_a_known_shape():
  books = tf.SparseAccumulator((9, None))
  books, _ = books.apply_slices(0, "a", indices=[8], values_shape=(1, 3))
  _, (done,) = books.take("t", 1)
  assert done.shape == (9, 3)
