"""Random numbers that a test has chosen."""

import math


class Draws:
  """Stands for a `numpy.random.Generator`; then nothing fails any more."""

  def __init__(self, failures=(), shares=()):
    """Sets the times until failures, and what `random` returns."""
    self.failures, self.shares = list(failures), list(shares)
    self.scales = []

  def exponential(self, scale):
    self.scales.append(scale)
    return self.failures.pop(0) if self.failures else math.inf

  def random(self):
    return self.shares.pop(0)
