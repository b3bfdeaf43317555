"""Output of the results of the scripts in this folder."""

import argparse
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import matplotlib.figure
import numpy as np
from scipy import stats


def parser(description: str) -> argparse.ArgumentParser:
  """Returns a parser of ``--image`` and ``--json``.

  Args:
    description: of the script, in the first of its lines.
  """
  made = argparse.ArgumentParser(description=description.splitlines()[0])
  made.add_argument("--image", type=pathlib.Path)
  made.add_argument("--json", type=pathlib.Path)
  return made


def save(
  args: argparse.Namespace,
  draw: Callable[[], matplotlib.figure.Figure],
  figures: Any,
) -> None:
  """Draws and writes what was found, where the arguments say."""
  if args.image:
    args.image.parent.mkdir(parents=True, exist_ok=True)
    draw().savefig(args.image, dpi=200)
  if args.json:
    text = json.dumps(_finite(figures), indent=1, allow_nan=False)
    args.json.write_text(text)


def interval(values: Any) -> tuple[float, float]:
  """The mean, and half the width of its 95 % interval, by Student's t."""
  values = np.asarray(values)
  half = stats.t.ppf(0.975, values.size - 1) * stats.sem(values)
  return float(np.mean(values)), float(half)


def _finite(figures: Any) -> Any:
  """The same with None for what JSON has no number for."""
  if isinstance(figures, dict):
    return {key: _finite(value) for key, value in figures.items()}
  if isinstance(figures, list | tuple):
    return [_finite(value) for value in figures]
  if isinstance(figures, float) and not math.isfinite(figures):
    return None
  return figures
