"""Draws the picture of docs/coordinator.md: the core, its inputs, its effects.

python docs/images/coordinator_core.py
"""

import pathlib

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from optax_dist.coordinator.protocol import effects, inputs

_CORE, _AROUND, _INPUT, _EFFECT = "#4C78A8", "#D9DEE5", "#59A14F", "#F2A541"
_HERE = pathlib.Path(__file__).parent

# What is around the core, with the inputs that it makes and the effects that it
# carries out; each name is checked to be one.
_ROWS = (
  (
    "transport/\nconnections",
    ("Received", "Malformed", "PeerLost"),
    ("Send", "SendAll", "Connect", "Disconnect", "UseRun"),
  ),
  (
    "store/\nkeys",
    ("PutAnswered", "GetAnswered", "StoreLost"),
    ("Put", "Get", "Delete"),
  ),
  (
    "aggregation/\narrays",
    (
      "Aggregated",
      "AggregateFailed",
      "SnapshotFetched",
      "SnapshotFailed",
    ),
    (
      "Aggregate",
      "LimitWait",
      "Release",
      "ServeSnapshot",
      "FetchSnapshot",
    ),
  ),
  (
    "runtime/\nthe state",
    ("FingerprintTaken",),
    ("Apply", "Publish", "Restore", "TakeFingerprint"),
  ),
  (
    "replica.py\ntraining loop",
    (
      "Started",
      "Submitted",
      "LeaveWanted",
      "FinishWanted",
      "SaveWanted",
      "Aborted",
    ),
    (
      "Admitted",
      "Suspended",
      "SetAsked",
      "Taken",
      "Resolved",
      "Leased",
      "Progressed",
      "Called",
      "Left",
      "Finished",
      "Fail",
    ),
  ),
  ("clock", ("TimePassed",), ()),
  (
    "journal, log",
    (),
    ("LeadershipChanged", "WriteJournal", "Log"),
  ),
)


def _check():
  """Every input and every effect is in the picture, and nothing else."""
  for union, column in ((inputs.Input, 1), (effects.Effect, 2)):
    drawn = sorted(name for row in _ROWS for name in row[column])
    there = sorted(kind.__name__ for kind in union.__args__)
    assert drawn == there, set(drawn) ^ set(there)


def _box(ax, x, y, width, height, color, text, ink="black", size=10.5):
  ax.add_patch(
    FancyBboxPatch(
      (x, y - height / 2),
      width,
      height,
      boxstyle="round,pad=0,rounding_size=0.08",
      facecolor=color,
      edgecolor="none",
    )
  )
  ax.text(
    x + width / 2, y, text, ha="center", va="center", fontsize=size, color=ink
  )


def _arrow(ax, start, stop, color):
  ax.add_patch(
    FancyArrowPatch(
      start,
      stop,
      arrowstyle="-|>",
      mutation_scale=13,
      linewidth=1.8,
      color=color,
      shrinkA=0,
      shrinkB=0,
    )
  )


def _lines(names, most=3):
  return ",\n".join(
    ", ".join(names[i : i + most]) for i in range(0, len(names), most)
  )


def main():
  _check()
  figure, ax = plt.subplots(figsize=(10.4, 7.4), layout="constrained")
  ax.set_xlim(0, 15.6)
  ax.set_ylim(-8.3, 1.2)
  ax.axis("off")
  ax.text(3.9, 0.85, "inputs", ha="center", fontsize=13, color=_INPUT)
  ax.text(11.7, 0.85, "effects", ha="center", fontsize=13, color="#B8741A")
  ax.text(7.8, 0.85, "protocol/", ha="center", fontsize=13, color=_CORE)
  _box(
    ax,
    6.35,
    -3.25,
    2.9,
    7.2,
    _CORE,
    "the core, pure\n\nNode.step(input, now)\n→ effects\n\nNode.deadline()\n"
    "→ time\n\n\nfollower\n(always)\n\nleader\n(while it is one)\n\n\nno"
    " threads, clocks,\nsockets, arrays",
    "white",
    11,
  )
  for i, (name, into, out) in enumerate(_ROWS):
    y = -1.08 * i
    if into:
      _box(ax, 0, y, 2.0, 0.86, _AROUND, name, size=9)
      ax.text(
        4.1, y + 0.1, _lines(into, 2), ha="center", va="bottom", fontsize=8
      )
      _arrow(ax, (2.05, y), (6.3, y), _INPUT)
    if out:
      _box(ax, 13.6, y, 2.0, 0.86, _AROUND, name, size=9)
      ax.text(11.45, y + 0.1, _lines(out), ha="center", va="bottom", fontsize=8)
      _arrow(ax, (9.3, y), (13.55, y), _EFFECT)
  ax.text(
    7.8,
    -7.85,
    "Around it: the driver (runtime/driver.py) in threads and processes,\n"
    "or the simulation (tests/simulation), which replaces transport, store,"
    " arrays and clock.",
    ha="center",
    va="center",
    fontsize=11,
  )
  figure.savefig(_HERE / "coordinator_core.png", dpi=110)


if __name__ == "__main__":
  main()
