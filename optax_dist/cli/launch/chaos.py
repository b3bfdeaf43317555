"""Parses the faults of ``--chaos``."""

from __future__ import annotations

import argparse
from typing import Any

from optax_dist.cli import errors


def parse(text: str) -> dict[str, Any]:
  """An argument type for faults, such as ``kill:0.02,slow:2x5``.

  Example:
    >>> parse("kill:0.02,slow:2x5")
    {'kill': 0.02, 'slow': {2: 5.0}}
    >>> parse("kill:1@40")  # Replica 1, once, at its 40th gradient.
    {'kill_at': {1: 40}}
  """
  found: dict[str, Any] = {}
  for part in text.split(","):
    name, _, value = part.partition(":")
    try:
      if name == "kill" and "@" in value:
        replica, _, gradient = value.partition("@")
        if int(replica) < 0 or int(gradient) < 1:
          raise ValueError
        found.setdefault("kill_at", {})[int(replica)] = int(gradient)
      elif name in ("kill", "stop"):
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
        "must be kill:P, stop:P (probabilities below 1), kill:REPLICA@GRADIENT"
        f" or slow:REPLICAxFACTOR, with commas between, got {part!r}"
      ) from None
  return found


def check(faults: dict[str, Any] | None, replicas: int) -> None:
  """Raises an error if the faults name a replica that does not exist."""
  for name, text in (("slow", "slow:{}x..."), ("kill_at", "kill:{}@...")):
    for replica in (faults or {}).get(name, {}):
      if replica >= replicas:
        raise errors.CommandError(
          f"--chaos {text.format(replica)}: there are {replicas} replicas,"
          f" numbered 0 to {replicas - 1}"
        )


def dump(faults: dict[str, Any] | None, seed: int = 0) -> str | None:
  """Serializes the faults for the replicas; None for none."""
  from optax_dist.coordinator import faults as coordinator_faults

  if not faults:
    return None
  return coordinator_faults.Faults(**faults, seed=seed).dump()
