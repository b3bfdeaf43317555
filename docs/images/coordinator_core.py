"""Draws the picture of docs/coordinator.md: one step, from a gradient to its commit.

python docs/images/coordinator_core.py
"""

import pathlib

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from optax_dist.coordinator.protocol import entries, messages

_REPLICA, _COORDINATOR, _LOG = "#4C78A8", "#59A14F", "#F2A541"
_HERE = pathlib.Path(__file__).parent

# Where (column, row), colour, text.
_BOXES = (
  ((0, 0), _REPLICA, "each replica\nstep(gradient)"),
  ((1, 0), _COORDINATOR, "coordinator\nquorum: k of N?"),
  ((2, 0), _REPLICA, "the k members\naverage slices,\nreplica to replica"),
  ((2, 1), _COORDINATOR, "coordinator\nall have the mean"),
  ((1, 1), _LOG, "its log\nthe step counts"),
  ((0, 1), _REPLICA, "all replicas\napply the mean"),
)
# From, to, and what is sent.
_ARROWS = (
  ((0, 0), (1, 0), "SubmitGradient"),
  ((1, 0), (2, 0), "Round"),
  ((2, 0), (2, 1), "Done"),
  ((2, 1), (1, 1), "append"),
  ((1, 1), (0, 1), "Committed"),
  ((0, 1), (0, 0), "next step"),
)
_WIDTH, _HEIGHT, _DX, _DY = 3.0, 1.3, 5.0, 2.9


def _check():
  """The names of messages in the picture are those in the code."""
  for *_, text in _ARROWS:
    if text[0].isupper():
      assert hasattr(messages, text) or hasattr(entries, text), text


def _at(place):
  return place[0] * _DX, -place[1] * _DY


def main():
  _check()
  figure, ax = plt.subplots(figsize=(10.4, 4.4), layout="constrained")
  ax.set_xlim(-0.3, 2 * _DX + _WIDTH + 0.3)
  ax.set_ylim(-_DY - _HEIGHT, _HEIGHT)
  ax.axis("off")
  for place, color, text in _BOXES:
    x, y = _at(place)
    ax.add_patch(
      FancyBboxPatch(
        (x, y - _HEIGHT / 2),
        _WIDTH,
        _HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.1",
        facecolor=color,
        edgecolor="none",
      )
    )
    ax.text(
      *(x + _WIDTH / 2, y, text),
      ha="center",
      va="center",
      fontsize=12,
      color="white",
    )
  for start, stop, text in _ARROWS:
    (x0, y0), (x1, y1) = _at(start), _at(stop)
    middle = _WIDTH / 2
    if y0 == y1:
      right = x1 > x0
      begin = (x0 + (_WIDTH + 0.08 if right else -0.08), y0)
      end = (x1 + (-0.08 if right else _WIDTH + 0.08), y1)
      where, align = ((begin[0] + end[0]) / 2, y0 + 0.18), "center"
    else:
      down = y1 < y0
      gap = _HEIGHT / 2 + 0.08
      begin = (x0 + middle, y0 + (-gap if down else gap))
      end = (x1 + middle, y1 + (gap if down else -gap))
      where, align = (x0 + middle + 0.15, (y0 + y1) / 2), "left"
    ax.add_patch(
      FancyArrowPatch(
        *(begin, end),
        arrowstyle="-|>",
        mutation_scale=15,
        linewidth=1.8,
        color="#555555",
        shrinkA=0,
        shrinkB=0,
      )
    )
    ax.text(*where, text, ha=align, va="bottom", fontsize=11)
  figure.savefig(_HERE / "coordinator_core.png", dpi=110)


if __name__ == "__main__":
  main()
