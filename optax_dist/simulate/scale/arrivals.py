"""Fast order statistics of many groups: the time until k of n have arrived."""

from __future__ import annotations

import functools
import math
import typing
from collections import Counter
from collections.abc import Hashable

import numpy as np
from scipy import signal, special

from optax_dist.simulate.latency import distributions
from optax_dist.simulate.latency.distributions import Latency

_HOSTS = 1000  # Number of hosts to sample their differences.
_POINTS = 4096
_CELLS = 1 << 16
_TAIL = 1e-10


class Arrivals:
  """The distribution of a group's time for some steps, on a grid.

  Groups are assumed to be independent, and to differ as the latency's hosts do.

  Example:
    >>> from optax_dist import simulate
    >>> arrivals = Arrivals(simulate.parse_latency("exponential:1"))
    >>> [round(arrivals.expected(k, 4), 3) for k in (1, 4)]
    [0.25, 2.083]
  """

  def __init__(self, latency: Latency, steps: int = 1):
    """Prepares the grid.

    Args:
      latency: latency of one step.
      steps: number of steps until a group arrives.
    """
    kinds = Counter(latency.hosts(_HOSTS, np.random.default_rng(0)))
    self.mean = steps * sum(
      host.mean * count / _HOSTS for host, count in kinds.items()
    )
    parts = [
      (count / _HOSTS, *_distribution(host, steps))
      for host, count in kinds.items()
    ]
    if len(parts) == 1:
      _, self._edges, self._below = parts[0]
    else:
      self._edges = np.unique(np.concatenate([edges for _, edges, _ in parts]))
      left = self._edges[:-1]
      self._below = sum(
        (share * _at(left, edges, below) for share, edges, below in parts),
        start=np.zeros(left.size),
      )
    self._widths = np.diff(self._edges)

  @functools.lru_cache(maxsize=1 << 14)  # noqa: B019
  def expected(self, k: int, n: int) -> float:
    """The expected seconds until the k-th of n groups arrives."""
    fewer = special.betainc(n - k + 1, k, 1 - self._below)
    return float(self._widths @ fewer)

  @functools.lru_cache(maxsize=1 << 14)  # noqa: B019
  def mean_of_first(self, k: int, n: int) -> float:
    """The expected mean arrival time of the first k of n groups."""
    if k == n:
      return self.mean
    p = self._below
    # The expectation of min(k, arrived), where arrived is binomial.
    some = n * p * (special.betainc(n - k + 1, k - 1, 1 - p) if k > 1 else 0)
    out = k - (some + k * special.betainc(k, n - k + 1, p))
    return float(self._widths @ out) / k


def _distribution(host: Latency, steps: int) -> tuple[np.ndarray, np.ndarray]:
  """Edges of intervals, and the probability of an arrival in each of them."""
  if steps == 1:
    if host.support is not None:
      return _exact(host)
    edges = _edges(host)
    middle = (edges[:-1] + edges[1:]) / 2
    return edges, 1 - np.array([host.survival(t) for t in middle])
  if host.support is not None and len(host.support) == 1:
    at = steps * float(host.support[0])
    return np.array([0.0, at]), np.array([0.0])
  return _sum(host, steps)


def _exact(host: Latency) -> tuple[np.ndarray, np.ndarray]:
  edges = np.concatenate([[0.0], host.support])
  return edges, 1 - np.array([host.survival(t) for t in edges[:-1]])


def _edges(host: Latency) -> np.ndarray:
  """A uniform grid where most arrive, and a geometric one beyond."""
  most = _quantile(host, 1e-3)
  last = _quantile(host, _TAIL)
  return np.concatenate(
    [
      np.linspace(0, most, 3 * _POINTS // 4, endpoint=False),
      np.geomspace(most, max(last, most * 1.001), _POINTS // 4),
    ]
  )


def _sum(host: Latency, steps: int) -> tuple[np.ndarray, np.ndarray]:
  """The sum of independent steps, by repeated convolution."""
  end = steps * host.mean + _quantile(host, _TAIL / steps) * math.sqrt(steps)
  width = end / _CELLS
  cells = np.arange(_CELLS + 1) * width
  # A few thousand evaluations suffice for a monotone function.
  points = np.unique(np.concatenate([np.linspace(0, end, 2049), _edges(host)]))
  below = 1 - np.array([host.survival(t) for t in points])
  mass = np.diff(np.interp(cells, points, below))
  mass = np.maximum(mass, 0) / mass.sum()
  total, power, left = None, mass, steps
  while left:
    if left & 1:
      total = power if total is None else _convolved(total, power)
    left >>= 1
    if left:
      power = _convolved(power, power)
  assert total is not None
  arrived = np.minimum(np.cumsum(total), 1.0)
  # A cell is represented by its middle, so a sum is the sum of middles.
  edges = np.concatenate([[0.0], (np.arange(_CELLS) + steps / 2) * width])
  keep = np.flatnonzero((arrived > _TAIL) & (arrived < 1 - _TAIL))
  if not keep.size:
    keep = np.array([int(np.argmax(arrived > 0.5))])
  first, last = keep[0], keep[-1] + 1
  # As few intervals as elsewhere, each represented by its mean.
  begins = np.arange(first, last, math.ceil((last - first) / _POINTS))
  lengths = np.diff(np.append(begins, last))
  means = np.add.reduceat(arrived[:last], begins) / lengths
  return (
    np.concatenate([[0.0], edges[1 + begins], edges[1 + last : 2 + last]]),
    np.concatenate([[0.0], means]),
  )


def arrivals(latency: Latency, steps: int = 1) -> Arrivals:
  """Like `Arrivals`, cached by the arguments."""
  return _kept(typing.cast(Hashable, latency), steps)


@functools.lru_cache(maxsize=64)
def _kept(latency: typing.Any, steps: int) -> Arrivals:
  return Arrivals(latency, steps)


def _convolved(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  return np.maximum(signal.fftconvolve(a, b)[:_CELLS], 0.0)


def _at(t: np.ndarray, edges: np.ndarray, below: np.ndarray) -> np.ndarray:
  at = np.searchsorted(edges, t, side="right") - 1
  return np.append(below, 1.0)[np.minimum(at, below.size)]


def _quantile(host: Latency, survival: float) -> float:
  most = max(host.mean, 1e-12)
  while host.survival(most) > survival and most < 1e12 * host.mean:
    most *= 2
  return distributions.time_of(host, survival, most)
