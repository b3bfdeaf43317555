"""The rules of Decoupled DiLoCo: whose turn it is, how long to wait, which weights.

No learner waits: learners train on, and submit their progress. The fragments take
turns, a round for each. The learner whose turn comes first begins a round, and all
others are called to contribute their progress so far. (If each contributed at its own
turn, a fragment would be merged several times in a period, each time from a few
learners, and later contributions would be stale.) A round is merged once it has a
quorum and either all live learners are in it or the grace window after the quorum is
over. The window is a share of the slack: the time for which learners train on anyway
before they mix in the result.

Pure functions: no arrays, no I/O and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from optax_dist.coordinator.protocol.entries import Fragments


def turn(config: Fragments, fragment: int) -> int:
  """A learner's steps between the turns of the previous fragment and this one.

  All fragments together take one period, so that their turns are spread over
  it, as in ``streaming_updates``.

  Example:
    >>> [turn(Fragments(fragments=3, period=10), fragment) for fragment in range(3)]
    [3, 3, 4]
  """
  at = lambda n: n * config.period // config.fragments
  return at(fragment + 1) - at(fragment)


def token_weight(tokens: int, steps: int) -> float:
  """The weight of a contribution: its tokens, times its tokens per step.

  The first is the amount of training, the second the quality of each step.

  Example:
    >>> token_weight(tokens=1000, steps=10)
    100000.0
  """
  return tokens * (tokens / steps)


def shares(contributions: Iterable[tuple[int, int, int]]) -> list[float]:
  """The weight of each contribution to a merge; they add up to 1.

  Args:
    contributions: tokens, steps, and staleness in rounds of each.

  Example:
    >>> shares([(1000, 4, 0), (1000, 4, 1)])
    [0.6666666666666666, 0.3333333333333333]
  """
  weights = [token_weight(t, n) / (1 + late) for t, n, late in contributions]
  total = math.fsum(weights)
  # Without any tokens, all weights are equal.
  return [w / total if total else 1 / len(weights) for w in weights]


def grace_window(
  config: Fragments,
  step_seconds: Iterable[float],
  waited: float,
  merge_seconds: float,
) -> float:
  """Seconds to wait after the quorum, without delaying any learner.

  Args:
    config: the configuration of the run.
    step_seconds: the step time of each live learner.
    waited: seconds since the first contribution to the round.
    merge_seconds: estimated time of the merge.

  Example:
    >>> config = Fragments(fragments=2, period=4, overlap=2, safety=0.5)
    >>> grace_window(config, [1.0, 3.0], waited=0.5, merge_seconds=0.5)
    0.5
  """
  # The fastest learner needs the result first.
  fastest = min(step_seconds, default=0.0)
  slack = config.overlap * fastest - waited - merge_seconds
  return config.safety * max(0.0, slack)
