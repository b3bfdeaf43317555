"""A transformer, sharded over the processes of each replica; kill any of them.

Each replica is two processes that run one JAX program: parameters and optimizer
state are sharded over the devices of both (fsdp). Replicas average gradients shard
by shard. It learns Python's own library source, character by character.

  optax-dist launch --replicas 2 --processes-per-replica 2 --min-replicas 1 \
      --output runs/groups examples/sharded_transformer_groups.py --steps 300

Then `kill -9` one of the process ids that it prints: its replica starts again as
a whole, and the other one goes on meanwhile. Needs the extra [train].
"""

import argparse
import os
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_dist import coordinator
from optax_dist.coordinator import checkpoint


class Block(nnx.Module):
  """Attention and two layers, each with a residual connection."""

  def __init__(self, width, rngs):
    self.norm1 = nnx.LayerNorm(width, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(
      num_heads=4, in_features=width, decode=False, rngs=rngs
    )
    self.norm2 = nnx.LayerNorm(width, rngs=rngs)
    self.up = nnx.Linear(width, 4 * width, rngs=rngs)
    self.down = nnx.Linear(4 * width, width, rngs=rngs)

  def __call__(self, x):
    mask = nnx.make_causal_mask(x[..., 0])
    x = x + self.attention(self.norm1(x), mask=mask)
    return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
  """Predicts the next character at each position."""

  def __init__(self, size, width, layers, context, rngs):
    self.embed = nnx.Embed(size, width, rngs=rngs)
    self.place = nnx.Embed(context, width, rngs=rngs)
    self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
    self.out = nnx.Linear(width, size, rngs=rngs)

  def __call__(self, tokens):
    x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[-1]))
    for block in self.blocks:
      x = block(x)
    return self.out(x)


def library():
  """Python's own library as numbers, and how many there are."""
  folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
  text = "".join(
    file.read_text("utf-8", errors="ignore")
    for file in sorted(folder.glob("*.py"))[:60]
  )
  text = "".join(c for c in text if c == "\n" or " " <= c <= "~")
  letters = np.frombuffer(text.encode("ascii"), np.uint8)
  vocabulary, codes = np.unique(letters, return_inverse=True)
  return codes.astype(np.int32), len(vocabulary)


def placed(value, mesh, spec):
  """The array on all processes' devices; each has the same value."""
  value = np.asarray(value)
  return jax.make_array_from_callback(
    value.shape, NamedSharding(mesh, spec), lambda index: value[index]
  )


def fsdp(value, mesh):
  """Sharded along the first dimension that can be; otherwise replicated."""
  for dimension, size in enumerate(value.shape):
    if size % mesh.size == 0:
      return placed(value, mesh, P(*[None] * dimension, "fsdp"))
  return placed(value, mesh, P())


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--steps", type=int, default=300)
  parser.add_argument("--width", type=int, default=64)
  parser.add_argument("--layers", type=int, default=2)
  parser.add_argument("--context", type=int, default=64)
  parser.add_argument("--save-every", type=int, default=100)
  args = parser.parse_args()

  coordinator.initialize_processes()  # First of all.
  mesh = jax.make_mesh(
    (jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,)
  )
  speaks = jax.process_index() == 0

  codes, size = library()
  model = Transformer(size, args.width, args.layers, args.context, nnx.Rngs(0))
  graph, params = nnx.split(model, nnx.Param)
  params = jax.tree.map(lambda x: fsdp(x, mesh), params)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))

  @jax.jit
  def gradient(params, tokens):
    def loss(params):
      logits = nnx.merge(graph, params)(tokens[:, :-1])
      losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, tokens[:, 1:]
      )
      return jnp.mean(losses)

    return jax.value_and_grad(loss)(params)

  folder = pathlib.Path(os.environ.get("OPTAX_DIST_OUTPUT", "."), "checkpoints")
  state = checkpoint.resume(folder, params, tx.init(params))

  with coordinator.join(tx, **state) as replica:
    print(f"process {os.getpid()} joins at step {replica.global_step}")
    # Of the replica, not of the process: both must draw the same.
    rng = np.random.default_rng([replica.replica, replica.global_step])
    value = jnp.nan
    while replica.global_step < args.steps and not replica.finished:
      starts = rng.integers(len(codes) - args.context - 1, size=8)
      tokens = codes[starts[:, None] + np.arange(args.context + 1)]
      value, grads = gradient(replica.params, placed(tokens, mesh, P("fsdp")))
      outcome = replica.step(grads)
      step = outcome.global_step
      checkpoint.save_if_due(folder, replica, outcome, args.save_every, keep=3)
      if speaks and step % 20 == 0:
        print(f"step {step}, loss {value:.3f}, of {len(outcome.members)}")
    outcome = replica.finish()
    checkpoint.save_if_due(folder, replica, outcome, args.save_every, keep=3)
    if speaks:
      print(f"step {replica.global_step}, loss {value:.3f}")


if __name__ == "__main__":
  main()
