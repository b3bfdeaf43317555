"""Trains on handwritten digits, with the same bits whatever happens to replicas.

  optax-dist launch --replicas 1 --output runs/alone examples/deterministic.py
  optax-dist launch --replicas 4 --chaos kill:1@200,slow:2x5 --output runs/four \
      examples/deterministic.py

Both end with the same digest of parameters and optimizer state: a step is always the
same eight micro-batches, with the same keys for dropout, whoever computes them, and
their gradients are added in one order. See docs/deterministic.md.

Writes a line with step, test loss and digest for each step to steps.jsonl in the
launcher's --output. Needs the extra [train]. Options: --epochs 10 --pause 0.0 (seconds
before each micro-batch, to have time to lose replicas).
"""

import argparse
import json
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import optax
from digits import load

from optax_dist import coordinator

BATCH, MICRO_BATCH = 64, 8


def init():
  first, second = jax.random.split(jax.random.key(0))
  return {
    "in": jax.random.normal(first, (64, 128)) / 8,
    "bias": jnp.zeros(128),
    "out": jax.random.normal(second, (128, 10)) / 11,
  }


def loss(params, images, labels, key=None):
  """The mean cross-entropy, in nats; with dropout if there is a key."""
  hidden = jax.nn.gelu(images @ params["in"] + params["bias"])
  if key is not None:
    kept = jax.random.bernoulli(key, 0.7, hidden.shape)
    hidden = jnp.where(kept, hidden / 0.7, 0.0)
  losses = optax.softmax_cross_entropy_with_integer_labels(
    hidden @ params["out"], labels
  )
  return losses.mean()


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--epochs", type=int, default=10)
  parser.add_argument("--pause", type=float, default=0.0)
  args = parser.parse_args()

  (images, labels), test = load()
  images, tested = (x.reshape(len(x), -1) for x in (images, test[0]))
  data = coordinator.Batches(
    len(labels),
    BATCH,
    seed=0,
    epochs=args.epochs,
    micro_batch=MICRO_BATCH,
    deterministic=True,
  )
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
  jitted, test_loss = jax.jit(jax.grad(loss)), jax.jit(loss)

  def gradient(params, slot):
    samples = images[slot.indices], labels[slot.indices]
    return jitted(params, *samples, slot.key)

  folder = pathlib.Path(os.environ.get("OPTAX_DIST_OUTPUT", "runs/alone"))
  # A replica that would compute other bits is refused when it joins.
  with coordinator.join(tx, init(), data=data, probe=gradient) as replica:
    step = replica.global_step
    for slot in replica.micro_batches():
      time.sleep(args.pause)
      replica.step(gradient(replica.params, slot))
      if replica.global_step > step:
        step = replica.global_step
        record = {
          "step": step,
          "loss": float(test_loss(replica.params, tested, test[1])),
          "digest": replica.fingerprint(),
          "replica": replica.replica,
        }
        with open(folder / "steps.jsonl", "a") as file:
          file.write(json.dumps(record) + "\n")
    print(f"ends at step {replica.global_step}, {replica.fingerprint()}")


if __name__ == "__main__":
  main()
