"""Draws docs/images/deterministic.png: a run that loses replicas, and one that doesn't.

python docs/images/deterministic.py --losses 40

Runs examples/deterministic.py twice: with one replica, and with five, of which one
after the other is killed with SIGKILL and started again. Draws the test loss after each
step of both, and whether their digests of parameters and optimizer state are equal.
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import matplotlib.figure

from optax_dist.coordinator.server import process

_HERE = pathlib.Path(__file__).parent
_EXAMPLE = _HERE.parents[1] / "examples/deterministic.py"
_REPLICAS = 5


class Run:
  """Replicas as processes, which write what they see to one file."""

  def __init__(self, folder, address, replicas, epochs, pause=0.0):
    folder.mkdir()
    self._folder, self._address = folder, address
    self._replicas = replicas
    self._options = ["--epochs", str(epochs), "--pause", str(pause)]
    self._live = {index: self._start(index) for index in range(replicas)}

  def _start(self, index):
    variables = {
      "OPTAX_DIST_REPLICA": str(index),
      "OPTAX_DIST_NUM_REPLICAS": str(self._replicas),
      "OPTAX_DIST_COORDINATOR_ADDRESS": self._address,
      "OPTAX_DIST_MIN_REPLICAS": "1",
      "OPTAX_DIST_RUN": self._folder.name,
      "OPTAX_DIST_OUTPUT": str(self._folder),
      "JAX_PLATFORMS": "cpu",
    }
    return subprocess.Popen(
      [sys.executable, _EXAMPLE, *self._options],
      env=os.environ | variables,
      stdout=subprocess.DEVNULL,
    )

  @property
  def records(self):
    """What was written: a line for each step and replica that saw it."""
    path = self._folder / "steps.jsonl"
    lines = path.read_text().splitlines(True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]

  def lose(self, losses, rng):
    """Kills a replica once two have seen new steps; returns after which steps."""
    found = [0]
    while len(found) <= losses and not self.has_ended():
      time.sleep(0.02)
      new = [r for r in self.records if r["step"] > found[-1]]
      seen = sorted({record["replica"] for record in new})
      if len(seen) < 2:
        continue
      victim = rng.choice(seen)
      self._live[victim].kill()
      self._live[victim].wait()
      found.append(max(record["step"] for record in new))
      self._live[victim] = self._start(victim)
    return found[1:]

  def has_ended(self):
    return any(one.poll() == 0 for one in self._live.values())

  def wait(self):
    """Waits for the end of one, and ends those that come too late to have it."""
    while not self.has_ended():
      time.sleep(0.1)
    for one in self._live.values():
      one.kill()
      one.wait()


def draw(path, alone, churn, lost):
  """Draws both runs, and the steps after which a replica was lost."""
  want = {record["step"]: record["digest"] for record in alone}
  seen = {}
  for record in churn:
    seen.setdefault(record["step"], set()).add(record["digest"])
  same = [step for step, digests in seen.items() if digests == {want[step]}]
  figure = matplotlib.figure.Figure(figsize=(9, 5), layout="constrained")
  above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
  for records, style, name in (
    (alone, {"lw": 5, "alpha": 0.35}, "one replica, undisturbed"),
    (churn, {"lw": 1.2}, f"{_REPLICAS} replicas, {len(lost)} losses"),
  ):
    loss = {record["step"]: record["loss"] for record in records}
    steps = sorted(loss)
    above.plot(steps, [loss[step] for step in steps], label=name, **style)
  for step in lost:
    above.axvline(step, color="C3", lw=0.5, alpha=0.6)
  above.set(ylabel="test loss (nats)", yscale="log")
  above.legend()
  for row, digests in enumerate((want, {s: min(d) for s, d in seen.items()})):
    for step, digest in digests.items():
      hue = int(digest[:6], 16) / 0xFFFFFF
      below.bar(step, 1, 1, row, color=matplotlib.colormaps["hsv"](hue))
  below.set(
    xlabel=f"step; a colour is a digest of parameters and optimizer state:"
    f" {len(same)} of {len(seen)} are equal",
    yticks=[0.5, 1.5],
    yticklabels=["undisturbed", "with losses"],
  )
  figure.savefig(path, dpi=110)
  return len(same), len(seen)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--losses", type=int, default=40)
  parser.add_argument("--epochs", type=int, default=20)
  parser.add_argument("--pause", type=float, default=0.15)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--output", default=_HERE / "deterministic.png")
  args = parser.parse_args()
  os.environ.setdefault("OPTAX_DIST_SECRET", "of this picture alone")
  secret = os.environ["OPTAX_DIST_SECRET"].encode()
  with (
    tempfile.TemporaryDirectory() as temporary,
    process.start(secret, port=0) as server,
  ):
    folder = pathlib.Path(temporary)
    address = server.address
    one = Run(folder / "alone", address, 1, args.epochs)
    one.wait()
    several = Run(folder / "churn", address, _REPLICAS, args.epochs, args.pause)
    lost = several.lose(args.losses, random.Random(args.seed))
    several.wait()
    same, steps = draw(args.output, one.records, several.records, lost)
  print(f"{len(lost)} losses; {same} of {steps} steps have the same digest")


if __name__ == "__main__":
  main()
