"""Schedules with a replica that is bad; the faults are those of another kind.

It yields NaN always or at times, never joins, or ends without leaving. What it does
wrong takes no sample and no step from the others (A22).
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from tests.simulation import faults, fragments, groups, leases, slots

WAYS = ("always", "always", "at times", "never joins", "ends")


class Bad:
  """Schedules of a kind, with a bad replica in each."""

  def __init__(self, kind: Any, ways: tuple[str, ...] = WAYS):
    self._kind, self._ways = kind, ways
    self.run = kind.run

  def schedule(self, seed: int) -> faults.Schedule:
    """The schedule of a seed."""
    return with_bad(self._kind.schedule(seed), seed, self._ways)


def with_bad(
  found: faults.Schedule, seed: int, ways: tuple[str, ...]
) -> faults.Schedule:
  """The same schedule, with a bad replica."""
  r = random.Random(f"bad of {seed}")
  setting = found.setting
  index, way = r.randrange(setting.replicas), r.choice(ways)
  struck = found.faults
  enough = r.random() < 0.8
  if enough and setting.data is None and setting.needed >= setting.replicas:
    setting = dataclasses.replace(setting, needed=setting.replicas - 1)
  compute = list(setting.compute)
  good = setting.replicas - 1
  if way == "always" and (good < setting.least or setting.shared):
    # All wait for it, and it need not be so often in vain.
    compute[index] = 2.0
  elif way == "always" and r.random() < 0.6:
    compute[index] /= r.choice((2, 5))
  if way == "ends":
    struck = (*struck, (r.uniform(0.0, 1.0), "ends", (index,)))
  if setting.window and way == "always":
    # It may be alone for as long as a run waits.
    compute[index] = max(compute[index], 0.02)
  if way == "never joins" and r.random() < 0.5:
    # Its launcher knows that it has ended.
    struck = (*struck, (r.uniform(0.0, 1.0), way, (index,)))
    lowers = setting.lower_on_loss or r.random() < 0.5
    setting = dataclasses.replace(setting, lower_on_loss=lowers)
  bad = ((index, way),)
  if way == "always" and r.random() < 0.1:
    # The run diverges.
    bad = tuple((i, way) for i in range(setting.replicas))
    # In few gradients; a step of slots has all of them again and again.
    slow = 2.0 / setting.needed if setting.window else 2.0
    compute = [slow] * len(compute)
  setting = dataclasses.replace(setting, bad=bad, compute=tuple(compute))
  return dataclasses.replace(found, setting=setting, faults=struck)


plain, leased, of_slots = Bad(faults), Bad(leases), Bad(slots)
of_fragments = Bad(fragments)
# All processes of a replica end together; their own faults are in `groups`.
of_groups = Bad(groups, WAYS[:3])
