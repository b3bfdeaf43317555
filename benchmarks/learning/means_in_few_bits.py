"""What it costs in learning if the mean travels in few bits as well.

4 replicas, characters, on the coordinator's wires of few bits: once the mean goes back
as bfloat16, once as the gradients came, where whoever rounds it adds what that left out
to the next mean (DoubleSqueeze). Two ways to train: a mean of gradients at each step
(momentum of 0.9), and local AdamW in rounds with an outer SGD. It is the coordinator's
own code that encodes, averages and decodes.

Each row's rate is the best of a grid, on a seed of its own. Seeds share their start
and their batches between rows, so intervals are of paired differences (95 %,
Student's t).

    python benchmarks/learning/means_in_few_bits.py [--seeds N] [--steps N]
      [--ways gradients rounds] [--wires WIRE ...]

Tang et al. 2019, DoubleSqueeze (https://arxiv.org/abs/1905.05957).
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

from optax_dist.coordinator.aggregation import encoder, reducer, wire_formats
from optax_dist.coordinator.protocol import entries

REPLICAS, PERIOD = 4, 8
TUNING_SEED = 1000
LOCAL_RATE = 3.2e-2
FEW = [w for w in wire_formats.WIRES if wire_formats.feeds_back(w)]
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

  def encoders(self, params, wire, mean_wire):
    """One for each replica; the first makes the means."""
    decay = 0.95 if self.rounds and wire == "top_k" else 1.0
    return [
      encoder.Encoder(
        jax.tree.leaves(params),
        wire,
        decay,
        mean_wire=mean_wire,
        mean_decay=decay,
      )
      for _ in range(REPLICAS)
    ]

  def train(self, wire, mean_wire, rate, seed):
    """The loss on held-out text after training."""
    key = jax.random.key(seed)
    params = characters.init(key, self.symbols)
    treedef = jax.tree.structure(params)
    trace = jax.tree.map(jnp.zeros_like, params)
    local = jax.vmap(lambda _: self._init_local(params))(jnp.arange(REPLICAS))
    sides = self.encoders(params, wire, mean_wire)
    raws = [np.zeros(side.place.nbytes, np.uint8) for side in sides]
    keys = jax.random.split(jax.random.fold_in(key, 1), REPLICAS)
    exchanges = self._steps // PERIOD if self.rounds else self._steps
    for number in range(exchanges):
      of_now = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
      if self.rounds:
        own, local = self._changes(params, local, of_now, self._texts)
      else:
        own = self._gradients(params, of_now, self._texts)
      leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(own)]
      for i, (side, raw) in enumerate(zip(sides, raws, strict=True)):
        if not side.write([leaf[i] for leaf in leaves], raw, number):
          return np.nan
        side.settle(number, True)
      mean = averaged(sides[0], raws)
      found = [leaf.astype(np.float32) for leaf in sides[0].read(mean)]
      params, trace = self._apply(
        params, trace, jax.tree.unflatten(treedef, found), rate, number
      )
    return float(self._loss(params, self._held_out))


def averaged(encoder, gradients):
  """The mean of encoded gradients; its residual is added to the next one."""
  made = reducer.Reducer(encoder)
  parts = [entries.Part(i, i, 0, 0, 0, 1, 1.0) for i in range(len(gradients))]
  out, whole = np.zeros(made.mean_place.nbytes, np.uint8), made.place.elements
  error = made.residual(0, whole)
  made.slice(made.sum_of(parts), gradients, 0, whole, out, error)
  if error is not None:
    made.feedback.keep(error, 0)
  return out


def draw(found):
  """Draws losses over the bytes of gradient and mean."""
  figure, axes = plt.subplots(
    1, len(found), figsize=(4 * len(found), 3.4), layout="constrained"
  )
  for ax, (way, rows) in zip(np.atleast_1d(axes), found.items(), strict=True):
    for row in rows:
      name = f"{row['wire']}, mean {row['mean_wire']}"
      x, y = row["up"] + row["down"], np.mean(row["losses"])
      ax.plot(x, y, "o", label=name)
    ax.set(title=way, xlabel="bits of each number, both ways", ylabel="loss")
    ax.set_xscale("log")
    ax.legend(fontsize="x-small")
  return figure


def main():
  """Tunes, trains and compares."""
  parser = results.parser(__doc__)
  parser.add_argument("--steps", type=int, default=320)
  parser.add_argument("--seeds", type=int, default=5)
  parser.add_argument("--ways", nargs="+", choices=GRIDS, default=[*GRIDS])
  parser.add_argument("--wires", nargs="+", choices=FEW, default=FEW)
  args = parser.parse_args()
  if args.seeds < 2:
    parser.error("--seeds must be at least 2, for an interval")
  data = characters.load_text()
  found = {}
  for way in args.ways:
    run = Run(way, args.steps, data)
    rows = found[way] = []
    before = functools.partial(print, f"{way:9}", flush=True)
    pairs = [("float32", "float32")]
    for wire in args.wires:
      pairs += [(wire, "bfloat16"), (wire, wire)]
      if wire not in ("int8", "int4"):
        pairs.append((wire, "int4"))
    for wire, mean_wire in pairs:
      begin = time.perf_counter()
      tried = [
        run.train(wire, mean_wire, rate, TUNING_SEED) for rate in GRIDS[way]
      ]
      rate = GRIDS[way][int(np.nanargmin(tried))]
      losses = [
        run.train(wire, mean_wire, rate, seed) for seed in range(args.seeds)
      ]
      params = characters.init(jax.random.key(0), run.symbols)
      side, *_ = run.encoders(params, wire, mean_wire)
      each = 8 / sum(x.size for x in jax.tree.leaves(params))
      up, down = side.place.nbytes * each, side.mean_place.nbytes * each
      row = {"wire": wire, "mean_wire": mean_wire, "rate": rate, "up": up}
      row |= {"down": down, "losses": losses}
      rows.append(row)
      mean, half = results.interval(losses)
      told = f"loss {mean:.4f} +- {half:.4f}, rate {rate:g}"
      told += f", bits {up:.2f} up {down:.2f} down"
      if mean_wire not in ("bfloat16", "float32"):
        base = next(
          r["losses"]
          for r in rows
          if (r["wire"], r["mean_wire"]) == (wire, "bfloat16")
        )
        mean, half = results.interval(
          100 * (np.asarray(losses) / np.asarray(base) - 1)
        )
        told += f"; {mean:+.2f} % +- {half:.2f} of bfloat16 back"
      told += f" ({time.perf_counter() - begin:.0f} s)"
      before(f"{wire:8} mean {mean_wire:8} {told}")
  results.save(args, lambda: draw(found), found)


if __name__ == "__main__":
  main()
