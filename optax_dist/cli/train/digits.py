"""The data set: scikit-learn's bundled 8x8 images of handwritten digits."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

TRAIN_SIZE = 1437
TEST_SIZE = 360


class Batch(NamedTuple):
  """Images and their labels.

  Attributes:
    images: float32 ``[size, 8, 8, 1]``, from 0 (paper) to 1 (ink).
    labels: int32 ``[size]``, from 0 to 9.
  """

  images: np.ndarray
  labels: np.ndarray


def load(split_seed: int = 0) -> tuple[Batch, Batch]:
  """Loads the digits, split into training and test images.

  Args:
    split_seed: seed of the split. Runs that differ only in their own seed share
      the test images, so that their accuracies are comparable.

  Returns:
    1,437 training images and 360 test images, stratified by digit.

  Example:
    >>> train, test = load()
    >>> train.images.shape, test.images.shape
    ((1437, 8, 8, 1), (360, 8, 8, 1))
  """
  from sklearn import datasets, model_selection

  images, labels = datasets.load_digits(return_X_y=True)
  train_index, test_index = model_selection.train_test_split(
    np.arange(len(labels)),
    train_size=TRAIN_SIZE,
    test_size=TEST_SIZE,
    stratify=labels,
    random_state=split_seed,
  )
  everything = Batch(
    images=(images / 16).astype(np.float32).reshape(-1, 8, 8, 1),
    labels=labels.astype(np.int32),
  )
  return take(everything, train_index), take(everything, test_index)


def take(data: Batch, index: np.ndarray) -> Batch:
  """The images at the given indices."""
  return Batch(data.images[index], data.labels[index])


def epoch_batches(
  data: Batch, batch_size: int, rng: np.random.Generator
) -> Iterator[Batch]:
  """One pass over the data, reshuffled, in batches of equal size.

  Images that do not fill a batch are left out of this pass: with one shape,
  there is only one compiled program.

  Args:
    data: the images.
    batch_size: images per batch.
    rng: generator for the shuffle; its state advances.

  Yields:
    ``len(data.labels) // batch_size`` batches.

  Example:
    >>> data = Batch(np.zeros((5, 8, 8, 1), np.float32), np.arange(5))
    >>> batches = list(epoch_batches(data, 2, np.random.default_rng(0)))
    >>> [len(batch.labels) for batch in batches]
    [2, 2]
  """
  order = rng.permutation(len(data.labels))
  for start in range(0, len(order) - batch_size + 1, batch_size):
    yield take(data, order[start : start + batch_size])
