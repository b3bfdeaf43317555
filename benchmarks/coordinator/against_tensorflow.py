"""Steps per second against TensorFlow's SyncReplicasOptimizer.

Two replicas here, one parameter server and two workers there. TensorFlow's rate is
the better one of the model in 1 and in 10 variables, round by round.
"""

import argparse
from collections.abc import Iterator

import side_by_side
from side_by_side import Line

# Ratio to TensorFlow, by number of parameters, and on a bfloat16 wire.
GOALS = {1_000: 2.0, 1_000_000: 1.5, 25_000_000: 1.5}
NARROW_GOALS = {25_000_000: 2.5}
ARRAYS = (1, 10)
# A member of k replicas moves 2 (k - 1) / k times the gradient in and out.
REPLICAS = 2


def lines(args: argparse.Namespace) -> Iterator[Line]:
  """Yields the figures, size by size."""
  for params in args.params or GOALS:
    yield from _one_size(params, args)


def _one_size(params: int, args: argparse.Namespace) -> Iterator[Line]:
  common = {"params": params, "seconds": args.seconds}
  ours, theirs = {}, {}
  for arrays in ARRAYS:
    theirs[f"TensorFlow, {arrays}"] = (
      "tensorflow_peer.py",
      {**common, "variables": arrays, "python": args.tensorflow_python},
    )
    for wire in args.wire:
      ours[f"{wire}, {arrays}"] = (
        "replicas.py",
        {**common, "leaves": arrays, "wire": wire, "exchange": args.exchange},
      )
  runs = side_by_side.in_turns(ours | theirs, args.repeats)
  rates = {
    name: side_by_side.values(each, "steps_per_second")
    for name, each in runs.items()
  }
  for name in theirs:
    yield side_by_side.against(
      f"{params:,} parameters", "steps/s", rates[name], name, rates[name]
    )
  best = [max(each) for each in zip(*(rates[n] for n in theirs), strict=True)]
  for name in ours:
    goals = {"float32": GOALS, "bfloat16": NARROW_GOALS}
    goal = goals.get(name.split(",")[0], {}).get(params)
    yield side_by_side.against(
      f"{params:,} parameters, {name} array(s)",
      "steps/s",
      rates[name],
      "TensorFlow's better one",
      best,
      goal and (goal, float("inf")),
    )
