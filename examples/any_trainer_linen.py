"""Trains a linen TrainState, with the coordinator behind its optimizer.

  optax-dist launch --replicas 3 --replicas-to-aggregate 2 --output runs/linen \
      examples/any_trainer_linen.py --steps 200

Kill any of the processes: the others go on, and it comes back. Needs the extra
[train].
"""

import argparse
import os

import jax
import optax
from digits import Network, accuracy, batches, init, load, loss
from flax.training.train_state import TrainState

from optax_dist import coordinator


@jax.jit
def train_step(state, images, labels):
  value, grads = jax.value_and_grad(loss)(state.params, images, labels)
  return state.apply_gradients(grads=grads), value


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--steps", type=int, default=200)
  parser.add_argument(
    "--pause", type=float, default=0.0, help="as if steps took that much longer"
  )
  args = parser.parse_args()

  data, test = load()
  schedule = optax.cosine_decay_schedule(3e-3, args.steps)
  k_of_n = coordinator.as_optimizer(
    optax.adamw(schedule), total_steps=args.steps
  )
  state = TrainState.create(
    apply_fn=Network().apply, params=init(), tx=k_of_n.tx
  )
  taken = k_of_n.until_finished(batches(*data, args.pause))
  for number, batch in enumerate(taken):
    state, value = train_step(state, *batch)
    if not number:  # The first update joins the run, which may be under way.
      print(f"process {os.getpid()} starts at step {state.opt_state.step}")

  mine = coordinator.fingerprint(state.params)
  print(
    f"ends at step {state.opt_state.step}, {mine}, loss {value:.3f},"
    f" test accuracy {accuracy(state.params, *test):.1%},"
    f" {state.opt_state.dropped} dropped"
  )
  assert mine == coordinator.fingerprint(k_of_n.replica.params)


if __name__ == "__main__":
  main()
