"""What a slow network costs: Decoupled DiLoCo, DiLoCo and an average in each step.

Two learners of the character model, each on a host of its own (a network namespace,
made and removed here; that needs root), the coordinator beside the first. Between them
are 100 Mbit/s and 50 ms in each direction. A step computes, and then sleeps to last so
long; then comes what the strategy does. Printed is the wall time of a step, and so of
a token, against a plain loop of Adam with no network and no coordinator, of which
there are two at the same time as well.

    python benchmarks/learning/decoupled_network.py [--seconds 25] [--repeats 1]
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import diloco_characters as characters
import jax
import numpy as np
import optax

from optax_dist import coordinator

_HELPERS = pathlib.Path(__file__).parents[2] / "tests" / "helpers" / "networks"
LEARNERS = 2
SECRET = "a secret of enough bytes"
METHODS = ("no network", "decoupled", "synchronous DiLoCo", "every step")
GOAL = 1.05


class Alone:
  """A plain training loop, with the face of a replica."""

  def __init__(self, optimizer, params):
    self.params, self._state = params, optimizer.init(params)
    self.finished, self.global_step = False, 0

    def update(params, state, grads):
      updates, state = optimizer.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    self._update = jax.jit(update)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    pass

  def step(self, grads, **_):
    self.params, self._state = self._update(self.params, self._state, grads)

  def finish(self):
    self.finished = True


def joined(told, optimizer, params):
  """What trains by the method that was told."""
  outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
  period = told["period"]
  strategies = {
    "decoupled": lambda: coordinator.decoupled_diloco(
      outer, fragments=told["fragments"], period=period, overlap=period // 4
    ),
    "synchronous DiLoCo": lambda: coordinator.local_updates(
      outer, communication_period=period
    ),
    "every step": lambda: None,
  }
  if told["method"] == "no network":
    return Alone(optimizer, params)
  return coordinator.join(
    optimizer,
    params,
    strategy=strategies[told["method"]](),
    replica=told["replica"],
    total_num_replicas=LEARNERS,
    replicas_to_aggregate=LEARNERS,
    coordinator_address=told["address"],
    start_coordinator=False,
    timeout=60.0,
  )


def learner(told):
  """One process: trains, and prints when each of its steps was over."""
  characters.HIDDEN = told["hidden"]
  text, _, symbols = characters.load_text()
  params = characters.init(jax.random.key(0), symbols)
  own = np.array_split(text, LEARNERS)[told["replica"]]
  gradient = jax.jit(jax.grad(characters.loss))
  rng = np.random.default_rng(told["replica"])
  size = own.size - characters.CONTEXT - 1
  ahead = np.arange(characters.CONTEXT + 1)
  draw = lambda: own[rng.integers(0, size, characters.BATCH)[:, None] + ahead]
  gradient(params, draw())
  tokens = {"tokens": characters.BATCH}
  if told["method"] != "decoupled":
    tokens = {}
  times = []
  with joined(told, optax.adam(characters.LEARNING_RATE), params) as replica:
    end = time.monotonic() + told["seconds"]
    while not replica.finished:
      start = time.monotonic()
      grads = jax.block_until_ready(gradient(replica.params, draw()))
      time.sleep(max(0.0, start + told["step_seconds"] - time.monotonic()))
      replica.step(grads, **tokens)
      times.append(time.monotonic())
      # One ends it for all, unless each is independent.
      mine = told["replica"] == 0 or told["method"] == "no network"
      if mine and times[-1] >= end:
        replica.finish()
  print(json.dumps({"times": times, "merges": replica.global_step}))
  return 0


def measure(args, hosts, method):
  """The seconds of a step, the mean of the learners, and the merges."""
  address = f"{hosts.address(0)}:29300"
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "OPTAX_DIST_SECRET": SECRET,
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
  }
  result = []
  with (
    tempfile.TemporaryDirectory() as folder,
    tempfile.TemporaryFile("w+") as errors,
  ):
    server = hosts.python(
      0,
      *("-m", "optax_dist", "coordinator"),
      *("--address", address, "--output", folder),
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      env=environment,
    )
    try:
      if not server.stdout.readline().startswith(b"ready"):
        raise RuntimeError("The coordinator did not start.")
      processes = []
      for number in range(LEARNERS):
        settings = {
          "method": method,
          "replica": number,
          "address": address,
          **{k: v for k, v in vars(args).items() if k != "learner"},
        }
        processes.append(
          hosts.python(
            number,
            *(str(pathlib.Path(__file__)), "--learner", json.dumps(settings)),
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
          )
        )
      for process in processes:
        out, _ = process.communicate(timeout=args.seconds + 120.0)
        if process.returncode:
          errors.seek(0)
          raise RuntimeError(errors.read()[-3000:])
        result.append(json.loads(out.splitlines()[-1]))
    finally:
      server.kill()
      server.communicate()
  paces = []
  for one in result:
    # Whole periods, the first of which is not counted.
    times, period = one["times"], args.period
    last = (len(times) - 1) // period * period
    if last <= period:
      # Too slow for that.
      period, last = 1, len(times) - 1
    paces.append((times[last] - times[period]) / (last - period))
  return float(np.mean(paces)), max(one["merges"] for one in result)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--learner", help=argparse.SUPPRESS)
  add("--seconds", type=float, default=25.0, help="of each run")
  add("--repeats", type=int, default=1)
  add("--methods", nargs="+", default=METHODS, choices=METHODS)
  add("--step-seconds", type=float, default=0.03)
  add("--period", type=int, default=100)
  add("--fragments", type=int, default=4)
  add("--hidden", type=int, default=512, help="units of the model")
  add("--delay", type=float, default=0.05, help="seconds one way")
  add("--rate", type=float, default=100e6, help="bits per second")
  args = parser.parse_args()
  if args.learner:
    return learner(json.loads(args.learner))
  sys.path.insert(0, str(_HELPERS))
  import hosts as host_maker

  why = host_maker.not_permitted()
  if why:
    raise SystemExit(f"No hosts can be made here: {why}.")
  ratio = 0.0
  with host_maker.Hosts(LEARNERS) as hosts:
    hosts.shape(delay=args.delay, rate=args.rate)
    for _ in range(args.repeats):
      alone = None
      for method in args.methods:
        pace, merges = measure(args, hosts, method)
        alone = alone or pace
        print(
          f"{method:18} {1e3 * pace:7.2f} ms a step, {pace / alone:6.3f} of"
          f" no network, {merges} merges",
          flush=True,
        )
        if method == "decoupled":
          ratio = max(ratio, pace / alone)
  print(f"decoupled: {ratio:.3f} of no network (goal {GOAL})")
  return 0


if __name__ == "__main__":
  sys.exit(main())
