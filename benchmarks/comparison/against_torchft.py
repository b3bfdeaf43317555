"""Time of a step, and the stall after a kill, against torchft.

Two replicas of each. After the kill the survivor goes on alone: torchft does so
with `min_replica_size=1`, and `join` with `lower_on_loss=True`.
"""

import argparse
from collections.abc import Iterator

import side_by_side
from side_by_side import Line

PARAMS = (1_000, 1_000_000)
ARRAYS = (1, 10)
STEP_GOALS = {1_000_000: (0.0, 0.8)}
STALL_GOAL = (0.0, 0.05)


def lines(args: argparse.Namespace) -> Iterator[Line]:
  """Yields the figures: time of a step by size, and the stall."""
  theirs = {"python": args.torchft_python, "seconds": args.seconds}
  for params in args.params or PARAMS:
    ours = {
      f"ours, {arrays}": (
        "replicas.py",
        {
          "params": params,
          "leaves": arrays,
          "seconds": args.seconds,
        },
      )
      for arrays in ARRAYS
    }
    torchft = ("torchft_peer.py", {"params": params, **theirs})
    runs = side_by_side.in_turns(ours | {"torchft": torchft}, args.repeats)
    milliseconds = {
      name: [1e3 * x for x in side_by_side.values(each, "seconds_per_step")]
      for name, each in runs.items()
    }
    for name in ours:
      yield side_by_side.against(
        f"step, {4 * params / 1000:,.0f} kB, {name.split()[-1]} array(s)",
        "ms",
        milliseconds[name],
        "torchft, 1 array",
        milliseconds["torchft"],
        STEP_GOALS.get(params),
      )
  yield from _stalls(args)


def _stalls(args: argparse.Namespace) -> Iterator[Line]:
  # Steps take milliseconds: the kill falls on another part of one each time.
  kill = {"kill": "replica", "moment": lambda i: 0.0013 * i}
  # With a third replica torchft has a majority left, and need not wait for the
  # heartbeat: no goal, but one should know.
  for replicas in (2, 3):
    runs = side_by_side.in_turns(
      {
        "ours": (
          "replicas.py",
          {"replicas": replicas, **kill},
        ),
        "torchft": (
          "torchft_peer.py",
          {"replicas": replicas, "python": args.torchft_python, **kill},
        ),
      },
      args.repeats,
    )
    stalls = {
      name: side_by_side.values(each, "stall_seconds")
      for name, each in runs.items()
    }
    line = side_by_side.against(
      f"stall after a kill, {replicas} replicas",
      "s",
      stalls["ours"],
      "torchft",
      stalls["torchft"],
    )
    yield line
    if replicas == 2:
      yield Line(
        "  the longest stall",
        max(stalls["ours"]),
        "s",
        "torchft",
        max(stalls["torchft"]),
        max(stalls["ours"]),
        STALL_GOAL,
        "(seconds)",
      )
