"""The network between replicas: how long an exchange takes."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Network:
  """The network between replicas, or between groups of chips.

  Attributes:
    latency: seconds that a message of any size takes one way.
    bandwidth: bytes per second into and out of each of them.

  Raises:
    ValueError: a number is out of range.

  Example:
    >>> Network(latency=0.0, bandwidth=1e9).all_reduce(1e9, 2)
    1.0
  """

  latency: float = 0.0
  bandwidth: float = math.inf

  def __post_init__(self) -> None:
    if not 0 <= self.latency < math.inf:
      raise ValueError(
        f"latency must be a finite number of at least 0, got {self.latency!r}."
      )
    if not self.bandwidth > 0:
      raise ValueError(f"bandwidth must be above 0, got {self.bandwidth!r}.")

  def all_reduce(self, nbytes: float, members: int) -> float:
    """Seconds until n members have the mean, by reduce-scatter and all-gather.

    Each sends and receives (n - 1) / n of the bytes twice, in parallel.
    """
    if members < 2:
      return 0.0
    return 2 * self.latency + moved(nbytes, members) / self.bandwidth


def moved(nbytes: float, members: int) -> float:
  """Bytes that each of n members sends and receives in an all-reduce.

  Example:
    >>> moved(1e6, 4)
    1500000.0
  """
  return 2 * (members - 1) / members * nbytes
