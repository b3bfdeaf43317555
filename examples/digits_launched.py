"""Trains on handwritten digits with replicas in separate processes.

  optax-dist launch --replicas 4 --replicas-to-aggregate 2 \
      --chaos kill:1@40,slow:2x5 --output runs/launched examples/digits_launched.py

The same network and images as in `digits.py`. Here a step takes the first two
gradients of four replicas, replica 1 is killed at its 40th gradient and comes back,
and replica 2 is five times slower than the others. Each epoch has each sample once:
the coordinator leases samples, and gives those of a dropped gradient to others.

Writes metrics.jsonl, training.png and checkpoints to the launcher's --output, and
goes on from there with --resume. Needs the extra [train], and orbax-checkpoint.
Options: --epochs 40 --batch 64 (of a step) --save-every 100.
"""

import argparse
import json
import os
import pathlib

import jax
from digits import accuracy, init, load, loss, optimizer, picture

from optax_dist import coordinator
from optax_dist.coordinator import checkpoint


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--epochs", type=int, default=40)
  parser.add_argument("--batch", type=int, default=64, help="of a step")
  parser.add_argument("--save-every", type=int, default=100)
  args = parser.parse_args()

  (images, labels), test = load()
  steps = len(labels) // args.batch  # In an epoch.
  data = coordinator.Batches(
    len(labels), args.batch, seed=0, epochs=args.epochs
  )
  tx, params = optimizer(args.epochs * steps), init()
  gradient = jax.jit(jax.value_and_grad(loss))
  folder = pathlib.Path(os.environ.get("OPTAX_DIST_OUTPUT", "runs/launched"))
  saved, metrics = folder / "checkpoints", folder / "metrics.jsonl"
  state = checkpoint.resume(saved, params, tx.init(params))

  with coordinator.join(tx, **state, data=data) as replica:
    print(f"process {os.getpid()} joins at step {replica.global_step}")
    first = False
    for picked in replica.batches():
      value, grads = gradient(replica.params, images[picked], labels[picked])
      outcome = replica.step(grads)
      checkpoint.save_if_due(saved, replica, outcome, args.save_every, keep=3)
      # One of those that took the step writes its line.
      first = outcome.members[:1] == (replica.replica,)
      if first:
        step = outcome.global_step
        record = {"step": step, "loss": float(value)}
        record["gradients"] = len(outcome.members)
        if step % steps == 0:
          record["test_accuracy"] = float(accuracy(replica.params, *test))
          print(f"step {step}: test accuracy {record['test_accuracy']:.1%}")
        with open(metrics, "a") as file:
          file.write(json.dumps(record) + "\n")
    outcome = replica.finish()
    checkpoint.save_if_due(saved, replica, outcome, args.save_every, keep=3)
    print(f"ends at step {replica.global_step}, {replica.fingerprint()}")
  if first:
    lines = map(json.loads, metrics.read_text().splitlines())
    # After a resume some steps are there twice.
    records = {record["step"]: record for record in lines}
    records = [records[step] for step in sorted(records)]
    picture(folder / "training.png", records, "Digits, replicas as processes")


if __name__ == "__main__":
  main()
