"""The data set and its batches."""

import hypothesis
import numpy as np
from hypothesis import strategies as st
from sklearn import datasets

from optax_dist.cli.train import digits


def test_split_is_fixed_and_parts_the_whole_data_set():
  train, test = digits.load()
  again, _ = digits.load()
  other, _ = digits.load(split_seed=1)
  np.testing.assert_array_equal(train.images, again.images)
  assert (train.images != other.images).any()

  def rows(images):
    return sorted(map(bytes, images.reshape(len(images), -1)))

  whole = (datasets.load_digits().data / 16).astype(np.float32)
  assert rows(np.concatenate([train.images, test.images])) == rows(whole)


def test_images_and_labels_are_as_documented():
  for part, size in zip(
    digits.load(), (digits.TRAIN_SIZE, digits.TEST_SIZE), strict=True
  ):
    assert part.images.shape == (size, 8, 8, 1)
    assert part.images.dtype == np.float32
    assert part.images.min() == 0
    assert part.images.max() == 1
    assert part.labels.shape == (size,)
    assert part.labels.dtype == np.int32
    # Stratified: each of the ten digits has about a tenth.
    shares = np.bincount(part.labels, minlength=10) / size
    np.testing.assert_allclose(shares, 0.1, atol=0.01)


@hypothesis.given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 9))
def test_an_epoch_shows_each_image_at_most_once(size, batch_size, seed):
  data = digits.Batch(
    images=np.arange(size, dtype=np.float32).reshape(-1, 1, 1, 1),
    labels=np.arange(size, dtype=np.int32),
  )
  rng = np.random.default_rng(seed)
  batches = list(digits.epoch_batches(data, batch_size, rng))
  assert len(batches) == size // batch_size
  seen = [label for batch in batches for label in batch.labels]
  assert len(set(seen)) == len(seen) == size // batch_size * batch_size
  for batch in batches:
    np.testing.assert_array_equal(batch.images[:, 0, 0, 0], batch.labels)


def test_epochs_differ_and_the_seed_decides_them():
  data = digits.Batch(np.zeros((99, 8, 8, 1), np.float32), np.arange(99))

  def two_epochs(seed):
    rng = np.random.default_rng(seed)
    return [
      next(iter(digits.epoch_batches(data, 99, rng))).labels.tolist()
      for _ in range(2)
    ]

  first, second = two_epochs(0)
  assert first != second
  assert two_epochs(0) == [first, second]
  assert two_epochs(1) != [first, second]
