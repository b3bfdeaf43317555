"""Learners of Decoupled DiLoCo in processes: one is slow, and they are killed.

Four learners of the character model of diloco_characters.py, each a process of its
own, on the coordinator. A step computes, and then sleeps to last so long; replica 3
takes twice that. Compared are a run without faults and one in which learners are
killed at random (SIGKILL, and started again), by the steps that a learner makes in a
second of its life, and by those of them that are in a merge; and the loss on
held-out text against synchronous DiLoCo (`coordinator.local_updates`) of as many
tokens.

    python benchmarks/learning/decoupled_learners.py [--seeds 1]
      [--seconds 100] [--kill-every 20]
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import threading
import time

import diloco_characters as characters
import jax
import numpy as np
import optax
import results

from optax_dist import coordinator
from optax_dist.coordinator.launch import launcher, placement, supervisor
from optax_dist.coordinator.launch.environment import Environment

LEARNERS, SLOW = 4, 3
VARIABLE = "DECOUPLED_LEARNERS"
TOKENS = characters.BATCH  # One is predicted in each window.


def strategy(options):
  outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
  if options["synchronous"]:
    return coordinator.local_updates(
      outer, communication_period=options["period"]
    )
  return coordinator.decoupled_diloco(
    # A slow learner comes at its next step, two of a fast one, when it is called.
    outer,
    fragments=options["fragments"],
    period=options["period"],
    overlap=4,
  )


def model():
  text, held_out, symbols = characters.load_text()
  return text, held_out, characters.init(jax.random.key(0), symbols)


def learner():
  """One process, which may come when the run is over."""
  with contextlib.suppress(coordinator.RunFinished):
    train()
  return 0


def train():
  """Trains until the run is over, and writes what it did."""
  options = json.loads(os.environ[VARIABLE])
  place = Environment.read()
  number, life = place.replica, place.restarts or 0
  text, _, params = model()
  own = np.array_split(text, LEARNERS)[number]
  gradient = jax.jit(jax.grad(characters.loss))
  rng = np.random.default_rng([options["seed"], number, life])
  draw = lambda: rng.integers(0, own.size - characters.CONTEXT - 1, TOKENS)
  ahead = np.arange(characters.CONTEXT + 1)
  gradient(params, own[draw()[:, None] + ahead])
  record = pathlib.Path(options["folder"]) / f"{number}.{life}.json"
  synchronous = options["synchronous"]
  with coordinator.join(
    optax.adam(characters.LEARNING_RATE),
    params,
    strategy=strategy(options),
    replicas_to_aggregate=LEARNERS if synchronous else 2,
    timeout=60.0,
  ) as replica:
    if options["kill_every"]:
      # All of them together, so each a quarter as often.
      wait = random.Random(f"{options['seed']} {number} {life}").expovariate(
        1 / (LEARNERS * options["kill_every"])
      )
      kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
      timer = threading.Timer(wait, kill)
      timer.daemon = True
      timer.start()
    step_seconds = options["step_seconds"] * (2 if number == SLOW else 1)
    began = time.monotonic()
    steps = since = merged = 0
    last = options["steps"]
    while not replica.finished:
      start = time.monotonic()
      grads = gradient(replica.params, own[draw()[:, None] + ahead])
      jax.block_until_ready(grads)
      if not synchronous:
        time.sleep(max(0.0, start + step_seconds - time.monotonic()))
        outcome = replica.step(grads, tokens=TOKENS)
      else:
        outcome = replica.step(grads)
      steps, since = steps + 1, since + 1
      if outcome.members:
        merged, since = merged + since, 0
      seconds = time.monotonic() - began
      temporary = record.with_suffix(".new")
      mine = [steps, merged, seconds, replica.global_step]
      temporary.write_text(json.dumps(mine))
      temporary.rename(record)  # It may be killed at any time.
      over = time.time() >= options["end"]
      if steps >= last if synchronous else over:
        replica.finish()
    leaves = [np.asarray(x) for x in jax.tree.leaves(replica.center)]
    np.savez(pathlib.Path(options["folder"]) / f"center{number}.npz", *leaves)


def run(args, seed, kill_every=0.0, steps=0):
  """One run; returns what learners did, and the loss on held-out text."""
  with tempfile.TemporaryDirectory() as folder:
    options = {
      "folder": folder,
      "seed": seed,
      "kill_every": kill_every,
      "synchronous": bool(steps),
      "steps": steps,
      "step_seconds": args.step_seconds,
      "period": args.period,
      "fragments": args.fragments,
      "end": time.time() + args.start + args.seconds,
    }
    said = []
    launcher.Launcher(
      [sys.executable, __file__, "--learner"],
      placement.Placement(LEARNERS),
      supervisor.Policy(restarts=1000),
      folder=pathlib.Path(folder) / "output",
      environment=Environment(num_replicas=LEARNERS),
      env={
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        VARIABLE: json.dumps(options),
      },
      echo=lambda label, line, error: said.append(line),
    ).run()
    folder = pathlib.Path(folder)
    lives = [json.loads(f.read_text()) for f in folder.glob("*.json")]
    with np.load(next(folder.glob("center*.npz"))) as arrays:
      leaves = [arrays[name] for name in arrays.files]
  _, held_out, params = model()
  center = jax.tree.unflatten(jax.tree.structure(params), leaves)
  starts = np.random.default_rng(0).integers(
    0, held_out.size - characters.CONTEXT - 1, characters.EVALUATED
  )
  windows = held_out[starts[:, None] + np.arange(characters.CONTEXT + 1)]
  result, merged, seconds, _ = np.sum(lives, axis=0)
  most = max(steps for steps, _, _, _ in lives)
  rounds = max(last for _, _, _, last in lives)
  return {
    "steps": int(result),
    "merged": int(merged),
    "seconds": float(seconds),
    "loss": float(characters.loss(center, windows)),
    "kills": sum(" starts again (" in line for line in said),
    # In the longest life; several lives of all learners have more rounds.
    "rounds": int(rounds),
    "longest": int(most),
  }


def show(name, found):
  """Prints what was found in a run, and returns it."""
  pace = found["steps"] / found["seconds"]
  part = found["merged"] / found["steps"]
  print(
    f"{name}: {found['steps']:,} steps, {pace:.2f} in a second of life, "
    f"{part:.1%} of them merged, {found['rounds']} rounds ("
    f"{found['longest']} steps in the longest life), {found['kills']} kills,"
    f" loss {found['loss']:.4f}",
    flush=True,
  )
  return found


def loss(figures):
  """How much worse than synchronous DiLoCo, as a fraction."""
  return figures["killed"]["loss"] / figures["synchronous"]["loss"] - 1


def compare(args, seed):
  """The three runs of one seed."""
  figures = {"without faults": show("without faults", run(args, seed))}
  result = run(args, seed, kill_every=args.kill_every)
  figures["killed"] = show("killed", result)
  # The slow one's steps are fewer; there all make as many.
  result = run(args, seed, steps=result["steps"] // LEARNERS)
  figures["synchronous"] = show("synchronous", result)
  pace = lambda name, what: figures[name][what] / figures[name]["seconds"]
  for what in ("steps", "merged"):
    ratio = pace("killed", what) / pace("without faults", what)
    print(f"{what} in a second of life, killed / without faults: {ratio:.3f}")
  print(
    f"loss against synchronous DiLoCo of as many tokens: {loss(figures):+.2%}"
  )
  return figures


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--learner", action="store_true", help=argparse.SUPPRESS)
  parser.add_argument("--seconds", type=float, default=100.0)
  parser.add_argument("--start", type=float, default=10.0, help="of processes")
  parser.add_argument("--kill-every", type=float, default=20.0)
  parser.add_argument("--step-seconds", type=float, default=0.03)
  parser.add_argument("--period", type=int, default=40)
  parser.add_argument("--fragments", type=int, default=4)
  parser.add_argument("--seeds", type=int, default=1)
  parser.add_argument("--json", type=pathlib.Path)
  args = parser.parse_args()
  if args.learner:
    return learner()
  kept = [compare(args, seed) for seed in range(args.seeds)]
  if args.seeds > 1:
    losses = [100 * loss(figures) for figures in kept]
    mean, half = results.interval(losses)
    print(f"loss, mean of {args.seeds}: {mean:+.2f}% +- {half:.2f}")
  if args.json:
    args.json.write_text(json.dumps(kept, indent=1))
  return 0


if __name__ == "__main__":
  sys.exit(main())
