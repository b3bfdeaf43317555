"""Goodput of very many chips that fail: one program, or learners apart.

The question of Decoupled DiLoCo: what share of the chips' time is training, where
some chip fails every few seconds? Virtual time; nothing here knows of gradients.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

YEAR = 365.25 * 86400.0


class Machines(NamedTuple):
  """Chips, and what a failure of one of them costs.

  The defaults of the last five are fitted, see docs/decoupled_diloco.md.

  Attributes:
    chips: how many there are in all.
    chip_mtbi: mean seconds between interruptions of one chip.
    slice_chips: chips that leave and come back together.
    slice_return: seconds until a slice that has failed is back.
    downscale: seconds that a program stands to go on without a slice.
    upscale: seconds that it stands to take a slice in again.
    restart: seconds that it stands where it can't go on without the slice.
  """

  chips: int
  chip_mtbi: float = YEAR
  slice_chips: int = 256
  slice_return: float = 3600.0
  downscale: float = 13.0
  upscale: float = 6.0
  restart: float = 68.0


class LearnerGoodput(NamedTuple):
  """What became of the chips' time.

  Attributes:
    goodput: the share of it that was training, from 0 to 1.
    uptime: the share of the time in which at least a quorum of learners trained.
    interruptions: how often some learner stood still.
  """

  goodput: float
  uptime: float
  interruptions: int


def simulate_learners(
  machines: Machines,
  learners: int = 1,
  *,
  quorum: int = 1,
  elastic: bool = True,
  duration: float = 14 * 86400.0,
  seed: int = 0,
) -> LearnerGoodput:
  """Lets chips fail at random, and counts the time in which they train.

  A failure stops the program that the chip is part of, and no other. An elastic one
  goes on without the chip's slice after ``downscale`` seconds, and stands for
  ``upscale`` seconds when the slice is back; a program that isn't stands for
  ``restart`` seconds. What happens to a program that stands is dealt with in the
  same pause. Learners wait for nobody, so that each is by itself.

  Args:
    machines: the chips, dealt out evenly to the learners.
    learners: programs of their own; 1 for data parallelism over all chips.
    quorum: learners that must train for a round to go on.
    elastic: whether a program goes on without a slice.
    duration: virtual seconds.
    seed: of the failures.

  Returns:
    The shares.

  Raises:
    ValueError: a number is not positive, the quorum is larger than the number of
      learners, or a learner has no whole slice.

  Example:
    >>> found = simulate_learners(Machines(chips=1_200_000), 8, duration=1e5)
    >>> 0.85 < found.goodput < 0.91
    True

  References:
    Douillard et al. 2026, `Decoupled DiLoCo for Resilient Distributed Pre-training
    <https://arxiv.org/abs/2604.21428>`_.
  """
  for name, value in machines._asdict().items():
    if not value > 0 or not math.isfinite(value):
      raise ValueError(f"machines.{name} must be positive, got {value!r}.")
  if not 0 < duration < math.inf:
    raise ValueError(f"duration must be positive, got {duration!r}.")
  if type(learners) is not int or learners < 1:
    raise ValueError(f"learners must be a positive integer, got {learners!r}.")
  if type(quorum) is not int or not 1 <= quorum <= learners:
    raise ValueError(
      f"quorum must be from 1 to learners={learners}, got {quorum!r}."
    )
  slices = machines.chips // learners // machines.slice_chips
  if slices < 1:
    raise ValueError(
      f"{machines.chips} chips make no slice of {machines.slice_chips} for each of"
      f" {learners} learners."
    )
  trained, pauses = 0.0, []
  for generator in np.random.default_rng(seed).spawn(learners):
    of_one, stood = _learner(machines, slices, elastic, duration, generator)
    trained += of_one
    pauses.extend(stood)
  return LearnerGoodput(
    trained / learners / duration,
    _uptime(pauses, learners, quorum, duration),
    len(pauses),
  )


def _learner(
  machines: Machines,
  slices: int,
  elastic: bool,
  duration: float,
  generator: np.random.Generator,
) -> tuple[float, list[tuple[float, float]]]:
  """The time in which all of one learner's slices trained, and its pauses."""
  rate = slices * machines.slice_chips / machines.chip_mtbi
  times = np.sort(
    generator.uniform(0, duration, generator.poisson(rate * duration))
  )
  which = generator.integers(slices, size=times.size)
  failures = list(zip(times.tolist(), which.tolist(), strict=True))
  back: list[tuple[float, int]] = []  # In order, as all take equally long.
  out: set[int] = set()
  trained, now = 0.0, 0.0
  pauses: list[tuple[float, float]] = []
  next_failure = next_return = 0
  while True:
    failure = math.inf
    if next_failure < len(failures):
      failure = failures[next_failure][0]
    returned = back[next_return][0] if next_return < len(back) else math.inf
    at = min(failure, returned, duration)
    if at > now:
      trained += (at - now) * (1 - len(out) / slices)
      now = at
    if at == duration:
      return trained, pauses
    if failure <= returned:
      number = failures[next_failure][1]
      next_failure += 1
      if number in out:
        continue
      if elastic:
        out.add(number)
        back.append((failure + machines.slice_return, number))
      pause = machines.downscale if elastic else machines.restart
    else:
      out.discard(back[next_return][1])
      next_return += 1
      pause = machines.upscale
    if at == now:  # Else it happened within a pause, which deals with it.
      now = min(duration, now + pause)
      pauses.append((at, now))


def _uptime(
  pauses: list[tuple[float, float]],
  learners: int,
  quorum: int,
  duration: float,
) -> float:
  """The share of the time in which enough learners do not stand."""
  if not pauses:
    return 1.0
  starts, ends = np.array(pauses).T
  at = np.concatenate([starts, ends])
  change = np.repeat([1, -1], starts.size)
  order = np.argsort(at, kind="stable")
  standing = np.cumsum(change[order])
  until = np.append(at[order][1:], duration)
  down = (until - at[order])[learners - standing < quorum].sum()
  return 1.0 - float(down) / duration
