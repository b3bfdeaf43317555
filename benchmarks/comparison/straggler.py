"""The rate of 3 of 4 replicas, one of them slow, against that of 3 fast ones."""

import argparse
from collections.abc import Iterator

import side_by_side
from side_by_side import Line

# Seconds for a gradient, and how much slower the last replica is.
COMPUTE, SLOWER = 0.02, 5
GOAL = (0.95, float("inf"))


def lines(args: argparse.Namespace) -> Iterator[Line]:
  """Yields the ratio of the rates."""
  common = {
    "params": (args.params or [1_000])[0],
    "aggregate": 3,
    "steps": args.steps or 200,
    "latency": f"constant:{COMPUTE}",
  }
  runs = side_by_side.in_turns(
    {
      "slow": ("replicas.py", {**common, "replicas": 4, "slow": SLOWER}),
      "fast": ("replicas.py", {**common, "replicas": 3}),
    },
    args.repeats,
  )
  rates = {
    name: side_by_side.values(each, "steps_per_second")
    for name, each in runs.items()
  }
  yield side_by_side.against(
    f"3 of 4 replicas, one {SLOWER}x slower",
    "steps/s",
    rates["slow"],
    "3 fast replicas",
    rates["fast"],
    GOAL,
  )
