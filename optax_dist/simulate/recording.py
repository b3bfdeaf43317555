"""Recorded times, drawn in blocks to keep their correlation.

A busy machine slows all replicas for a while, and a slow host stays slow. So
stretches of the recording are drawn instead of single times, the same ones for
all replicas (a moving block bootstrap).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np

from optax_dist.simulate.latency import Host

_LEAST_BLOCKS = 4


class Recording:
  """The times of replicas that trained together.

  Attributes:
    seconds: how long each gradient of each replica took.
    block: how many steps are drawn together.
    begins: the steps at which these begin.
    alone: the times of each replica that are drawn one by one, where there are
      too few steps.

  Example:
    >>> starts, seconds = [np.arange(40.0)] * 2, [np.linspace(1, 2, 40)] * 2
    >>> recording = Recording(starts, seconds, np.arange(40.0))
    >>> one, other = recording.hosts(2, np.random.default_rng(0))
    >>> bool((one.draw(None, 99) == other.draw(None, 99)).all())
    True
  """

  def __init__(
    self,
    starts: Sequence[np.ndarray],
    seconds: Sequence[np.ndarray],
    marks: np.ndarray,
  ):
    """Creates a recording.

    Args:
      starts: when each replica began each of its gradients, increasing.
      seconds: how long each gradient took.
      marks: when each step ended, increasing; stretches are cut there.

    Raises:
      ValueError: there are no replicas, or one has no times.
    """
    if not starts:
      raise ValueError("a recording needs at least one replica, got none.")
    self.seconds = [np.asarray(times, np.float64) for times in seconds]
    self._starts = [np.asarray(times, np.float64) for times in starts]
    self.marks = np.asarray(marks, np.float64)
    # The gradients of each replica between two marks, by index.
    self._at = [np.searchsorted(times, self.marks) for times in self._starts]
    self.block = self._usual_block()
    self.begins = np.arange(self.steps)
    self.alone = self.seconds

  @property
  def steps(self) -> int:
    """The number of steps to draw from."""
    return max(0, len(self.marks) - 1)

  def hosts(self, n: int, rng: np.random.Generator) -> list[Host]:
    """The times of each of n replicas; further replicas repeat the list."""
    seed = int(rng.integers(2**62))
    m = len(self.seconds)
    return [_Track(self, i % m, seed + i // m) for i in range(n)]

  def resampled(self, rng: np.random.Generator) -> Recording:
    """A bootstrap sample: as many blocks as fit into the recording."""
    made = copy.copy(self)
    made.alone = [rng.choice(times, times.size) for times in self.seconds]
    if self.steps:
      count = math.ceil(self.steps / self.block)
      made.begins = rng.integers(self.steps, size=count)
    return made

  def stretch(self, replica: int, begin: int) -> np.ndarray:
    """A replica's times in the block of steps from there on, cyclically."""
    at, steps = self._at[replica], self.steps
    end = begin + self.block
    times = self.seconds[replica][at[begin] : at[min(end, steps)]]
    if end > steps:
      more = self.seconds[replica][at[0] : at[end - steps]]
      times = np.concatenate([times, more])
    return times

  def has(self, replica: int) -> bool:
    """Whether a replica has times in the blocks to draw from."""
    return self.steps >= 2 * _LEAST_BLOCKS and any(
      self.stretch(replica, int(begin)).size for begin in self.begins
    )

  def _usual_block(self) -> int:
    """Twice the correlation length in steps, with a minimum."""
    steps = self.steps
    if steps < 2 * _LEAST_BLOCKS:
      return 1
    means = []
    for begin in range(steps):
      parts = [
        times[at[begin] : at[begin + 1]]
        for times, at in zip(self.seconds, self._at, strict=True)
      ]
      values = np.concatenate(parts)
      means.append(values.mean() if values.size else math.nan)
    if np.isnan(means).all():
      return 1
    series = np.array(means)
    series = np.where(np.isnan(series), np.nanmean(series), series)
    # With few gradients per step, a replica is only in one of several steps.
    rounds = steps * len(self.seconds)
    rounds //= max(1, sum(int(at[-1] - at[0]) for at in self._at))
    block = max(
      round(steps ** (1 / 3)), math.ceil(2 * _memory(series)), 4 * rounds
    )
    return int(min(block, max(1, steps // _LEAST_BLOCKS)))

  def __str__(self) -> str:
    mean = np.mean([times.mean() for times in self.seconds])
    return (
      f"{len(self.seconds)} recorded replicas, mean {mean:.4g} s,"
      f" in blocks of {self.block} steps"
    )


class _Track:
  """One replica's times, one stretch after the other."""

  def __init__(self, recording: Recording, replica: int, seed: int):
    self._recording, self._replica = recording, replica
    self._choice = np.random.default_rng(seed)
    self._in_blocks = recording.has(replica)
    self._rest = np.empty(0)

  def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
    """The next values; all replicas share the choice of stretches."""
    if not self._in_blocks:
      return rng.choice(self._recording.alone[self._replica], size)
    parts, have = [self._rest], self._rest.size
    while have < size:
      begin = self._choice.choice(self._recording.begins)
      parts.append(self._recording.stretch(self._replica, int(begin)))
      have += parts[-1].size
    values = np.concatenate(parts)
    self._rest = values[size:]
    return values[:size]


def _memory(series: np.ndarray) -> float:
  """The integrated correlation length of a series."""
  centered = series - series.mean()
  variance = float(centered @ centered)
  if variance <= 0:
    return 1.0
  total = 1.0
  for lag in range(1, max(2, len(series) // 4)):
    correlation = float(centered[:-lag] @ centered[lag:]) / variance
    if correlation < 2 / math.sqrt(len(series)):
      break
    total += 2 * correlation
  return total
