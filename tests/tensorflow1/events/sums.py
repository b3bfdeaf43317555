"""The sums of TensorFlow's conditional accumulators, to the bit.

Gradients are added one by one, in order of arrival and in their own dtype, and the
mean is one division by the count in that dtype.
"""

import numpy as np

from optax_dist.quorum.arguments import accepts

#: Infinities and NaN are recorded too.
_as_in_kernels = np.errstate(over="ignore", invalid="ignore")


class DenseSum:
  """What a `ConditionalAccumulator` computes.

  Attributes:
    step: its time step: older gradients are ignored.
    count: number of accumulated gradients.
  """

  def __init__(self, step=0):
    self.step, self.count, self._total = step, 0, None

  @_as_in_kernels
  def apply(self, gradient, local_step):
    if accepts(local_step, self.step):
      # The first one is copied: 0 + -0. would lose the sign of zero.
      self._total = self._total + gradient if self.count else gradient
      self.count += 1

  def take(self, reduction="MEAN"):
    total, count = np.asarray(self._total), self.count
    self.step, self.count = self.step + 1, 0
    return total / total.dtype.type(count) if reduction == "MEAN" else total


class SparseSum:
  """What a `SparseConditionalAccumulator` computes.

  Attributes:
    step: its time step: older gradients are ignored.
    count: number of accumulated gradients.
  """

  def __init__(self, step=0):
    self.step, self.count, self._rows = step, 0, []
    self._none = np.zeros(0)

  @_as_in_kernels
  def apply(self, indices, values, local_step):
    if accepts(local_step, self.step):
      new = [(i, v, 1) for i, v in zip(indices, values, strict=True)]
      self._rows = _merged(self._rows, new)
      self._none = values[:0]
      self.count += 1

  def take(self, reduction="MEAN"):
    """Returns indices, and each row divided by the number of its gradients."""
    divisor = lambda x, n: x.dtype.type(n if reduction == "MEAN" else 1)
    indices = np.array([i for i, _, _ in self._rows])
    values = [(v / divisor(v, n))[None] for _, v, n in self._rows]
    values = np.concatenate([self._none, *values])
    self.step, self.count, self._rows = self.step + 1, 0, []
    return indices, values


def _merged(old, new):
  """Walks through two lists of (index, value, count) at once, as TensorFlow does."""
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
