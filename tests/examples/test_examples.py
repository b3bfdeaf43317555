"""Each example, run as its first lines say, at a small size."""

import os
import pathlib
import re
import signal
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


def launched(folder, flags, name, arguments):
  """Returns what an example prints that `optax-dist launch` starts."""
  program = "from optax_dist.cli.main import main; raise SystemExit(main())"
  environment = os.environ | {
    "JAX_NUM_CPU_DEVICES": "1",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(_FOLDER.parent),
  }
  output = ["--output", str(folder / "job")]
  command = [sys.executable, "-c", program, "launch", *flags, *output]
  done = subprocess.run(
    [*command, str(_FOLDER / name), *arguments],
    env=environment,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stdout + done.stderr
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


def test_launched_k_of_n(tmp_path):
  """With a replica that is killed, and comes back; then all are stopped."""
  process = subprocess.Popen(
    [
      *(sys.executable, "-m", "optax_dist", "launch", "--output", tmp_path),
      *("--replicas", "3", "--replicas-to-aggregate", "2"),
      *("--grace", "240"),
      *(_FOLDER / "launched_k_of_n.py", "--steps", "1000000"),
      *("--save-every", "50"),
    ],
    env=os.environ
    | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_FOLDER.parent)},
    stdout=subprocess.PIPE,
    text=True,
  )
  joined, ended = [], {}
  try:
    for line in process.stdout:
      if found := re.match(
        r"\[replica (\d)\] process (\d+) joins at.* (\d+)", line
      ):
        joined.append([int(text) for text in found.groups()])
        # Not before all are there: one that was not let in leaves no step.
        if len(joined) == 3:
          os.kill(
            next(pid for who, pid, _ in joined if who == 1), signal.SIGKILL
          )
        elif len(joined) == 4:
          process.send_signal(signal.SIGTERM)
      if found := re.match(r"\[replica (\d)\] step (\d+), loss", line):
        ended[int(found[1])] = int(found[2])
    assert process.wait(300) == 128 + signal.SIGTERM
  finally:
    process.kill()
    process.wait()
    process.stdout.close()
  # Each has left gracefully, after a step.
  assert sorted(ended) == [0, 1, 2]
  assert sorted(who for who, _, _ in joined) == [0, 1, 1, 2]
  who, _, step = joined[-1]
  assert who == 1
  assert ended[1] >= step
  saved = [int(p.name[5:]) for p in (tmp_path / "checkpoints").glob("step-*")]
  assert all(step % 50 == 0 and step <= max(ended.values()) for step in saved)


@pytest.mark.parametrize("path", sorted(_FOLDER.glob("*.py")), ids=str)
def test_each_example_has_its_test(path):
  assert f'"{path.name}"' in pathlib.Path(__file__).read_text("utf-8")


def test_launched_k_of_n_learns(tmp_path):
  flags = ["--replicas", "3", "--replicas-to-aggregate", "2"]
  printed = launched(tmp_path, flags, "launched_k_of_n.py", ["--steps", "60"])
  # Those of the last step; one that is late prints that of an earlier step.
  # Before the first step it is 0.36 or more, whatever the batch.
  assert min(numbers(r"step 60, loss ([\d.]+)", printed)) < 0.2


def test_sharded_transformer_groups(tmp_path):
  size = ["--width", "16", "--layers", "1", "--context", "16"]
  printed = launched(
    tmp_path,
    ["--replicas", "2", "--processes-per-replica", "2", "--min-replicas", "1"],
    "sharded_transformer_groups.py",
    [*size, "--steps", "40", "--save-every", "20"],
  )
  losses = numbers(r"loss ([\d.]+)", printed)
  # One that has learned nothing has 4.56, for there are 96 characters.
  assert max(losses) < 4.3, losses
  assert (tmp_path / "job" / "checkpoints" / "step-00000020").is_dir()
