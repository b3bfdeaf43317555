"""The cost of compression in learning: characters, 4 replicas, several seeds.

Three questions, each about the loss on held-out text after training:

- SparseLoCo (3 % of the numbers, 2 bits each, with error feedback) against DiLoCo,
  against the same without compression (an outer SGD), and against itself without error
  feedback; all in rounds of local AdamW steps;
- PowerSGD of rank 4 against the mean of gradients, with momentum;
- signs with majority vote against the mean of signs.

Each method's learning rate, for rounds those of local and outer steps, is the best of
a grid, on a seed of its own. Seeds share
their start and their batches between methods, so intervals are of paired differences
(95 %, Student's t). Bytes are what a replica hands over.

    python benchmarks/learning/compression_characters.py [--rounds N] [--period N]
      [--seeds N]
      [--questions rounds low-rank signs]

The defaults take hours on two cores; ``--rounds 10`` some minutes, and says less:
of 3 % a round, few numbers have been sent by then.

Sarfi et al. 2025, SparseLoCo (https://arxiv.org/abs/2508.15706); Vogels et al. 2019,
PowerSGD (https://arxiv.org/abs/1905.13727); Bernstein et al. 2018, signSGD with
Majority Vote (https://arxiv.org/abs/1802.04434).
"""

import itertools
import time

import diloco_characters as characters
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import results

import optax_dist
from optax_dist import compression

REPLICAS, AXIS = 4, "replicas"
TUNING_SEED = 1000
SPARSE = compression.top_k(0.03, bits=2, error_feedback=0.95)
SPARSE_FORGETS = compression.top_k(0.03, bits=2, error_feedback=None)
LOW_RANK = compression.power_sgd(4)
VOTE = compression.sign()
# By name: the learning rates to choose from; the outer ones for rounds. Without
# outer momentum they are larger: Nesterov's of 0.9 multiplies them by 10 in the end.
GRIDS = {
  "DiLoCo": (0.05, 0.1, 0.2, 0.4, 0.7),
  "outer SGD": (0.7, 1.0, 1.5, 2.0, 3.0),
  "SparseLoCo": (0.7, 1.0, 1.5, 2.0, 3.0, 4.0),
  "SparseLoCo, no feedback": (1.0, 2.0, 3.0, 5.0, 8.0),
  "mean": (0.03, 0.1, 0.3),
  "PowerSGD, rank 4": (0.03, 0.1, 0.3),
  "mean of signs": (3e-4, 1e-3, 3e-3),
  "majority vote": (3e-4, 1e-3, 3e-3),
}
# For rounds, those of the local AdamW as well.
LOCAL = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
QUESTIONS = {
  "rounds": ("DiLoCo", "outer SGD", "SparseLoCo", "SparseLoCo, no feedback"),
  "low-rank": ("mean", "PowerSGD, rank 4"),
  "signs": ("mean of signs", "majority vote"),
}
# The comparisons: a method, and a baseline it should not be worse than.
PAIRS = (
  ("SparseLoCo", "DiLoCo"),
  ("SparseLoCo", "outer SGD"),
  ("SparseLoCo", "SparseLoCo, no feedback"),
  ("PowerSGD, rank 4", "mean"),
  ("majority vote", "mean of signs"),
)


def decay(rate, steps):
  """The schedule of all that isn't an outer step."""
  shape = optax.warmup_cosine_decay_schedule(
    0.0, 1.0, max(1, steps // 20), steps, 0.1
  )
  return lambda count: rate * shape(count)


def transformation(name, rate, local_rate, period, steps):
  """What trains."""
  local = optax.adamw(decay(local_rate, steps))
  share = lambda method=None: optax_dist.cross_shard(
    AXIS, compression=method, num_replicas=REPLICAS
  )
  momentum = optax.sgd(decay(rate, steps), momentum=0.9)
  match name:
    case "DiLoCo":
      return optax_dist.diloco(
        local,
        AXIS,
        communication_period=period,
        outer_learning_rate=lambda _: rate,
      )
    case "outer SGD":
      return optax_dist.local_updates(
        local,
        optax.sgd(lambda _: rate),
        AXIS,
        communication_period=period,
      )
    case "SparseLoCo" | "SparseLoCo, no feedback":
      feedback = 0.95 if name == "SparseLoCo" else None
      return optax_dist.sparse_loco(
        local,
        AXIS,
        communication_period=period,
        outer_learning_rate=lambda _: rate,
        error_feedback=feedback,
      )
    case "mean":
      return optax.chain(optax_dist.cross_shard(AXIS), momentum)
    case "PowerSGD, rank 4":
      return optax.chain(share(LOW_RANK), momentum)
    case "mean of signs":
      signs = optax.stateless(lambda g, _: jax.tree.map(jnp.sign, g))
      return optax.chain(
        signs, optax_dist.cross_shard(AXIS), optax.sgd(decay(rate, steps))
      )
    case _:
      return optax.chain(share(VOTE), optax.sgd(decay(rate, steps)))


def handed_over(name, params, rounds, steps):
  """Bytes that a replica hands over in the whole run."""
  whole = sum(x.nbytes for x in jax.tree.leaves(params))
  match name:
    case "DiLoCo" | "outer SGD":
      return rounds * whole
    case "SparseLoCo" | "SparseLoCo, no feedback":
      return rounds * SPARSE.sent(params)
    case "PowerSGD, rank 4":
      return steps * LOW_RANK.sent(params)
    case "majority vote" | "mean of signs":
      # One bit each, or in the mean a float32.
      return steps * (VOTE.sent(params) if name == "majority vote" else whole)
    case _:
      return steps * whole


def trainer(name, rounds, period, data):
  """Returns a function of two rates and a seed: the losses after each round."""
  text, held_out, symbols = data
  part = text.size // REPLICAS
  texts = jnp.asarray(text[: part * REPLICAS].reshape(REPLICAS, part))
  starts = np.linspace(
    0, held_out.size - characters.CONTEXT - 1, characters.EVALUATED
  ).astype(int)
  evaluated = characters.windows_at(jnp.asarray(held_out), starts)

  @jax.jit
  def run(rate, local_rate, key, texts, evaluated):
    tx = transformation(name, rate, local_rate, period, rounds * period)
    start = characters.init(key, symbols)

    def replica(key, own_text):
      def step(carry, key):
        params, state = carry
        at = jax.random.randint(
          key, (characters.BATCH,), 0, part - characters.CONTEXT
        )
        windows = characters.windows_at(own_text, at)
        gradients = jax.grad(characters.loss)(params, windows)
        updates, state = tx.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

      def one_round(carry, key):
        carry, _ = jax.lax.scan(step, carry, jax.random.split(key, period))
        return carry, characters.loss(carry[0], evaluated)

      keys = jax.random.split(key, rounds)
      return jax.lax.scan(one_round, (start, tx.init(start)), keys)[1]

    keys = jax.random.split(jax.random.fold_in(key, 1), REPLICAS)
    return jax.vmap(replica, axis_name=AXIS)(keys, texts)[0]

  def train(rate, local_rate, seed):
    key = jax.random.key(seed)
    return np.asarray(run(rate, local_rate, key, texts, evaluated))

  return train


def draw(found):
  """Draws the mean losses, a panel for each question."""
  asked = [names for names in QUESTIONS.values() if names[0] in found]
  figure, axes = plt.subplots(
    1, len(asked), figsize=(4 * len(asked), 3.4), layout="constrained"
  )
  for ax, group in zip(np.atleast_1d(axes), asked, strict=True):
    for name in group:
      losses = np.asarray(found[name]["losses"])
      label = f"{name}: {found[name]['bytes'] / 2**20:,.2f} MiB"
      ax.plot(1 + np.arange(losses.shape[1]), losses.mean(0), label=label)
    ax.set(xlabel="rounds", ylabel="loss on held-out text (nats)")
    ax.grid(alpha=0.3)
    ax.legend(fontsize="small")
  return figure


def main():
  """Tunes, trains and compares."""
  parser = results.parser(__doc__)
  parser.add_argument("--rounds", type=int, default=160)
  parser.add_argument("--period", type=int, default=50)
  parser.add_argument("--seeds", type=int, default=5)
  parser.add_argument(
    "--questions", nargs="+", choices=QUESTIONS, default=[*QUESTIONS]
  )
  args = parser.parse_args()
  if args.seeds < 2:
    parser.error("--seeds must be at least 2, for an interval")
  data = characters.load_text()
  params = characters.init(jax.random.key(0), data[2])
  steps = args.rounds * args.period
  print(
    f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters;", end=" "
  )
  print(f"{args.rounds} rounds of {args.period} steps, {args.seeds} seeds")
  result = {}
  for name in (n for q in args.questions for n in QUESTIONS[q]):
    of_rounds = name in QUESTIONS["rounds"]
    grid = [*itertools.product(GRIDS[name], LOCAL if of_rounds else (0.0,))]
    begin = time.perf_counter()
    train = trainer(name, args.rounds, args.period, data)
    tried = [train(*rates, TUNING_SEED)[-1] for rates in grid]
    # Some diverge.
    rate, local_rate = grid[int(np.nanargmin(tried))]
    losses = np.stack(
      [train(rate, local_rate, seed) for seed in range(args.seeds)]
    )
    mean, half = results.interval(losses[:, -1])
    sent = handed_over(name, params, args.rounds, steps)
    rates = {"rate": rate, "local_rate": local_rate}
    result[name] = {**rates, "losses": losses.tolist(), "bytes": sent}
    shown = f"rate {rate:g} of {GRIDS[name]}"
    if of_rounds:
      shown += f", local {local_rate:g} of {LOCAL}"
    print(
      f"{name:24} loss {mean:.4f} +- {half:.4f}, {shown},"
      f" {sent:,} bytes, {time.perf_counter() - begin:.0f} s",
      flush=True,
    )
  for name, other in (pair for pair in PAIRS if result.keys() >= {*pair}):
    ours, theirs = (
      np.asarray(result[n]["losses"])[:, -1] for n in (name, other)
    )
    mean, half = results.interval(100 * (ours / theirs - 1))
    fewer = result[other]["bytes"] / result[name]["bytes"]
    print(
      f"{name} against {other}: loss {mean:+.2f} % +- {half:.2f},"
      f" {fewer:.1f} times fewer bytes"
    )
  results.save(args, lambda: draw(result), result)


if __name__ == "__main__":
  main()
