"""How fast `optax-dist launch` starts replicas, and how fast it ends them.

  python benchmarks/coordinator/launcher.py --replicas 16 --rounds 3

Two kinds of replicas: bare ones, which import nothing and show what the launcher
itself costs, and light ones, which import JAX, join and take a step. Of the light
ones the figure is the time from the end of the slowest import until all have joined,
and until all have taken a step; imports take as long as the processors let them.
Then bare replicas that ignore SIGTERM, each with a process of its own, are ended by
Ctrl-C, twice, and by SIGKILL of the launcher: the time until no process group is left.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import time

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_HELPERS = _ROOT / "tests" / "helpers"
sys.path[:0] = [str(_HELPERS), str(_HELPERS / "processes")]

import left_over  # noqa: E402

_BARE = """
import time
print("imported", time.time(), flush=True)
"""
_LIGHT = """
import time
import jax, jax.numpy as jnp, optax
from optax_dist import coordinator
print("imported", time.time(), flush=True)
with coordinator.join(optax.sgd(0.1), jnp.zeros(4)) as replica:
  print("joined", time.time(), flush=True)
  replica.step(jnp.ones(4))
  print("stepped", time.time(), flush=True)
  replica.finish()
"""
_DEAF = """
import signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT):
  signal.signal(number, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print("imported", time.time(), flush=True)
time.sleep(600)
"""
_COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from optax_dist.cli import main
sys.exit(main.main(sys.argv[1:]))
"""


def _start(replicas: int, program: str, *flags: str) -> subprocess.Popen[str]:
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
    "PYTHONPATH": str(_ROOT),
  }
  return subprocess.Popen(
    [
      *(sys.executable, "-c", _COMMAND, "launch", "--replicas", str(replicas)),
      *(*flags, "--", sys.executable, "-c", program),
    ],
    env=environment,
    stdout=subprocess.PIPE,
    text=True,
  )


def starts(replicas: int, program: str) -> dict[str, float]:
  """Seconds until all replicas have imported, joined and taken a step."""
  began = time.time()
  process = _start(replicas, program)
  printed, _ = process.communicate(timeout=600)
  assert process.returncode == 0, printed
  last: dict[str, float] = {}
  first: dict[str, float] = {}
  for what, when in re.findall(r"\] (\w+) ([\d.]+)", printed):
    assert printed.count(what) == replicas, printed
    last[what] = max(last.get(what, 0.0), float(when))
    first[what] = min(first.get(what, 1e12), float(when))
  result = {
    "first import": first["imported"] - began,
    "slowest import": last["imported"] - began,
  }
  for what in ("joined", "stepped"):
    if what in last:
      result[f"{what}, after it"] = last[what] - last["imported"]
  return result


def ends(replicas: int, signals: list[int]) -> dict[str, float]:
  """Seconds from the last signal until no group is left, of how many."""
  process = _start(replicas, _DEAF)
  assert process.stdout is not None
  for _ in range(replicas):
    process.stdout.readline()
  groups = left_over.groups(process.pid)
  for number in signals[:-1]:
    process.send_signal(number)
    time.sleep(0.5)
  began = time.monotonic()
  process.send_signal(signals[-1])
  while left := {g for g in groups if left_over.has_group(g)}:
    if time.monotonic() - began > 60:
      raise AssertionError(f"left behind: {left}")
    time.sleep(0.005)
  seconds = time.monotonic() - began
  process.wait()
  process.stdout.close()
  return {"groups": float(len(groups)), "seconds": seconds}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--replicas", type=int, default=16)
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--json", type=pathlib.Path)
  args = parser.parse_args()
  cases = {
    "bare": lambda: starts(args.replicas, _BARE),
    "light": lambda: starts(args.replicas, _LIGHT),
    "Ctrl-C twice": lambda: ends(args.replicas, [signal.SIGINT] * 2),
    "SIGKILL": lambda: ends(args.replicas, [signal.SIGKILL]),
  }
  result: dict[str, dict[str, float]] = {}
  for name, case in cases.items():
    rounds = [case() for _ in range(args.rounds)]
    result[name] = {
      what: round(statistics.median(r[what] for r in rounds), 3)
      for what in rounds[0]
    }
    text = ", ".join(
      f"{what} {value:g}" for what, value in result[name].items()
    )
    print(f"{args.replicas} replicas, {name}: {text}", flush=True)
  if args.json:
    args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
  main()
