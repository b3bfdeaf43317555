"""A Flax nnx model on handwritten digits, data parallel with `cross_shard`.

On any number of devices; on a machine with one CPU make some:

    JAX_NUM_CPU_DEVICES=8 python examples/nnx_digits.py

Needs the extra [train]. Options: --epochs 20 --batch 128.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import optax_dist

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch", type=int, default=128, help="of all devices")
args = parser.parse_args()

mesh = jax.make_mesh((jax.device_count(),), ("data",))
batch = args.batch - args.batch % mesh.size

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.data))
images = (digits.data[order] / 16).astype(np.float32)
labels = digits.target[order].astype(np.int32)
train, test = slice(0, 1400), slice(1400, None)


class Net(nnx.Module):
  """64 pixels, a hidden layer, 10 digits."""

  def __init__(self, rngs):
    self.hidden = nnx.Linear(64, 128, rngs=rngs)
    self.out = nnx.Linear(128, 10, rngs=rngs)

  def __call__(self, x):
    return self.out(nnx.relu(self.hidden(x)))


def loss(model, images, labels):
  """Mean cross entropy of this device's share of the batch."""
  losses = optax.softmax_cross_entropy_with_integer_labels(
    model(images), labels
  )
  return jnp.mean(losses)


model = Net(nnx.Rngs(0))
tx = optax.chain(
  optax_dist.cross_shard("data"),  # The mean of all devices' gradients, then
  optax.clip_by_global_norm(1.0),  # what comes after sees that mean.
  optax.adam(2e-3),
)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)


@jax.jit
@jax.shard_map(
  mesh=mesh,
  in_specs=(P(), P(), P("data"), P("data")),
  out_specs=(P(), P(), P()),
)
def step(model, optimizer, images, labels):
  """One step on all devices."""
  value, grads = nnx.value_and_grad(loss)(model, images, labels)
  optimizer.update(model, grads)
  return model, optimizer, jax.lax.pmean(value, "data")


model, optimizer = optax_dist.states.place((model, optimizer), mesh, P())
rng = np.random.default_rng(1)
for epoch in range(args.epochs):
  shuffled = rng.permutation(train.stop)
  for start in range(0, train.stop - batch + 1, batch):
    picked = shuffled[start : start + batch]
    share = optax_dist.states.place(
      (images[picked], labels[picked]), mesh, P("data")
    )
    model, optimizer, value = step(model, optimizer, *share)
  if epoch % 5 == 4 or epoch == args.epochs - 1:
    right = jnp.argmax(model(images[test]), -1) == labels[test]
    print(
      f"epoch {epoch + 1}: loss {value:.3f}, test accuracy {right.mean():.3f}"
    )
