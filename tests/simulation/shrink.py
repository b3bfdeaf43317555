"""Makes a failing schedule small: fewer faults, fewer replicas, fewer steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tests.simulation import faults


def _smaller(schedule: faults.Schedule) -> Iterator[faults.Schedule]:
  """Schedules with a little less in them, those with the least first."""
  setting, struck = schedule.setting, schedule.faults
  for half in (struck[len(struck) // 2 :], struck[: len(struck) // 2]):
    if len(half) < len(struck) - 1:
      yield dataclasses.replace(schedule, faults=half)
  for index in range(len(struck)):
    rest = struck[:index] + struck[index + 1 :]
    yield dataclasses.replace(schedule, faults=rest)

  def changed(**fields: object) -> faults.Schedule:
    return dataclasses.replace(
      schedule,
      setting=dataclasses.replace(setting, **fields),  # type: ignore[arg-type]
    )

  last = setting.replicas - 1
  named = {i for _, _, details in struck for i in details[:2] if type(i) is int}
  if last >= 2 and last not in named and setting.needed <= last:
    yield changed(replicas=last)
  if setting.steps > 1:
    yield changed(steps=max(1, setting.steps // 2))
    yield changed(steps=setting.steps - 1)
  plain = type(setting)()
  for name in (
    "max_staleness",
    "fingerprint_every",
    "rates",
    "compute",
    "data",
  ):
    if getattr(setting, name) != getattr(plain, name) and not setting.alone:
      yield changed(**{name: getattr(plain, name)})


def shrink(
  schedule: faults.Schedule,
  fails: Callable[[faults.Schedule], bool],
  most: int = 300,
) -> faults.Schedule:
  """The smallest schedule found that still fails.

  Args:
    schedule: one that fails.
    fails: whether a schedule does.
    most: how many are tried at the most.
  """
  again = True
  while again:
    again = False
    for candidate in _smaller(schedule):
      most -= 1
      if most < 0:
        return schedule
      if fails(candidate):
        schedule, again = candidate, True
        break
  return schedule
