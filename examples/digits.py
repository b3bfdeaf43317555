"""Trains on handwritten digits, data parallel, with one of four strategies.

    python examples/digits.py --output runs/digits
    python examples/digits.py --strategy sync-replicas   # or elastic, or diloco

One replica on each device; if there is only a CPU, on 8 virtual devices. The
images are scikit-learn's: 1,797 real ones. Writes metrics.jsonl, with a line for
each step, and training.png. Needs the extra [train]. `digits_launched.py` has the
same network for replicas in separate processes.
"""

import argparse
import json
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import optax_dist

STRATEGIES = ("cross-shard", "sync-replicas", "elastic", "diloco")


class Network(nn.Module):
  """Two convolutions, each followed by a downsampling, and two dense layers."""

  @nn.compact
  def __call__(self, images):
    x = images
    for features in (32, 64):
      x = nn.gelu(nn.Conv(features, kernel_size=(3, 3))(x))
      x = nn.max_pool(x, window_shape=(2, 2), strides=(2, 2))
    x = nn.gelu(nn.Dense(128)(x.reshape(len(x), -1)))
    return nn.Dense(10)(x)


def init(seed=0):
  # XLA takes four times as long to compile the default generator for a CPU.
  key = jax.random.key(seed, impl="rbg")
  return jax.jit(Network().init)(key, jnp.zeros((1, 8, 8, 1)))


def loss(params, images, labels):
  """The mean cross-entropy, in nats."""
  logits = Network().apply(params, images)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return losses.mean()


@jax.jit
def accuracy(params, images, labels):
  return jnp.mean(jnp.argmax(Network().apply(params, images), -1) == labels)


def load():
  """Images and labels: 1,437 to train on, and 360 to test."""
  digits = load_digits()
  order = np.random.default_rng(0).permutation(len(digits.target))
  images = (digits.images[order, ..., None] / 16).astype(np.float32)
  labels = digits.target[order].astype(np.int32)
  return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def batches(images, labels, pause, size=64):
  """Each process draws its own data, and other data when it starts again."""
  rng = np.random.default_rng(os.getpid())
  while True:
    time.sleep(pause)
    picked = rng.integers(len(labels), size=size)
    yield images[picked], labels[picked]


def optimizer(steps):
  return optax.adam(optax.cosine_decay_schedule(3e-3, steps))


def transform(strategy, steps, replicas):
  """How the replicas train together, as one optax transformation."""
  adam, clip = optimizer(steps), optax.clip_by_global_norm(1.0)
  match strategy:
    case "cross-shard":  # Each step applies the mean of all gradients.
      return optax.chain(clip, optax_dist.cross_shard("data"), adam)
    case "sync-replicas":  # A step needs three quarters of them.
      k = max(1, 3 * replicas // 4)
      sync = optax_dist.sync_replicas(
        adam, "data", replicas_to_aggregate=k, total_num_replicas=replicas
      )
      return optax.chain(clip, sync)
    case "elastic":  # Replicas explore, tied to a center.
      return optax_dist.elastic_average(
        adam,
        "data",
        num_replicas=replicas,
        moving_rate=0.9 / replicas,
        rho=0.0,
        communication_period=10,
      )
  # Replicas train alone; an outer optimizer applies their mean change.
  return optax_dist.diloco(
    adam, "data", num_replicas=replicas, communication_period=20
  )


def picture(path, records, title):
  """Draws the loss of each step, and the accuracy where it was measured."""
  figure = matplotlib.figure.Figure(figsize=(11, 4.2), layout="constrained")
  figure.suptitle(title, fontweight="bold")
  left, right = figure.subplots(1, 2)
  steps = [record["step"] for record in records]
  left.semilogy(steps, [record["loss"] for record in records])
  left.set(title="training loss", xlabel="step", ylabel="cross-entropy (nats)")
  tested = [record for record in records if "test_accuracy" in record]
  percent = [100 * record["test_accuracy"] for record in tested]
  right.plot([record["step"] for record in tested], percent, "o-", color="C1")
  right.set(title="test accuracy", xlabel="step", ylabel="correct images (%)")
  if percent:
    right.annotate(
      f"{percent[-1]:.1f} %",
      (tested[-1]["step"], percent[-1]),
      xytext=(0, -12),
      textcoords="offset points",
      ha="right",
      va="top",
      fontsize=15,
    )
  for axes in (left, right):
    axes.grid(alpha=0.3)
  figure.savefig(path, dpi=110)


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--strategy", choices=STRATEGIES, default=STRATEGIES[0])
  parser.add_argument("--epochs", type=int, default=20)
  parser.add_argument("--batch", type=int, default=64, help="of all replicas")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--output", type=pathlib.Path, default="runs/digits")
  args = parser.parse_args()

  if "JAX_NUM_CPU_DEVICES" not in os.environ:
    # Has no effect on accelerators.
    jax.config.update("jax_num_cpu_devices", 8)
  mesh = jax.make_mesh((jax.device_count(),), ("data",))
  if args.batch % mesh.size:
    parser.error(f"--batch {args.batch} is no multiple of {mesh.size} devices")
  train, test = load()
  rng = np.random.default_rng(args.seed)
  steps = len(train[1]) // args.batch  # In an epoch.
  tx = transform(args.strategy, args.epochs * steps, mesh.size)

  # Replicas share the parameters, or each has its own, with a center in the state.
  own = args.strategy in ("elastic", "diloco")
  params = init(args.seed)
  specs = optax_dist.states.state_specs(jax.eval_shape(tx.init, params), "data")
  state = optax_dist.states.place(tx.init(params), mesh, specs)
  if own:
    params = jax.tree.map(lambda x: jnp.stack([x] * mesh.size), params)
  params = optax_dist.states.place(params, mesh, P("data") if own else P())

  def step(params, state, images, labels, arrived):
    # With own parameters, a replica has one row of them.
    mine = jax.tree.map(lambda x: x[0], params) if own else params
    value, grads = jax.value_and_grad(loss)(
      optax_dist.local_params(mine, "data"), images, labels
    )
    late = {"arrived": arrived[0]} if args.strategy == "sync-replicas" else {}
    updates, state = tx.update(grads, state, mine, **late)
    mine = optax.apply_updates(mine, updates)
    params = jax.tree.map(lambda x: x[None], mine) if own else mine
    return params, state, jax.lax.pmean(value, "data")

  shared = P("data") if own else P()
  train_step = jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(shared, specs, P("data"), P("data"), P("data")),
      out_specs=(shared, specs, P()),
    ),
    donate_argnums=(0, 1),
  )

  args.output.mkdir(parents=True, exist_ok=True)
  records = []
  with open(args.output / "metrics.jsonl", "w") as file:
    for epoch in range(1, args.epochs + 1):
      losses = []
      order = rng.permutation(len(train[1]))[: steps * args.batch]
      for picked in order.reshape(steps, args.batch):
        # As if each replica were late in one of ten steps.
        arrived = rng.random(mesh.size) < 0.9
        batch = (train[0][picked], train[1][picked], arrived)
        batch = optax_dist.states.place(batch, mesh, P("data"))
        params, state, value = train_step(params, state, *batch)
        losses.append(value)
      center = optax_dist.center_params(state) if own else params
      correct = accuracy(jax.device_get(center), *test)  # On one device.
      first = len(records) + 1
      records += [
        {"step": first + i, "epoch": epoch, "loss": float(value)}
        for i, value in enumerate(losses)
      ]
      records[-1]["test_accuracy"] = float(correct)
      for record in records[first - 1 :]:
        file.write(json.dumps(record) + "\n")
      file.flush()
      print(
        f"epoch {epoch:2} of {args.epochs}: loss {records[-1]['loss']:.4f},"
        f" test accuracy {correct:.1%}",
        flush=True,
      )
  replicas = f"{args.strategy}, {mesh.size} replicas"
  picture(args.output / "training.png", records, f"Digits, {replicas}")
  if args.strategy == "sync-replicas":
    print(optax_dist.sync_report(state))
  print(f"{replicas}: metrics and picture in {args.output}")


if __name__ == "__main__":
  main()
