"""Order statistics of step times, to check the simulator against.

They hold if every replica restarts at each commit: without backups, or if late
replicas drop their work at once (`cancel`). Replicas that finish stale
gradients are slower than that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from scipy import integrate, special

from optax_dist.simulate.latency import distributions
from optax_dist.simulate.latency.distributions import Latency


def exponential_step_time(mean: float, k: int, n: int) -> float:
  """The expected time of the k-th of n, for exponential latencies.

  Args:
    mean: mean of one latency.
    k: number of replicas waited for.
    n: number of replicas.

  Returns:
    `mean * (H_n - H_(n-k))`, with H the harmonic numbers.

  Example:
    >>> round(exponential_step_time(1.0, 8, 8), 4)
    2.7179
  """
  return mean * sum(1 / i for i in range(n - k + 1, n + 1))


def step_times(hosts: Sequence[Latency]) -> np.ndarray:
  """The expected time of the k-th arrival, for each k.

  It is the integral over t of the probability that fewer than k have arrived by
  t: a sum if the latencies have finitely many values, otherwise by quadrature.

  Args:
    hosts: the latency of each of n replicas.

  Returns:
    Seconds, float64 `[n]`; infinite if the expectation is.

  Example:
    >>> from optax_dist import simulate
    >>> step_times([simulate.parse_latency("exponential:1")] * 2)
    array([0.5, 1.5])
  """
  alike = list(Counter(hosts).items())

  def fewer(t: float) -> np.ndarray:
    """The probability that fewer than k have arrived by t, for each k."""
    arrived = np.ones(1)
    for host, count in alike:
      arrived = np.convolve(arrived, _binomial(count, host.survival(t)))
    return np.cumsum(arrived)[:-1]

  supports = [host.support for host, _ in alike]
  if all(values is not None for values in supports):
    points = np.unique(np.concatenate([[0.0], *supports]))
    widths = np.diff(points)
    return sum(
      (w * fewer(t) for w, t in zip(widths, points, strict=False)),
      start=np.zeros(len(hosts)),
    )
  times = _integral(fewer, alike, len(hosts))
  times[_infinite(alike, len(hosts)) :] = math.inf
  return times


def best_replicas_to_aggregate(
  hosts: Sequence[Latency], progress: Callable[[np.ndarray], np.ndarray]
) -> int:
  """The number to aggregate for the most progress per second.

  Args:
    hosts: the latency of each of n replicas.
    progress: of a step, as a function of its number of gradients.

  Returns:
    The number, from 1 to n.
  """
  times = step_times(hosts)
  k = np.arange(1, len(hosts) + 1)
  return int(np.argmax(progress(k) / times)) + 1


def _binomial(n: int, survival: float) -> np.ndarray:
  """Probabilities of 0 to n arrivals if each is missing with `survival`."""
  k = np.arange(1, n + 1)
  # At least k of n; exact in both tails.
  at_least = special.betainc(k, n - k + 1, 1 - survival)
  fewer = special.betainc(n - k + 1, k, survival)
  up, down = np.append(1.0, at_least), np.append(fewer, 1.0)
  # Differences of whichever is small, for accuracy.
  low = down - np.append(0.0, fewer)
  high = up - np.append(at_least, 0.0)
  return np.where(down < 0.5, low, high)


def _integral(
  f: Callable[[float], np.ndarray],
  alike: Sequence[tuple[Latency, int]],
  n: int,
) -> np.ndarray:
  """The integral of a function that falls from 1 to 0."""
  # Points where it changes: the survival of each host at some levels.
  levels = (1 - 1e-9, 0.9, 0.5, 0.1, 1e-3, 1e-6)
  points = sorted(
    {_quantile(host, level) for host, _ in alike for level in levels}
  )
  total = np.zeros(n)
  for a, b in zip([0.0, *points[:-1]], points, strict=True):
    if b > a:
      total += integrate.quad_vec(f, a, b, epsrel=1e-8, limit=2000)[0]
  # The tail falls by a power at the slowest: use a logarithmic grid.
  last = points[-1]
  for i in range(200):
    a, b = last * 2.0**i, last * 2.0 ** (i + 1)
    part = integrate.quad_vec(f, a, b, epsrel=1e-6)[0]
    total += part
    if (part <= 1e-7 * total).all():
      break
  return total


def _quantile(host: Latency, survival: float) -> float:
  most = 1.0
  while host.survival(most) > survival:
    most *= 2
  return distributions.time_of(host, survival, most)


def _infinite(alike: Sequence[tuple[Latency, int]], n: int) -> int:
  """How many arrivals have a finite expectation.

  The survival function of the k-th of n falls as a power n - k + 1.
  """
  slow = [
    (count, _tail_power(host)) for host, count in alike if host.mean == math.inf
  ]
  if not slow:
    return n
  # All but the slowest ones arrive; a slow one has a finite expected arrival
  # time while the powers of those left add up to more than 1.
  powers = sorted(power for count, power in slow for _ in range(count))
  left = 0.0
  for i, power in enumerate(powers):
    left += power
    if left > 1:
      return n - i
  return n - len(powers)


def _tail_power(host: Latency) -> float:
  """The power of time with which the tail of the survival function falls."""
  a, b = host.survival(1e40), host.survival(1e50)
  return math.log10(a / b) / 10 if a > 0 and b > 0 else math.inf
