"""The faults of ``--chaos``, as one writes them."""

from __future__ import annotations

import argparse
from typing import Any

from optax_dist.cli import errors


def parse(text: str) -> dict[str, Any]:
  """An argument type: faults, such as ``kill:0.02,slow:2x5``.

  Example:
    >>> parse("kill:0.02,slow:2x5")
    {'kill': 0.02, 'slow': {2: 5.0}}
  """
  found: dict[str, Any] = {}
  for part in text.split(","):
    name, _, value = part.partition(":")
    try:
      if name in ("kill", "stop"):
        found[name] = float(value)
        if not 0 <= found[name] < 1:
          raise ValueError
      elif name == "slow":
        replica, _, factor = value.partition("x")
        if int(replica) < 0 or float(factor) < 1:
          raise ValueError
        found.setdefault("slow", {})[int(replica)] = float(factor)
      else:
        raise ValueError
    except ValueError:
      raise argparse.ArgumentTypeError(
        "must be kill:P, stop:P (probabilities below 1) or slow:REPLICAxFACTOR"
        f" with commas between, got {part!r}"
      ) from None
  return found


def check(faults: dict[str, Any] | None, replicas: int) -> None:
  """Raises an error if a replica is named that there is not."""
  for replica in (faults or {}).get("slow", {}):
    if replica >= replicas:
      raise errors.CommandError(
        f"--chaos slow:{replica}x...: there are {replicas} replicas, numbered 0"
        f" to {replicas - 1}"
      )


def dump(faults: dict[str, Any] | None, seed: int = 0) -> str | None:
  """The faults as replicas are told them; None for none."""
  from optax_dist.coordinator import faults as coordinator_faults

  if not faults:
    return None
  return coordinator_faults.Faults(**faults, seed=seed).dump()
