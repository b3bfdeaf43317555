"""Decoupled DiLoCo with Muon inside: four learners, each on a clock of its own.

Handwritten digits, in one process. One learner is twice as slow as the others, and
another stops for a while; nobody waits for either.

    python examples/decoupled_diloco.py

Needs the extra [train]. Options: --steps 300 (of a fast learner) --alpha 0.25.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib
from sklearn.datasets import load_digits

from optax_dist import coordinator

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--alpha", type=float, default=0.25, help="of their own")
args = parser.parse_args()

STEP_SECONDS = (0.02, 0.02, 0.02, 0.04)
STOPS = 1  # This learner stops for half of the time.
BATCH = 64

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.data))
images = (digits.data[order] / 16).astype(np.float32)
labels = digits.target[order].astype(np.int32)
parts = np.array_split(np.arange(1400), len(STEP_SECONDS))
test = slice(1400, None)


def init():
  """64 pixels, a hidden layer, 10 digits."""
  keys = jax.random.split(jax.random.key(0))
  return {
    "hidden": jax.random.normal(keys[0], (64, 64)) / 8,
    "out": jax.random.normal(keys[1], (64, 10)) / 8,
    "bias": jnp.zeros(10),
  }


def logits(params, images):
  hidden = jax.nn.relu(images @ params["hidden"])
  return hidden @ params["out"] + params["bias"]


@jax.jit
def gradient(params, images, labels):
  loss = lambda p: optax.softmax_cross_entropy_with_integer_labels(
    logits(p, images), labels
  ).mean()
  return jax.grad(loss)(params)


def train(replica):
  """Trains on its own part of the data; returns its steps and merges."""
  number = replica.replica
  seconds, random = STEP_SECONDS[number], np.random.default_rng(number)
  steps = merged = 0
  while not replica.finished:
    began = time.monotonic()
    at = random.choice(parts[number], BATCH)
    grads = gradient(replica.params, images[at], labels[at])
    outcome = replica.step(grads, tokens=BATCH)
    steps, merged = steps + 1, merged + bool(outcome.members)
    if number == 0 and steps == args.steps:
      replica.finish()
    if number == STOPS and steps == args.steps // 4:
      time.sleep(args.steps * seconds / 2)
    time.sleep(max(0.0, began + seconds - time.monotonic()))
  predicted = logits(replica.center, images[test]).argmax(-1)
  accuracy = float(np.mean(predicted == labels[test]))
  return steps, merged, replica.global_step, accuracy


results = coordinator.run_embedded(
  train,
  len(STEP_SECONDS),
  contrib.muon(0.02),
  init(),
  replicas_to_aggregate=2,
  strategy=coordinator.decoupled_diloco(
    optax.sgd(0.7, momentum=0.9, nesterov=True),
    fragments=2,
    period=12,
    alpha=args.alpha,
  ),
)
for number, (steps, merged, rounds, _) in enumerate(results):
  print(f"learner {number}: {steps} steps, in {merged} of {rounds} merges")
print(f"test accuracy of the common parameters: {results[0][-1]:.3f}")
