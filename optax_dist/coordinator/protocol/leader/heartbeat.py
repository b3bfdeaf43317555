"""Tells the store that there is a leader, for those that can't reach it."""

from __future__ import annotations

import math

from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.effects import Put
from optax_dist.coordinator.protocol.entries import Beat
from optax_dist.coordinator.protocol.log import LEADER_KEY, Count


class Heartbeat:
  """Numbered beats, four in each `Deadlines.pace`.

  Attributes:
    due: when the next one is.
  """

  def __init__(self, config: Config, term: int, count: Count):
    """Starts with a beat that is due."""
    self._config, self._term, self._count = config, term, count
    self.due = -math.inf
    self._number = 0

  def beat(self, now: float, position: int, untouched: bool) -> Put:
    """The next beat.

    Args:
      now: the time.
      position: the next one of the log; it says where others begin to read.
      untouched: whether no step was committed; then they read all of it.
    """
    config = self._config
    self.due = now + config.deadlines.pace / 4
    self._number += 1
    first = 0
    if not untouched:
      first = max(0, position // config.block - 1) * config.block
    beat = Beat(self._term, config.process, config.address, self._number, first)
    return Put(self._count(), LEADER_KEY, beat, overwrite=True)
