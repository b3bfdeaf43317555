"""Latencies that differ from host to host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from optax_dist.simulate.latency.distributions import Latency


class PerHost:
  """A separate latency for each host; further hosts repeat the list."""

  def __init__(self, latencies: Sequence[Latency]):
    """Creates it from at least one latency.

    Raises:
      ValueError: there is none.
    """
    if not latencies:
      raise ValueError("PerHost needs at least one latency, got none.")
    self.latencies = list(latencies)

  support = None

  @property
  def mean(self) -> float:
    return float(np.mean([latency.mean for latency in self.latencies]))

  def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
    """Draws values of randomly chosen hosts, a float64 array `[size]`."""
    which = rng.integers(len(self.latencies), size=size)
    values = np.empty(size)
    for i, latency in enumerate(self.latencies):
      values[which == i] = latency.draw(rng, int((which == i).sum()))
    return values

  def survival(self, t: float) -> float:
    """The probability that a randomly chosen host takes longer than `t`."""
    return float(np.mean([x.survival(t) for x in self.latencies]))

  def hosts(self, n: int, rng: np.random.Generator) -> list[Latency]:
    """The latency of each of n hosts."""
    return [self.latencies[i % len(self.latencies)] for i in range(n)]

  def __str__(self) -> str:
    return f"{len(self.latencies)} hosts, mean {self.mean:.4g} s"


@dataclasses.dataclass(frozen=True)
class Scaled:
  """A latency that is `factor` times longer."""

  base: Latency
  factor: float

  @property
  def mean(self) -> float:
    return self.factor * self.base.mean

  @property
  def support(self) -> np.ndarray | None:
    values = self.base.support
    return None if values is None else self.factor * values

  def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
    """Draws values, a float64 array `[size]`."""
    return self.factor * self.base.draw(rng, size)

  def survival(self, t: float) -> float:
    """The probability of taking longer than `t` seconds."""
    return self.base.survival(t / self.factor)

  def hosts(self, n: int, rng: np.random.Generator) -> list[Latency]:
    """The latency of each of n hosts."""
    return [Scaled(host, self.factor) for host in self.base.hosts(n, rng)]

  def __str__(self) -> str:
    return f"{self.factor:g} times {self.base}"


@dataclasses.dataclass(frozen=True)
class SlowHosts:
  """Some hosts are permanently slow.

  Attributes:
    share: the fraction of slow hosts, 0 to 1.
    factor: how many times longer they take.
    base: the latency of the others.

  Raises:
    ValueError: share or factor is invalid.

  Example:
    >>> from optax_dist.simulate import parse_latency
    >>> rng = np.random.default_rng(0)
    >>> slow = parse_latency("slow-hosts:0.25,10,constant:2")
    >>> sorted(host.mean for host in slow.hosts(4, rng))
    [2.0, 2.0, 2.0, 20.0]
  """

  share: float
  factor: float
  base: Latency
  support = None

  def __post_init__(self) -> None:
    if not 0 <= self.share <= 1:
      raise ValueError(
        f"share of slow-hosts must be from 0 to 1, got {self.share:g}."
      )
    if not 0 < self.factor < math.inf:
      raise ValueError(
        "factor of slow-hosts must be a finite number above 0, got"
        f" {self.factor:g}."
      )

  @property
  def mean(self) -> float:
    return (1 + self.share * (self.factor - 1)) * self.base.mean

  def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
    """Draws values of randomly chosen hosts, a float64 array `[size]`."""
    slow = np.where(rng.random(size) < self.share, self.factor, 1.0)
    return slow * self.base.draw(rng, size)

  def survival(self, t: float) -> float:
    """The probability that a randomly chosen host takes longer than `t`."""
    slow = self.base.survival(t / self.factor)
    return self.share * slow + (1 - self.share) * self.base.survival(t)

  def hosts(self, n: int, rng: np.random.Generator) -> list[Latency]:
    """The latency of each of n hosts; the slow ones are chosen by `rng`."""
    hosts = self.base.hosts(n, rng)
    for i in rng.permutation(n)[: round(self.share * n)]:
      hosts[i] = Scaled(hosts[i], self.factor)
    return hosts

  def __str__(self) -> str:
    return f"slow-hosts:{self.share:g},{self.factor:g},{self.base}"
