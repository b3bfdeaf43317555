"""Recommends how many gradients to aggregate, for given latencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_dist.simulate.engines.array_engine import Lots
from optax_dist.simulate.latency.distributions import Empirical, Latency
from optax_dist.simulate.latency.hosts import Scaled
from optax_dist.simulate.latency.recording import Recording
from optax_dist.simulate.strategy import Strategy

# Replicas in all simulations that run side by side.
_AT_ONCE = 200_000
_LEVEL = 95


class Candidate(NamedTuple):
  """A number of gradients to aggregate, and its simulated results.

  Attributes:
    replicas_to_aggregate: the number of gradients.
    steps_per_second: the mean over the repetitions, like all that follow.
    gradients_per_second: applied gradients per second.
    wasted: the share of all replicas' time spent on dropped gradients.
    progress: steps per second, weighted by `weight_of_step`.
    low, high: the interval of the progress in 95 % of the repetitions.
    best: the share of the repetitions in which it is the best candidate.
  """

  replicas_to_aggregate: int
  steps_per_second: float
  gradients_per_second: float
  wasted: float
  progress: float
  low: float
  high: float
  best: float


class Plan(NamedTuple):
  """A recommendation, and its uncertainty.

  Attributes:
    replicas: number of replicas.
    noise_scale: the noise scale used for the weights.
    candidates: in rising order.
    recommended: the candidate with the most progress.
    best_low, best_high: the interval of the best number in 95 % of the
      repetitions.
    repetitions: number of repetitions.
    resampled: whether each drew its times from the recorded ones (a bootstrap),
      so that the interval includes the uncertainty of the recording, and not
      only that of the simulation.
  """

  replicas: int
  noise_scale: float
  candidates: tuple[Candidate, ...]
  recommended: Candidate
  best_low: int
  best_high: int
  repetitions: int
  resampled: bool

  @property
  def runner_up(self) -> Candidate | None:
    """The candidate with the next most progress; None if there is one only."""
    others = [c for c in self.candidates if c is not self.recommended]
    return max(others, key=lambda c: c.progress, default=None)

  @property
  def reason(self) -> str:
    """Why the runner-up was not recommended, in words."""
    best, other = self.recommended, self.runner_up
    if other is None:
      return "there is nothing else"
    pace = best.steps_per_second / other.steps_per_second
    worth = best.progress / other.progress / pace
    times = lambda ratio: (
      f"{100 * abs(ratio - 1):.3g} % {'more' if ratio > 1 else 'less'}"
    )
    return (
      f"its steps are worth {times(worth)} than those from"
      f" {other.replicas_to_aggregate}, and there are {times(pace)} of them"
    )

  def report(self) -> dict[str, Any]:
    """Everything as plain numbers, for JSON."""
    noise = self.noise_scale
    return self._asdict() | {
      "noise_scale": noise if math.isfinite(noise) else None,
      "candidates": [c._asdict() for c in self.candidates],
      "recommended": self.recommended._asdict(),
      "runner_up": self.runner_up and self.runner_up._asdict(),
      "reason": self.reason,
    }


def weight_of_step(
  gradients: np.ndarray, replicas: int, noise_scale: float
) -> np.ndarray:
  """The value of a step with this many gradients; 1 with all replicas.

  A step with k gradients makes k / (k + B) of the progress of a noiseless one,
  where B, the noise scale, is the number of gradients at which their noise is
  as large as their mean. Far below B, doubling the gradients doubles the
  progress; far above B, it changes little.

  Args:
    gradients: number of gradients in the step.
    replicas: number of gradients at which a step has weight 1.
    noise_scale: B, in gradients of one replica; infinite to count gradients.

  Returns:
    The weights, float64, of the shape of `gradients`.

  Source: McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch
  Training, 2018, equation 2.6.

  Example:
    >>> weight_of_step(np.array([4, 8]), 8, np.inf)
    array([0.5, 1. ])
    >>> weight_of_step(np.array([4, 8]), 8, 8.0).round(3)
    array([0.667, 1.   ])
  """
  if math.isinf(noise_scale):
    return gradients / replicas
  whole = replicas / (replicas + noise_scale)
  return gradients / (gradients + noise_scale) / whole


def plan(
  latency: Latency,
  replicas: int,
  *,
  noise_scale: float | None = None,
  cancel: bool = False,
  max_staleness: int = 0,
  communication: float | Callable[[int], float] = 0.0,
  steps: int = 200,
  repetitions: int = 100,
  seed: int = 0,
  progress: Callable[[float], None] = lambda share: None,
) -> Plan:
  """Recommends how many gradients to aggregate in a step.

  Args:
    latency: how long a gradient takes on each host; recorded times are
      resampled for each repetition.
    replicas: number of replicas.
    noise_scale: see `weight_of_step`; None for the number of replicas, as if
      the job were sized so that larger batches just begin to pay less.
    cancel: whether late replicas drop their work at once.
    max_staleness: largest staleness, in steps, at which a gradient still
      counts.
    communication: seconds from a commit until its parameters are available; or
      a function of the number of gradients in a step.
    steps: number of steps in each simulation.
    repetitions: simulations of each number; fewer if there are many replicas,
      but at least 20.
    seed: equal seeds give equal plans.
    progress: called with the fraction that is done.

  Returns:
    The plan.

  Raises:
    ValueError: a number is out of range.

  Example:
    >>> from optax_dist import simulate
    >>> latency = simulate.parse_latency("bernoulli:1,10,0.01")
    >>> plan(latency, 8, cancel=True).recommended.replicas_to_aggregate
    7
  """
  noise = float(replicas if noise_scale is None else noise_scale)
  ks = np.array(_candidates(replicas))
  times = [
    communication(int(k)) if callable(communication) else communication
    for k in ks
  ]
  for name, value, least in (
    ("replicas", replicas, 1),
    ("max_staleness", max_staleness, 0),
    ("communication", min(times), 0),
    ("steps", steps, 1),
    ("repetitions", repetitions, 2),
    ("seed", seed, 0),
  ):
    if not least <= value < math.inf:
      raise ValueError(f"{name} must be at least {least}, got {value!r}.")
  if not noise >= 0:
    raise ValueError(f"noise_scale must be at least 0, got {noise_scale!r}.")
  strategy = Strategy("plan", 1, max_staleness, 1, cancel)
  each = len(ks) * replicas
  repetitions = min(repetitions, max(20, _AT_ONCE // each))
  rngs = [
    np.random.default_rng(s)
    for s in np.random.SeedSequence(seed).spawn(repetitions + 1)
  ]
  of_hosts = rngs.pop()
  hosts = latency.hosts(replicas, of_hosts)
  at_once = max(1, _AT_ONCE // each)
  rates, wasted = [], []
  for first in range(0, repetitions, at_once):
    part = rngs[first : first + at_once]
    rate, waste = _simulate(
      strategy,
      latency,
      hosts,
      ks,
      part,
      np.array(times, np.float64),
      steps,
      lambda share, done=first, size=at_once: progress(  # type: ignore[misc]
        min((done + share * size) / repetitions, 1.0)
      ),
    )
    rates.append(rate)
    wasted.append(waste)
  return _conclude(
    ks,
    replicas,
    noise,
    np.concatenate(rates),
    np.concatenate(wasted),
    isinstance(latency, Recording)
    or any(_resampled(h, rngs[0]) is not h for h in hosts),
  )


def _candidates(n: int) -> list[int]:
  """All numbers, or, if there are many, those closest to all replicas."""
  if n <= 32:
    return list(range(1, n + 1))
  backups = {0, 1, 2, 3, 4, 5, 6, 7, 8}
  backups |= {round(n * share) for share in np.geomspace(8 / n, 1 - 1 / n, 16)}
  return sorted(n - b for b in backups if b < n)


def _simulate(
  strategy: Strategy,
  latency: Latency,
  hosts: Sequence[Latency],
  ks: np.ndarray,
  rngs: Sequence[np.random.Generator],
  communication: np.ndarray,
  steps: int,
  progress: Callable[[float], None],
) -> tuple[np.ndarray, np.ndarray]:
  """Steps per second and wasted share, both `[repetitions, candidates]`."""
  n, width = len(hosts), 2 * steps
  table = np.stack(
    [
      np.stack([h.draw(rng, width) for h in _drawn_anew(latency, hosts, rng)])
      for rng in rngs
    ]
  )
  simulations = len(rngs) * len(ks)
  # All candidates of a repetition get the same latencies, so that they differ
  # by their number and not by chance.
  flat = table.reshape(-1, width)
  row = np.arange(len(rngs) * n).reshape(len(rngs), 1, n)
  of = np.broadcast_to(row, (len(rngs), len(ks), n)).ravel()
  at = np.zeros(of.size, np.int64)

  def take(who: np.ndarray) -> np.ndarray:
    values = flat[of[who], at[who] % width]
    at[who] += 1
    return values

  lots = Lots(
    strategy,
    simulations,
    n,
    take,
    np.tile(communication, len(rngs)).repeat(n),
    replicas_to_aggregate=np.tile(ks, len(rngs)),
  )
  time = np.zeros(simulations)
  for step in range(steps):
    time = lots.commit()
    progress((step + 1) / steps)
  shape = len(rngs), len(ks)
  stale = lots.seconds["stale"].reshape(simulations, n).sum(axis=1)
  return (steps / time).reshape(shape), (stale / time / n).reshape(shape)


def _drawn_anew(
  latency: Latency, hosts: Sequence[Latency], rng: np.random.Generator
) -> Sequence[Latency]:
  """The hosts of one repetition; correlated times stay together."""
  if isinstance(latency, Recording):
    return latency.resampled(rng).hosts(len(hosts), rng)
  return [_resampled(host, rng) for host in hosts]


def _resampled(host: Latency, rng: np.random.Generator) -> Latency:
  """Resamples the recorded times."""
  match host:
    case Empirical():
      return Empirical(host.draw(rng, host.support.size))
    case Scaled():
      base = _resampled(host.base, rng)
      return host if base is host.base else Scaled(base, host.factor)
  return host


def _conclude(
  ks: np.ndarray,
  n: int,
  noise: float,
  rates: np.ndarray,
  wasted: np.ndarray,
  resampled: bool,
) -> Plan:
  values = rates * weight_of_step(ks, n, noise)
  best = ks[np.argmax(values, axis=1)]
  outside = (100 - _LEVEL) / 2, 50 + _LEVEL / 2
  low, high = np.percentile(values, outside, axis=0)
  candidates = tuple(
    Candidate(
      int(k),
      float(rates[:, i].mean()),
      float(k * rates[:, i].mean()),
      float(wasted[:, i].mean()),
      float(values[:, i].mean()),
      float(low[i]),
      float(high[i]),
      float((best == k).mean()),
    )
    for i, k in enumerate(ks)
  )
  ends = np.percentile(best, outside, method="closest_observation")
  return Plan(
    n,
    noise,
    candidates,
    max(candidates, key=lambda c: c.progress),
    int(ends[0]),
    int(ends[1]),
    len(rates),
    resampled,
  )
