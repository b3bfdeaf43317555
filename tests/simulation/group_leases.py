"""Schedules of replicas of several processes whose samples are leased."""

from __future__ import annotations

from tests.simulation import faults, groups, leases

run = groups.run


def schedule(seed: int, steps: int = 8) -> faults.Schedule:
  """The schedule of a seed."""
  return leases.with_data(groups.schedule(seed, steps), seed)
