"""Trains with Tunix's PeftTrainer, which k of N replicas are behind.

  optax-dist launch --replicas 3 --replicas-to-aggregate 2 --output runs/tunix \
      examples/any_trainer_tunix.py --steps 200

The model is a small one of digits, to run anywhere. Kill any of the processes: the
others go on, and it comes back. Checkpoints are the trainer's: `--resume` goes on
from there after the whole job was killed. Needs google-tunix and the extra [train].
"""

import argparse
import os
import pathlib
import time

import absl.logging
import numpy as np
import optax
import orbax.checkpoint as ocp
from digits import load
from flax import nnx
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from optax_dist import coordinator


class Net(nnx.Module):
  def __init__(self, rngs):
    self.hidden = nnx.Linear(64, 64, rngs=rngs)
    self.out = nnx.Linear(64, 10, rngs=rngs)

  def __call__(self, x):
    return self.out(nnx.gelu(self.hidden(x.reshape(len(x), -1))))


def loss(model, images, labels):
  losses = optax.softmax_cross_entropy_with_integer_labels
  return losses(model(images), labels).mean()


def batches(images, labels, pause, size=64):
  """Each replica draws its own data, and other data when it starts again."""
  rng = np.random.default_rng(os.getpid())
  while True:
    time.sleep(pause)
    picked = rng.integers(len(labels), size=size)
    yield {"images": images[picked], "labels": labels[picked]}


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--steps", type=int, default=200)
  parser.add_argument("--save-every", type=int, default=50)
  parser.add_argument(
    "--pause", type=float, default=0.0, help="as if steps took that much longer"
  )
  args = parser.parse_args()
  absl.logging.set_verbosity("error")  # Of replicas that only restore.

  (images, labels), test = load()
  schedule = optax.cosine_decay_schedule(3e-3, args.steps)
  k_of_n = coordinator.behind(optax.adamw(schedule), total_steps=args.steps)
  model = Net(nnx.Rngs(0))
  # One replica saves, all restore.
  folder = pathlib.Path(os.environ.get("OPTAX_DIST_OUTPUT", ".")).absolute()
  (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
  config = TrainingConfig(
    eval_every_n_steps=1000,
    checkpoint_root_directory=str(folder / "checkpoints"),
    checkpointing_options=ocp.CheckpointManagerOptions(
      save_interval_steps=args.save_every,
      read_only=os.environ.get("OPTAX_DIST_REPLICA", "0") != "0",
    ),
  )
  trainer = PeftTrainer(model, k_of_n.tx, config).with_loss_fn(loss)
  state = trainer.optimizer.opt_state
  print(f"process {os.getpid()} starts at step {state.step[...]}")
  trainer.train(k_of_n.until_finished(batches(images, labels, args.pause)))

  images, labels = test
  right = np.mean(np.argmax(model(images), -1) == labels)
  mine = coordinator.fingerprint(nnx.state(model, nnx.Param))
  print(
    f"ends at step {state.step[...]}, {mine}, test accuracy {right:.1%},"
    f" {state.dropped[...]} dropped"
  )
  assert mine == coordinator.fingerprint(k_of_n.replica.params)


if __name__ == "__main__":
  main()
