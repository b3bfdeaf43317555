"""A TensorFlow 1 parameter-server job with backup workers, on the coordinator.

docs/porting_a_parameter_server_job.md shows the original line by line. Here its
workers are threads of one process:

    python examples/port_from_tensorflow1.py

With `--join` this process is one worker, and the launcher starts all of them:

    optax-dist launch --replicas 4 --replicas-to-aggregate 3 \
      examples/port_from_tensorflow1.py --join

With `--checkpoint DIR/model.ckpt-1000` training goes on from TensorFlow's own
checkpoint, for which TensorFlow must be installed. Needs the extra [train].
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_dist
from optax_dist import coordinator, tensorflow1

WORKERS = 4

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--join", action="store_true")
parser.add_argument("--checkpoint", help="a checkpoint of TensorFlow 1")
args = parser.parse_args()

digits = load_digits()
images = (digits.data / 16).astype(np.float32)
labels = digits.target.astype(np.int32)
train, test = slice(0, 1400), slice(1400, None)


def logits_of(params, x):
  """TensorFlow's `tf.layers.dense(x, 10, name="softmax")`."""
  return x @ params["softmax"]["kernel"] + params["softmax"]["bias"]


def loss(params, x, y):
  """TensorFlow's `tf.losses.sparse_softmax_cross_entropy`."""
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits_of(params, x), y
  )
  return jnp.mean(losses)


@jax.jit
def accuracy(params):
  """Of the images that are not trained on."""
  return jnp.mean(
    jnp.argmax(logits_of(params, images[test]), -1) == labels[test]
  )


gradient = jax.jit(jax.grad(loss))
params = {
  "softmax": {"kernel": jnp.zeros((64, 10)), "bias": jnp.zeros(10)},
}
# TensorFlow's rule and the name of its slot, built on `optax.sgd(0.1, 0.9)`.
tx = optax_dist.optimizers.momentum(0.1, 0.9)
opt_state, global_step = tx.init(params), 0
if args.checkpoint:
  params, opt_state, global_step = tensorflow1.restore_checkpoint(
    args.checkpoint, params, opt_state
  )


def work(replica):
  """What each worker did between `with MonitoredTrainingSession` and its end."""
  rng = np.random.default_rng(replica.replica)
  while replica.global_step < global_step + args.steps:
    picked = rng.integers(train.stop, size=32)
    grads = gradient(replica.params, images[picked], labels[picked])
    replica.step(grads)  # Counts, or is stale and dropped: the outcome says.
  return replica.params


start = {"opt_state": opt_state, "global_step": global_step}
if args.join:
  with coordinator.join(tx, params, **start) as replica:
    trained = work(replica)
else:
  trained = coordinator.run_embedded(
    work, WORKERS, tx, params, replicas_to_aggregate=3, **start
  )[0]
print(f"test accuracy {accuracy(trained):.3f}")
