"""Each example, run as its first lines say, at a small size."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples"


def run(name, *arguments, devices=2):
  """Returns what an example prints."""
  environment = os.environ | {
    "JAX_NUM_CPU_DEVICES": str(devices),
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(_FOLDER.parent),
  }
  done = subprocess.run(
    [sys.executable, str(_FOLDER / name), *arguments],
    env=environment,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def numbers(pattern, text):
  return [float(found) for found in re.findall(pattern, text)]


def test_nnx_digits():
  printed = run("nnx_digits.py", "--epochs", "5")
  assert numbers(r"test accuracy ([\d.]+)", printed)[-1] > 0.85


def test_sharded_transformer():
  size = ["--width", "16", "--layers", "1", "--context", "16", "--steps", "20"]
  printed = run("sharded_transformer.py", *size)
  ((params, state),) = re.findall(r"with ([\d,]+) .* and ([\d,]+)", printed)
  # Two moments, of which each of two devices has a half.
  ratio = int(state.replace(",", "")) / int(params.replace(",", ""))
  assert 0.99 < ratio < 1.05
  losses = numbers(r"loss ([\d.]+)", printed)
  assert losses[-1] < losses[0] - 0.5


def test_decoupled_diloco():
  printed = run("decoupled_diloco.py", "--steps", "150", devices=1)
  assert "b is lost" in printed
  ((slow, back),) = re.findall(r"'slow': (\d+), 'b': (\d+)", printed)
  # Each on its own clock: half as fast, and back for half of the time.
  assert int(slow) == int(back) == 75
  ((first, second),) = re.findall(r"fragment: \[(\d+), (\d+)\]", printed)
  assert min(int(first), int(second)) >= 12
  assert numbers(r"parameters: ([\d.]+)", printed)[-1] > 0.9


def test_port_from_tensorflow1():
  printed = run("port_from_tensorflow1.py", "--steps", "100", devices=1)
  assert numbers(r"test accuracy ([\d.]+)", printed)[-1] > 0.8


@pytest.mark.parametrize("path", sorted(_FOLDER.glob("*.py")), ids=str)
def test_each_example_has_its_test(path):
  here = pathlib.Path(__file__).read_text("utf-8")
  # Those for the launcher are run as on this page, by the test of its name.
  page = _FOLDER.parent / "docs" / "first_launch.md"
  assert (
    f'"{path.name}"' in here or f"examples/{path.name} " in page.read_text()
  )
