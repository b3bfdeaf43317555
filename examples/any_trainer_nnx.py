"""Trains with nnx.Optimizer, with the coordinator behind it.

  optax-dist launch --replicas 3 --replicas-to-aggregate 2 --output runs/nnx \
      examples/any_trainer_nnx.py --steps 200

Kill any of the processes: the others go on, and it comes back. Checkpoints are
orbax's, of model and optimizer: `--resume` goes on from there after the whole job
was killed, with another number of replicas, too. Needs the extra [train], and
orbax-checkpoint.
"""

import argparse
import os
import pathlib

import absl.logging
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from digits import batches, load
from flax import nnx

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


@nnx.jit(donate_argnames=("optimizer",))
def train_step(model, optimizer, images, labels):
  value, grads = nnx.value_and_grad(loss)(model, images, labels)
  optimizer.update(model, grads)
  return value


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
  optimizer = nnx.Optimizer(model, k_of_n.tx, wrt=nnx.Param)

  # All restore.
  folder = pathlib.Path(os.environ.get("OPTAX_DIST_OUTPUT", ".")).absolute()
  folder /= "checkpoints"
  folder.mkdir(parents=True, exist_ok=True)
  options = ocp.CheckpointManagerOptions(read_only=True)
  with ocp.CheckpointManager(folder, options=options) as saved:
    if saved.latest_step() is not None:
      like = nnx.state((model, optimizer))
      restore = ocp.args.StandardRestore(like)
      nnx.update(
        (model, optimizer), saved.restore(saved.latest_step(), args=restore)
      )

  taken = k_of_n.until_finished(batches(images, labels, args.pause))
  for number, batch in enumerate(taken):
    value = train_step(model, optimizer, *batch)
    if not number:  # The first update joins the run, which may be under way.
      step = optimizer.opt_state.step[...]
      print(f"process {os.getpid()} starts at step {step}")
      # One replica saves. A process of --standby has its number only now.
      saves = k_of_n.replica.replica == 0
      options = ocp.CheckpointManagerOptions(
        save_interval_steps=args.save_every, read_only=not saves
      )
      saved = ocp.CheckpointManager(folder, options=options)
    if saves:
      state = ocp.args.StandardSave(nnx.state((model, optimizer)))
      saved.save(int(optimizer.opt_state.step[...]), args=state)
  saved.close()

  images, labels = test
  right = jnp.mean(jnp.argmax(model(images), -1) == labels)
  mine = coordinator.fingerprint(jax.tree.leaves(nnx.state(model, nnx.Param)))
  print(
    f"ends at step {optimizer.opt_state.step[...]}, {mine}, loss {value:.3f},"
    f" test accuracy {right:.1%}, {optimizer.opt_state.dropped[...]} dropped"
  )
  assert mine == coordinator.fingerprint(k_of_n.replica.params)


if __name__ == "__main__":
  main()
