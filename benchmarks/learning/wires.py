"""What the coordinator's wire formats cost in learning.

4 replicas, characters; gradients and means travel in one format. Two ways to train: a
mean of gradients at each step (momentum of 0.9), and local AdamW in rounds with an
outer SGD. It is the coordinator's own code that encodes, averages and decodes.

Each row's rate is the best of a grid, on a seed of its own. Seeds share their start
and their batches between rows, so intervals are of paired differences (95 %,
Student's t).

    python benchmarks/learning/wires.py [--seeds N] [--steps N]
      [--ways gradients rounds]
"""

import functools
import time

import diloco_characters as characters
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import results

from optax_dist.coordinator.aggregation import (
  layout,
  means,
  reducer,
  wire_formats,
)
from optax_dist.coordinator.protocol import entries

REPLICAS, PERIOD = 4, 8
TUNING_SEED = 1000
LOCAL_RATE = 3.2e-2
GRIDS = {
  "gradients": (0.1, 0.2, 0.4, 0.8),
  "rounds": (0.7, 1.0, 1.5, 2.0),
}


class Run:
  """What the runs of one way to train have in common: compiled programs."""

  def __init__(self, way, steps, data):
    text, held_out, self.symbols = data
    part = text.size // REPLICAS
    self._texts = jnp.asarray(text[: part * REPLICAS].reshape(REPLICAS, part))
    starts = np.linspace(
      0, held_out.size - characters.CONTEXT - 1, characters.EVALUATED
    ).astype(int)
    self._held_out = characters.windows_at(jnp.asarray(held_out), starts)
    self.rounds = way == "rounds"
    self._steps = steps
    shape = optax.warmup_cosine_decay_schedule(
      0.0, 1.0, max(1, steps // 20), steps, 0.1
    )
    local = optax.adamw(lambda count: LOCAL_RATE * shape(count))
    self._init_local = local.init

    def windows(key, text):
      at = jax.random.randint(
        key, (characters.BATCH,), 0, part - characters.CONTEXT
      )
      return characters.windows_at(text, at)

    def gradient(params, key, text):
      return jax.grad(characters.loss)(params, windows(key, text))

    def change(params, state, key, text):
      def step(carry, key):
        own, state = carry
        updates, state = local.update(gradient(own, key, text), state, own)
        return (optax.apply_updates(own, updates), state), None

      keys = jax.random.split(key, PERIOD)
      (own, state), _ = jax.lax.scan(step, (params, state), keys)
      return jax.tree.map(jnp.subtract, params, own), state

    self._gradients = jax.jit(jax.vmap(gradient, in_axes=(None, 0, 0)))
    self._changes = jax.jit(jax.vmap(change, in_axes=(None, 0, 0, 0)))
    self._loss = jax.jit(characters.loss)

    @jax.jit
    def apply(params, trace, mean, rate, count):
      if self.rounds:
        return jax.tree.map(lambda p, g: p - rate * g, params, mean), trace
      trace = jax.tree.map(lambda t, g: 0.9 * t + g, trace, mean)
      rate *= shape(count)
      return jax.tree.map(lambda p, t: p - rate * t, params, trace), trace

    self._apply = apply

  def train(self, wire, rate, seed):
    """The loss on held-out text after training."""
    key = jax.random.key(seed)
    params = characters.init(key, self.symbols)
    treedef = jax.tree.structure(params)
    trace = jax.tree.map(jnp.zeros_like, params)
    local = jax.vmap(lambda _: self._init_local(params))(jnp.arange(REPLICAS))
    place = layout.layout(jax.tree.leaves(params), wire)
    raws = [np.zeros(place.nbytes, np.uint8) for _ in range(REPLICAS)]
    parts = [entries.Part(i, i, 0, 0, 0, 1, 1.0) for i in range(REPLICAS)]
    keys = jax.random.split(jax.random.fold_in(key, 1), REPLICAS)
    exchanges = self._steps // PERIOD if self.rounds else self._steps
    for number in range(exchanges):
      of_now = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
      if self.rounds:
        own, local = self._changes(params, local, of_now, self._texts)
      else:
        own = self._gradients(params, of_now, self._texts)
      leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(own)]
      for i, raw in enumerate(raws):
        if not means.write([leaf[i] for leaf in leaves], place, raw):
          return np.nan
      mean = reducer.Reducer(place).whole(parts, raws)
      result = [leaf.astype(np.float32) for leaf in means.read(place, mean)]
      params, trace = self._apply(
        params, trace, jax.tree.unflatten(treedef, result), rate, number
      )
    return float(self._loss(params, self._held_out))


def draw(found):
  """Draws losses over the bits of a number."""
  figure, axes = plt.subplots(
    1, len(found), figsize=(4 * len(found), 3.4), layout="constrained"
  )
  for ax, (way, rows) in zip(np.atleast_1d(axes), found.items(), strict=True):
    for row in rows:
      ax.plot(row["bits"], np.mean(row["losses"]), "o", label=row["wire"])
    ax.set(title=way, xlabel="bits of each number", ylabel="loss")
    ax.set_xscale("log")
    ax.legend(fontsize="x-small")
  return figure


def main():
  """Tunes, trains and compares."""
  parser = results.parser(__doc__)
  parser.add_argument("--steps", type=int, default=320)
  parser.add_argument("--seeds", type=int, default=5)
  parser.add_argument("--ways", nargs="+", choices=GRIDS, default=[*GRIDS])
  args = parser.parse_args()
  if args.seeds < 2:
    parser.error("--seeds must be at least 2, for an interval")
  data = characters.load_text()
  result = {}
  for way in args.ways:
    run = Run(way, args.steps, data)
    rows = result[way] = []
    before = functools.partial(print, f"{way:9}", flush=True)
    for wire in wire_formats.WIRES:
      begin = time.perf_counter()
      tried = [run.train(wire, rate, TUNING_SEED) for rate in GRIDS[way]]
      rate = GRIDS[way][int(np.nanargmin(tried))]
      losses = [run.train(wire, rate, seed) for seed in range(args.seeds)]
      leaves = jax.tree.leaves(characters.init(jax.random.key(0), run.symbols))
      nbytes = layout.layout(leaves, wire).nbytes
      bits = 8 * nbytes / sum(leaf.size for leaf in leaves)
      rows.append({"wire": wire, "rate": rate, "bits": bits, "losses": losses})
      mean, half = results.interval(losses)
      shown = f"loss {mean:.4f} +- {half:.4f}, rate {rate:g}, {bits:.2f} bits"
      ratios = 100 * (np.asarray(losses) / np.asarray(rows[0]["losses"]) - 1)
      mean, half = results.interval(ratios)
      shown += f"; {mean:+.2f} % +- {half:.2f} of float32"
      before(f"{wire:8} {shown} ({time.perf_counter() - begin:.0f} s)")
  results.save(args, lambda: draw(result), result)


if __name__ == "__main__":
  main()
