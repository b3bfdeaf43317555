"""The outcomes of a training loop's gradients, for `tests.runs.checks`."""

from typing import Any


def none_yet() -> dict[str, Any]:
  """A record that `note` extends; ``calls`` are the numbers of all gradients."""
  return {
    "calls": [],
    "accepted": [],
    "summed": [],
    "undecided": [],
    "reasons": {},
  }


def note(seen: dict[str, Any], number: int, outcome: Any) -> None:
  """Notes the outcome of a gradient.

  Args:
    seen: ``accepted``, ``reasons`` of dropped ones, ``summed``, the ones of a
      sum that goes on, and ``outer_axes``, those of sums whose end was not told.
    number: number of the gradient.
    outcome: what `step` returned.
  """
  if not outcome.accepted:
    seen["reasons"][str(number)] = outcome.reason
    # The first part of the sum may have counted without it.
    seen["undecided"] += seen["summed"]
    seen["summed"] = []
    return
  seen["summed"].append(number)
  if outcome.members:
    seen["accepted"] += seen["summed"]
    seen["summed"] = []
