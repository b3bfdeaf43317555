"""Samples by number: arrays, what torch calls a data set, and Grain."""

from typing import NamedTuple

import numpy as np
import pytest

from optax_dist import ledger


def test_arrays_are_read_as_they_are():
  x, y = np.arange(12.0).reshape(6, 2), np.arange(6)
  result = ledger.read((x, {"y": y}), np.array([5, 0, 3]))
  np.testing.assert_array_equal(result[0], x[[5, 0, 3]])
  np.testing.assert_array_equal(result[1]["y"], [5, 0, 3])


def test_a_data_set_like_torchs_is_read_sample_by_sample():
  class Pairs:
    def __len__(self):
      return 4

    def __getitem__(self, number):
      return np.full(3, number, np.float32), number % 2

  x, y = ledger.read(Pairs(), [3, 2])
  assert x.dtype == np.float32
  assert x.tolist() == [[3.0] * 3, [2.0] * 3]
  assert y.tolist() == [1, 0]
  with pytest.raises(IndexError, match="from 0 to 3, got 1 to 4"):
    ledger.read(Pairs(), [1, 4])


def test_grain_is_read_by_number():
  grain = pytest.importorskip("grain", reason="Grain is not installed")
  numbers = grain.MapDataset.range(10)
  data = numbers.map(lambda x: {"x": x, "square": x * x})
  spec = ledger.Batches(len(data), 4, seed=1)
  indices = spec.indices(((0, 4),))
  result = ledger.read(data, indices)
  assert result["x"].tolist() == indices.tolist()
  assert result["square"].tolist() == (indices**2).tolist()
  with pytest.raises(IndexError, match="from 0 to 9"):
    ledger.read(data, [10])


class Pair(NamedTuple):
  x: np.ndarray
  y: np.ndarray


def test_named_tuples_are_kept():
  source = Pair(np.arange(4), np.arange(4.0))
  samples = [Pair(np.int64(number), np.float64(number)) for number in range(4)]
  for result in (ledger.read(source, [3, 1]), ledger.read(samples, [3, 1])):
    assert isinstance(result, Pair)
    assert (result.x.tolist(), result.y.tolist()) == ([3, 1], [3.0, 1.0])


@pytest.mark.parametrize("source", [np.arange(5), list(range(5))])
@pytest.mark.parametrize("indices", [[-1], [0, 5]])
def test_an_index_outside_is_named(source, indices):
  with pytest.raises(IndexError, match="from 0 to 4"):
    ledger.read(source, indices)


def test_no_indices_give_no_rows():
  assert ledger.read(np.ones([5, 2]), []).shape == (0, 2)
  result = ledger.read([{"x": np.ones(3, np.float32), "y": 1}] * 2, [])
  assert (result["x"].shape, result["x"].dtype) == ((0, 3), np.float32)
  assert result["y"].shape == (0,)
  assert ledger.read([(1, 2.0)], [])[1].shape == (0,)


def test_all_arrays_must_have_an_index():
  short, long = np.arange(4), np.arange(6)
  for source in ((short, long), {"x": long, "y": short}):
    with pytest.raises(IndexError, match="from 0 to 3, got 5 to 5"):
      ledger.read(source, [5])
  assert ledger.read((short, long), [3])[1].tolist() == [3]


def test_a_tuple_or_dictionary_of_samples_is_read_sample_by_sample():
  assert ledger.read(("a", "b", "c"), [2, 1]).tolist() == ["c", "b"]
  assert ledger.read({0: "a", 1: "b"}, [1]).tolist() == ["b"]
  # Some of the samples may be arrays.
  assert ledger.read((np.array(5), 6, 7), [2, 0]).tolist() == [7, 5]
  assert ledger.read({0: np.array(5), 1: 6}, [1, 0]).tolist() == [6, 5]
