"""Steps per second against TensorFlow's SyncReplicasOptimizer.

Two replicas here, one parameter server and two workers there. The goals are for
the better of the model in 1 and in 10 arrays, of either, round by round.
"""

import argparse
from collections.abc import Iterator

import side_by_side
from side_by_side import Line

# Ratio to TensorFlow's rate, by wire and number of parameters.
GOALS = {
  ("float32", 1_000): 2.5,
  ("float32", 1_000_000): 2.0,
  ("float32", 25_000_000): 2.6,
}
PARAMS = (1_000, 1_000_000, 25_000_000)
ARRAYS = (1, 10)


def lines(args: argparse.Namespace) -> Iterator[Line]:
  """Yields the figures, size by size."""
  for params in args.params or PARAMS:
    yield from _in_turns(params, args)


def _in_turns(params: int, args: argparse.Namespace) -> Iterator[Line]:
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
        {**common, "leaves": arrays, "wire": wire},
      )
  runs = side_by_side.in_turns(ours | theirs, args.repeats)
  rates = {
    name: side_by_side.values(each, "steps_per_second")
    for name, each in runs.items()
  }
  what = f"{params:,} parameters"
  for wire in args.wire:
    for arrays in ARRAYS:
      yield side_by_side.against(
        f"{what}, {wire}, {arrays} array(s)",
        "steps/s",
        rates[f"{wire}, {arrays}"],
        f"TensorFlow, {arrays} variable(s)",
        rates[f"TensorFlow, {arrays}"],
      )
  best = lambda who: [
    max(each)
    for each in zip(*(rates[f"{who}, {n}"] for n in ARRAYS), strict=True)
  ]
  for wire in args.wire:
    goal = GOALS.get((wire, params))
    yield side_by_side.against(
      f"{what}, {wire}, the better one",
      "steps/s",
      best(wire),
      "TensorFlow's better one",
      best("TensorFlow"),
      goal and (goal, float("inf")),
    )
