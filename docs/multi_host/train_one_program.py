"""Trains on scikit-learn's digits, on all devices of all processes of a job.

python train_one_program.py                    # one process
srun python train_one_program.py               # as many as SLURM starts; see slurm.sh
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import optax_dist


def init(key):
  keys = jax.random.split(key)
  return {
    "hidden": jax.random.normal(keys[0], (64, 64)) / 8,
    "out": jax.random.normal(keys[1], (64, 10)) / 8,
  }


def loss(params, images, labels):
  logits = jax.nn.relu(images @ params["hidden"]) @ params["out"]
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return jnp.mean(losses)


def own_batches(size):
  """Yields batches of this process's own part of the images, for ever."""
  digits = load_digits()
  own = np.arange(len(digits.data)) % jax.process_count() == jax.process_index()
  images = (digits.data[own] / 16).astype(np.float32)
  labels = digits.target[own].astype(np.int32)
  rng = np.random.default_rng(jax.process_index())
  while True:
    picked = rng.choice(len(images), size, replace=False)
    yield images[picked], labels[picked]


def train(steps=100, batch_size=16):
  """Returns the parameters and the last loss; ``batch_size`` is a replica's."""
  replicas = jax.device_count()
  mesh = jax.make_mesh((replicas,), ("data",))
  tx = optax_dist.sync_replicas(
    optax.adam(3e-3),
    "data",
    replicas_to_aggregate=max(1, replicas - 1),
    total_num_replicas=replicas,
  )
  # What is equal on all replicas is P(), what belongs to one P("data"). Made
  # where it will be: no process holds another one's part.
  everywhere, by_replica = (
    NamedSharding(mesh, P()),
    NamedSharding(mesh, P("data")),
  )
  params = jax.jit(init, out_shardings=everywhere)(jax.random.key(0))
  shapes = jax.eval_shape(tx.init, params)
  specs = optax_dist.states.state_specs(shapes, "data")
  with jax.set_mesh(mesh):
    state = jax.jit(tx.init, out_shardings=specs)(params)

  def step(params, state, images, labels, arrived):
    own = optax_dist.local_params(params, "data")
    value, grads = jax.value_and_grad(loss)(own, images, labels)
    updates, state = tx.update(grads, state, params, arrived=arrived[0])
    params = optax.apply_updates(params, updates)
    return params, state, jax.lax.pmean(value, "data")

  step = jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P(), specs, P("data"), P("data"), P("data")),
      out_specs=(P(), specs, P()),
    ),
    donate_argnums=(0, 1),
  )
  # Each process hands in the rows of its own devices.
  together = lambda rows: jax.make_array_from_process_local_data(
    by_replica, rows
  )
  batches = own_batches(batch_size * jax.local_device_count())
  for i in range(steps):
    images, labels = next(batches)
    # False where this process has no batch ready: the others go on.
    arrived = np.ones(jax.local_device_count(), bool)
    params, state, value = step(
      params, state, *map(together, (images, labels, arrived))
    )
    if i % 20 == 19:
      last = float(value)  # Also waits for the steps until here.
      if jax.process_index() == 0:
        print(f"step {i + 1}: loss {last:.3f}", flush=True)
  return params, float(value)


if __name__ == "__main__":
  # First of all, and with no arguments where JAX knows the cluster.
  try:
    jax.distributed.initialize()
  except ValueError:
    print("No cluster was found: one process, on its own devices.")
  print(
    f"process {jax.process_index()} of {jax.process_count()},"
    f" {jax.local_device_count()} of {jax.device_count()} devices",
    flush=True,
  )
  train()
