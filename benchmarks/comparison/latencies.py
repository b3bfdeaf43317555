"""How long the replicas of a benchmark pretend to compute."""

import dataclasses

import numpy as np

from optax_dist import simulate


@dataclasses.dataclass(frozen=True)
class Outliers:
  """Exponential, but some draws take a multiple; a `simulate.Latency`.

  Attributes:
    mean: of all draws.
    share: of the draws that take longer.
    factor: how many times longer.
  """

  mean: float
  share: float = 0.1
  factor: float = 10.0

  @property
  def usual(self) -> float:
    """The mean of the other draws."""
    return self.mean / (1 - self.share + self.share * self.factor)

  def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
    """Draws values."""
    times = np.where(rng.random(size) < self.share, self.factor, 1.0)
    return times * rng.exponential(self.usual, size)

  def hosts(self, n: int, rng: np.random.Generator) -> list["Outliers"]:
    """All alike."""
    return [self] * n


def parse(text: str) -> simulate.Latency:
  """Reads `outliers:MEAN`, or what `optax-dist simulate` takes."""
  name, _, mean = text.partition(":")
  if name == "outliers":
    return Outliers(float(mean))
  return simulate.parse_latency(text)
