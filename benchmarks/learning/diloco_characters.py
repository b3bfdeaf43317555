"""DiLoCo learns about as fast as synchronous training, for 1/50 of the bytes.

4 replicas learn to predict the next character of Python's own documentation
(pydoc_data.topics), in rounds of 50 steps of Adam. Compared are one replica alone,
the plain average of the replicas after each round, an outer Nesterov momentum
(DiLoCo), and gradients averaged at each step. Prints the loss on held-out text and
the bytes that a replica hands over, and draws the loss.

    python benchmarks/learning/diloco_characters.py [--rounds N] [--image FILE]
      [--json FILE]

Douillard et al. 2023, DiLoCo (https://arxiv.org/abs/2311.08105), figure 2, in
small.
"""

import time
from pydoc_data import topics

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import results

import optax_dist

REPLICAS = 4
PERIOD = 50
CONTEXT = 10
EMBEDDING = 24
HIDDEN = 128
BATCH = 32
LEARNING_RATE = 4e-3
# Steps over which the learning rate rises.
WARM_UP = 100
OUTER_LEARNING_RATE = 0.7
OUTER_MOMENTUM = 0.9
EVALUATED = 8192
AXIS = "replicas"
METHODS = (
  "single replica",
  "plain averaging",
  "outer Nesterov",
  "fully synchronous",
)


# --- Text and model ----------------------------------------------------------


def load_text():
  """Returns codes of the text to train on and to evaluate, and how many."""
  text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
  alphabet, codes = np.unique(
    np.frombuffer(text.encode("ascii", "replace"), np.uint8),
    return_inverse=True,
  )
  codes = codes.astype(np.int32)
  # Of every 20 pages, the last is held out.
  pages = codes[: codes.size // 2000 * 2000].reshape(-1, 2000)
  held_out = np.arange(len(pages)) % 20 == 19
  return pages[~held_out].ravel(), pages[held_out].ravel(), alphabet.size


def init(key, symbols: int):
  """Draws the network: an embedding of the last characters, two layers."""
  keys = jax.random.split(key, 3)
  draw = lambda key, n, m: jax.random.normal(key, (n, m)) / jnp.sqrt(n)
  return {
    "embedding": 0.3 * jax.random.normal(keys[0], (symbols, EMBEDDING)),
    "hidden": (draw(keys[1], CONTEXT * EMBEDDING, HIDDEN), jnp.zeros(HIDDEN)),
    "output": (draw(keys[2], HIDDEN, symbols), jnp.zeros(symbols)),
  }


def loss(params, windows):
  """The mean loss, in nats, of predicting each window's last character."""
  x = params["embedding"][windows[:, :-1]].reshape(len(windows), -1)
  (w, b), (v, c) = params["hidden"], params["output"]
  logits = jax.nn.relu(x @ w + b) @ v + c
  return optax.softmax_cross_entropy_with_integer_labels(
    logits, windows[:, -1]
  ).mean()


def windows_at(text, starts):
  """Returns windows of ``CONTEXT`` characters and the next one."""
  return text[starts[:, None] + jnp.arange(CONTEXT + 1)]


# --- Training ----------------------------------------------------------------


def transformation(method: str, steps: int):
  """Returns what trains."""
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, LEARNING_RATE, WARM_UP, steps, 0.1 * LEARNING_RATE
  )
  inner = optax.adam(schedule)
  if method == "single replica":
    return inner
  if method == "plain averaging":
    return optax_dist.local_sgd(inner, AXIS, communication_period=PERIOD)
  if method == "outer Nesterov":
    return optax_dist.diloco(
      inner,
      AXIS,
      communication_period=PERIOD,
      outer_learning_rate=OUTER_LEARNING_RATE,
      outer_momentum=OUTER_MOMENTUM,
    )
  return optax.chain(optax_dist.cross_shard(AXIS), inner)


def exchanges(method: str, state):
  """How often the replicas have handed over something as long as the parameters."""
  if method in ("plain averaging", "outer Nesterov"):
    return optax.tree.get(state, "global_step")
  if method == "single replica":
    return jnp.zeros([], jnp.int32)
  return optax.tree.get(state, "count", filtering=_is_of_adam)


def _is_of_adam(path, value):
  return "ScaleByAdamState" in str(path[-1])


def train(method: str, rounds: int, key, text, held_out, symbols: int):
  """Trains; returns the loss after each round, and the exchanges made."""
  tx = transformation(method, rounds * PERIOD)
  start = init(key, symbols)
  part = text.size // REPLICAS

  def replica(key, own_text, held_out):
    def step(carry, key):
      params, state = carry
      starts = jax.random.randint(key, (BATCH,), 0, part - CONTEXT)
      gradients = jax.grad(loss)(params, windows_at(own_text, starts))
      updates, state = tx.update(gradients, state, params)
      return (optax.apply_updates(params, updates), state), None

    def one_round(carry, key):
      keys = jax.random.split(key, PERIOD)
      (params, state), _ = jax.lax.scan(step, carry, keys)
      return (params, state), loss(params, held_out)

    keys = jax.random.split(key, rounds)
    (_, state), losses = jax.lax.scan(one_round, (start, tx.init(start)), keys)
    return losses, exchanges(method, state)

  number = 1 if method == "single replica" else REPLICAS
  starts = np.linspace(0, held_out.size - CONTEXT - 1, EVALUATED).astype(int)
  losses, made = jax.jit(
    jax.vmap(replica, in_axes=(0, 0, None), axis_name=AXIS)
  )(
    jax.random.split(jax.random.fold_in(key, 1), REPLICAS)[:number],
    text[: part * REPLICAS].reshape(REPLICAS, part)[:number],
    windows_at(held_out, starts),
  )
  # All replicas are equal after a round.
  size = sum(x.nbytes for x in jax.tree.leaves(start))
  return np.asarray(losses[0]), int(made[0]) * size


def draw(found):
  """Draws the loss over the steps, and the bytes."""
  figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
  for method, (losses, sent) in found.items():
    steps = PERIOD * (1 + np.arange(len(losses)))
    label = f"{method}: {losses[-1]:.3f}, {sent / 2**20:,.0f} MiB"
    ax.plot(steps, losses, label=label)
  low = min(losses[-1] for losses, _ in found.values())
  ax.set(
    ylim=(0.95 * low, 1.7 * low),
    xlabel="steps of each replica",
    ylabel="loss on held-out text (nats)",
    title=f"Characters, {REPLICAS} replicas, rounds of {PERIOD} steps",
  )
  ax.grid(alpha=0.3)
  ax.legend()
  return figure


def main():
  """Runs all, prints the losses and what the paper leads to expect."""
  parser = results.parser(__doc__)
  parser.add_argument("--rounds", type=int, default=160)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  if args.rounds * PERIOD <= WARM_UP:
    parser.error(
      f"--rounds must be above {WARM_UP // PERIOD}, the warm-up of the"
      f" learning rate; got {args.rounds}"
    )
  text, held_out, symbols = load_text()
  print(f"{text.size:,} characters to train on, {symbols} symbols")
  result = {}
  for method in METHODS:
    begin = time.perf_counter()
    key = jax.random.key(args.seed)
    losses, sent = train(method, args.rounds, key, text, held_out, symbols)
    result[method] = losses, sent
    print(
      f"{method:17}: loss {losses[-1]:.4f}, {sent:,} bytes handed over by a"
      f" replica, {time.perf_counter() - begin:.0f} s",
      flush=True,
    )
  final = {method: losses[-1] for method, (losses, _) in result.items()}
  single, plain, nesterov, synchronous = (final[method] for method in METHODS)
  ordered = single > plain > nesterov > synchronous
  print(f"single > plain > outer Nesterov > fully synchronous: {ordered}")
  print(
    f"outer Nesterov / fully synchronous: {nesterov / synchronous:.4f} (<= 1.04)"
  )
  sent = {method: sent for method, (_, sent) in result.items()}
  ratio = sent["fully synchronous"] / sent["outer Nesterov"]
  print(f"bytes: 1/{ratio:g} of fully synchronous (1/{PERIOD})")
  table = {m: {"loss": x.tolist(), "bytes": b} for m, (x, b) in result.items()}
  results.save(args, lambda: draw(result), table)


if __name__ == "__main__":
  main()
