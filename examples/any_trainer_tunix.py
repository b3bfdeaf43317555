"""Trains with Tunix's PeftTrainer, with the coordinator behind its optimizer.

  optax-dist launch --replicas 3 --replicas-to-aggregate 2 --output runs/tunix \
      examples/any_trainer_tunix.py --steps 200

The model is a small one of digits, to run anywhere. Kill any of the processes: the
others go on, and it comes back. Checkpoints are the trainer's: `--resume` goes on
from there after the whole job was killed. Needs google-tunix and the extra [train].
"""

import argparse
import os
import pathlib

import absl.logging
import numpy as np
import optax
import orbax.checkpoint as ocp
from any_trainer_nnx import Net, loss
from digits import batches, load
from flax import nnx
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from optax_dist import coordinator


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
  k_of_n = coordinator.as_optimizer(
    optax.adamw(schedule), total_steps=args.steps
  )
  model = Net(nnx.Rngs(0))
  # One replica saves, all restore.
  folder = pathlib.Path(os.environ.get("OPTAX_DIST_OUTPUT", ".")).absolute()
  (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
  config = TrainingConfig(
    eval_every_n_steps=1000,
    checkpoint_root_directory=str(folder / "checkpoints"),
    checkpointing_options=ocp.CheckpointManagerOptions(
      save_interval_steps=args.save_every,
      # A process of --standby has no number yet.
      read_only=os.environ.get("OPTAX_DIST_REPLICA") != "0",
    ),
  )
  trainer = PeftTrainer(model, k_of_n.tx, config).with_loss_fn(loss)
  state = trainer.optimizer.opt_state
  print(f"process {os.getpid()} starts with a checkpoint of {state.step[...]}")
  named = (
    {"images": images, "labels": labels}
    for images, labels in batches(images, labels, args.pause)
  )
  trainer.train(k_of_n.until_finished(named))

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
