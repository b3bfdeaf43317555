"""A small transformer on Python's own library, its optimizer state sharded (ZeRO-1).

Each device has the whole model and 1/N of Adam's state: gradients are
reduce-scattered, the optimizer runs on a shard, the updates are gathered.

    JAX_NUM_CPU_DEVICES=8 python examples/sharded_transformer.py

Needs the extra [train]. Options: --steps 200 --width 64 --layers 2.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P
from sharded_transformer_groups import Transformer, library

import optax_dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--context", type=int, default=64)
args = parser.parse_args()

mesh = jax.make_mesh((jax.device_count(),), ("data",))

codes, size = library()
model = Transformer(size, args.width, args.layers, args.context, nnx.Rngs(0))
graph, params = nnx.split(model, nnx.Param)


def loss(params, tokens):
  """Mean nats per character."""
  logits = nnx.merge(graph, params)(tokens[:, :-1])
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits, tokens[:, 1:]
  )
  return jnp.mean(losses)


tx = optax_dist.sharded(optax.adamw(3e-3), "data", num_replicas=mesh.size)
specs = optax_dist.states.state_specs(jax.eval_shape(tx.init, params), "data")
init = jax.jit(
  jax.shard_map(tx.init, mesh=mesh, in_specs=(P(),), out_specs=specs)
)


@jax.jit
@jax.shard_map(
  mesh=mesh,
  in_specs=(P(), specs, P("data")),
  out_specs=(P(), specs, P()),
)
def step(params, state, tokens):
  """One step on all devices."""
  own = optax_dist.local_params(params, "data")  # Each device's own gradient.
  value, grads = jax.value_and_grad(loss)(own, tokens)
  updates, state = tx.update(grads, state, params)
  params = optax.apply_updates(params, updates)
  return params, state, jax.lax.pmean(value, "data")


def bytes_on(tree, device):
  """Returns how much of a tree one device holds."""
  return sum(
    shard.data.nbytes
    for leaf in jax.tree.leaves(tree)
    for shard in leaf.addressable_shards
    if shard.device == device
  )


params = optax_dist.states.place(params, mesh, P())
state = init(params)
first = mesh.devices.flat[0]
print(
  f"{mesh.size} devices, each with {bytes_on(params, first):,} bytes of "
  f"parameters and {bytes_on(state, first):,} of the optimizer's state"
)
rng = np.random.default_rng(0)
for i in range(1, args.steps + 1):
  starts = rng.integers(len(codes) - args.context - 1, size=4 * mesh.size)
  tokens = codes[starts[:, None] + np.arange(args.context + 1)]
  tokens = optax_dist.states.place(tokens, mesh, P("data"))
  params, state, value = step(params, state, tokens)
  if i % 20 == 0 or i in (1, args.steps):
    print(f"step {i}: loss {value:.3f}")
