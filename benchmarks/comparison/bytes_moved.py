"""Payload bytes that each replica moves in a step, counted by itself.

Of k members each fetches its slice of the others' gradients, and the others'
averaged slices: 2 P (k - 1) / k. A late replica fetches the averages: P.
"""

import argparse
from collections.abc import Iterator

import side_by_side
from side_by_side import Line

PARAMS = 1_000_000
# Kinds of bytes: what travels beside the payload is not counted.
SLACK = 1e-3
WIDTHS = {"float32": 4, "bfloat16": 2, "int8": 1}


def lines(args: argparse.Namespace) -> Iterator[Line]:
  """Yields bytes in units of what a member, or a late replica, may move."""
  params = (args.params or [PARAMS])[0]
  for wire in args.wire:
    unit = WIDTHS[wire] * params
    for replicas, k, slow in ((2, 2, 1), (3, 3, 1), (4, 3, 20)):
      options = {
        "params": params,
        "leaves": 10,
        "wire": wire,
        "replicas": replicas,
        "aggregate": k,
        "steps": args.steps or 20,
        "latency": "constant:0.05",
        "slow": slow,
      }
      said = side_by_side.run("replicas.py", options, 240.0)
      member = 2 * (k - 1) / k
      for i, each in enumerate(said["bytes_per_step"]):
        late = slow > 1 and i == replicas - 1
        most = 1.0 if late else member
        role = "late" if late else "member"
        for way in ("bytes_in", "bytes_out"):
          # A late replica has nothing that others need.
          moved = each[way] / unit
          yield Line(
            f"{wire}, {k} of {replicas}, {role} {i}, {way}",
            moved,
            "P",
            "what is due",
            most,
            moved / most,
            (0.0, 1 + SLACK) if way == "bytes_in" or not slow > 1 else None,
          )
