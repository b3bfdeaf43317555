"""Recommends how many gradients to aggregate, for given latencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from optax_dist._internal import checks
from optax_dist.simulate.engine import MOST_SEED, simulate_timing
from optax_dist.simulate.latency import Latency, check_latency
from optax_dist.simulate.recording import Recording
from optax_dist.simulate.strategy import sync_replicas
from optax_dist.simulate.timing import INTERVAL

# The default number of steps of a simulation, times its replicas.
_ARRIVALS = 1600
# After so many repetitions, candidates with less than this share of the best
# progress are not simulated again.
_FIRST, _FAR = 5, 0.85


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
    """Why the recommended number is better than the runner-up, in words."""
    best, other = self.recommended, self.runner_up
    if other is None:
      return "there is nothing else to choose"
    pace = best.steps_per_second / other.steps_per_second - 1
    each = best.progress / other.progress / (pace + 1) - 1
    percent = lambda change, more, less: (
      f"{abs(change):.1%} {more if change >= 0 else less}".replace("%", " %")
    )
    return (
      f"k = {best.replicas_to_aggregate}: each step makes"
      f" {percent(each, 'more', 'less')} progress, at"
      f" {percent(pace, 'more', 'fewer')} steps/s, than"
      f" k = {other.replicas_to_aggregate}"
    )


def weight_of_step(gradients: int, replicas: int, noise_scale: float) -> float:
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
    The weight.

  Source: McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch
  Training, 2018, equation 2.6.

  Example:
    >>> weight_of_step(4, 8, math.inf)
    0.5
    >>> round(weight_of_step(4, 8, 8.0), 3)
    0.667
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
  max_staleness: int | None = 0,
  communication: float = 0.0,
  steps: int | None = None,
  repetitions: int = 20,
  seed: int = 0,
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
      counts; None for no limit.
    communication: seconds from a commit until its parameters are available.
    steps: number of steps in each simulation, of which the first fifth is not
      measured; None for 200 with 8 replicas, and fewer with more of them.
    repetitions: simulations of each number of gradients; numbers that are far
      from the best in the first ones are not simulated again.
    seed: equal seeds give equal plans.

  Returns:
    The plan.

  Raises:
    ValueError: a number is out of range.

  Example:
    >>> from optax_dist import simulate
    >>> latency = simulate.parse_latency("bernoulli:1,10,0.01")
    >>> plan(latency, 8, cancel=True, steps=50).recommended.replicas_to_aggregate
    7
  """
  check_latency("latency", latency)
  sync_replicas(1, max_staleness=max_staleness, cancel=cancel)
  replicas = checks.count("replicas", replicas)
  noise = replicas if noise_scale is None else noise_scale
  checks.number("noise_scale", noise, infinite=True)
  checks.number("communication", communication)
  default = max(20, _ARRIVALS // replicas)
  steps = checks.count("steps", default if steps is None else steps)
  repetitions = checks.count("repetitions", repetitions, least=2)
  seed = checks.count("seed", seed, least=0, most=MOST_SEED)
  weights = {k: weight_of_step(k, replicas, noise) for k in _counts(replicas)}

  def measure(k: int, drawn: Latency, seed: int) -> _Measured:
    timing = simulate_timing(
      sync_replicas(k, max_staleness=max_staleness, cancel=cancel),
      drawn,
      replicas,
      steps=steps,
      seed=seed,
      communication=communication,
    )
    times = np.append(0.0, timing.commit_times)[steps // 5 :]
    rate = (times.size - 1) / (times[-1] - times[0])
    return _Measured(rate, timing.goodput().share("dropped"))

  measured = _repeat(latency, weights, measure, repetitions, seed)
  # The others are far from the best, and were not repeated as often.
  close = [k for k, all_ in measured.items() if len(all_) == repetitions]
  progress = [[weights[k] * m.rate for m in measured[k]] for k in close]
  best = np.array(close)[np.argmax(progress, axis=0)]
  candidates = tuple(
    _candidate(k, weights[k], all_, best) for k, all_ in measured.items()
  )
  low, high = np.percentile(best, INTERVAL, method="closest_observation")
  return Plan(
    replicas,
    noise,
    candidates,
    max((c for c in candidates if c[0] in close), key=lambda c: c.progress),
    int(low),
    int(high),
    repetitions,
    isinstance(latency, Recording),
  )


class _Measured(NamedTuple):
  """Steps per second of a simulation, and the share of time that it wasted."""

  rate: float
  wasted: float


def _repeat(
  latency: Latency,
  weights: Mapping[int, float],
  measure: Callable[[int, Latency, int], _Measured],
  repetitions: int,
  seed: int,
) -> dict[int, list[_Measured]]:
  """Measures candidates repeatedly, but drops those that are far from the best."""
  measured: dict[int, list[_Measured]] = {k: [] for k in weights}
  progress = lambda k: (
    weights[k] * float(np.mean([m.rate for m in measured[k]]))
  )
  close = list(weights)
  for i, source in enumerate(np.random.SeedSequence(seed).spawn(repetitions)):
    rng = np.random.default_rng(source)
    drawn = latency
    if isinstance(latency, Recording):
      drawn = latency.resampled(rng)
    # All candidates get the same latencies, so that results differ by the number of
    # gradients, and not by chance.
    common = int(rng.integers(2**32))
    for k in close:
      measured[k].append(measure(k, drawn, common))
    if i + 1 == _FIRST:
      most = max(map(progress, close))
      close = [k for k in close if progress(k) >= _FAR * most]
  return measured


def _candidate(
  k: int, weight: float, measured: Sequence[_Measured], best: np.ndarray
) -> Candidate:
  rates = np.array([m.rate for m in measured])
  low, high = np.percentile(weight * rates, INTERVAL)
  rate = float(np.mean(rates))
  return Candidate(
    k,
    rate,
    k * rate,
    float(np.mean([m.wasted for m in measured])),
    weight * rate,
    float(low),
    float(high),
    float((best == k).mean()),
  )


def _counts(n: int) -> list[int]:
  """The numbers of gradients to try: all, or if n is large, mostly those close to n."""
  if n <= 16:
    return list(range(1, n + 1))
  backups = {0, 1, 2, 3, 4}
  backups |= {round(n * share) for share in np.geomspace(5 / n, 1 - 1 / n, 16)}
  return sorted(n - b for b in backups)
