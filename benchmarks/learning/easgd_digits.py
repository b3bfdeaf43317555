"""Elastic averaging bears long periods, where DOWNPOUR does not.

4 replicas learn scikit-learn's handwritten digits, with 1, 4, 16 and 64 steps
between exchanges and the same number of exchanges. Prints the test error of the
center, the mean over several splits of the data, and draws it.

    python benchmarks/learning/easgd_digits.py [--exchanges N] [--image FILE]
      [--json FILE]

Zhang, Choromanska and LeCun 2015, Deep learning with Elastic Averaging SGD
(https://arxiv.org/abs/1412.6651), figures 2 and 3, reproduced at small scale.
"""

import time

import downpour
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import results

import optax_dist

REPLICAS = 4
PERIODS = (1, 4, 16, 64)
SPLITS = 5
BATCH = 16
LEARNING_RATE = 0.2
MOMENTUM = 0.9
AXIS = "replicas"
METHODS = ("DOWNPOUR", "EASGD", "EAMSGD")
# The paper's: every replica moves by 0.9 / replicas of the distance.
MOVING_RATE = 0.9 / REPLICAS


def transformation(method: str, period: int):
  """Returns what trains, and how to get at the center."""
  if method == "DOWNPOUR":
    tx = downpour.downpour(
      optax.sgd(LEARNING_RATE), AXIS, communication_period=period
    )
    return tx, lambda state: state.center
  inner = optax.sgd(LEARNING_RATE)
  if method == "EAMSGD":
    # The same length of steps, once the momentum has built up.
    inner = optax.sgd(
      LEARNING_RATE * (1 - MOMENTUM), momentum=MOMENTUM, nesterov=True
    )
  tx = optax_dist.elastic_average(
    inner,
    AXIS,
    communication_period=period,
    moving_rate=MOVING_RATE,
    exchange="same_point",
  )
  return tx, optax_dist.center_params


def init(key):
  """Draws a network of one hidden layer of 64 units."""
  keys = jax.random.split(key)
  draw = lambda key, n, m: jax.random.normal(key, (n, m)) / jnp.sqrt(n)
  return [
    (draw(keys[0], 64, 64), jnp.zeros(64)),
    (draw(keys[1], 64, 10), jnp.zeros(10)),
  ]


def logits(params, x):
  """The logits for images ``[size, 64]``."""
  (w, b), (v, c) = params
  return jax.nn.relu(x @ w + b) @ v + c


def loss(params, x, y):
  """The mean cross-entropy of a batch."""
  return optax.softmax_cross_entropy_with_integer_labels(
    logits(params, x), y
  ).mean()


def test_error(method: str, period: int, exchanges: int, key, train, test):
  """Trains on one split; returns the center's test error, from 0 to 1."""
  tx, center_of = transformation(method, period)
  images, labels = train

  def replica(params, key):
    def step(carry, key):
      params, state = carry
      batch = jax.random.randint(key, (BATCH,), 0, labels.size)
      gradients = jax.grad(loss)(params, images[batch], labels[batch])
      updates, state = tx.update(gradients, state, params)
      return (optax.apply_updates(params, updates), state), None

    # The keys of one period at a time, made where they are needed.
    def one_period(carry, i):
      keys = jax.random.split(jax.random.fold_in(key, i), period)
      return jax.lax.scan(step, carry, keys)[0], None

    (_, state), _ = jax.lax.scan(
      one_period, (params, tx.init(params)), jnp.arange(exchanges)
    )
    return center_of(state)

  keys = jax.random.split(jax.random.fold_in(key, 1), REPLICAS)
  centers = jax.vmap(replica, in_axes=(None, 0), axis_name=AXIS)(
    init(key), keys
  )
  center = jax.tree.map(lambda x: x[0], centers)
  return jnp.mean(jnp.argmax(logits(center, test[0]), -1) != test[1])


def load_splits():
  """Loads the digits, split into halves in several ways."""
  from sklearn import datasets

  images, labels = datasets.load_digits(return_X_y=True)
  images = (images / 16).astype(np.float32)
  half = labels.size // 2
  orders = [
    np.random.default_rng(i).permutation(labels.size) for i in range(SPLITS)
  ]
  split = lambda part: (
    np.stack([images[order[part]] for order in orders]),
    np.stack([labels[order[part]] for order in orders]),
  )
  return split(slice(half)), split(slice(half, None))


def draw(errors):
  """Draws error over period, one line per method."""
  figure, ax = plt.subplots(figsize=(5, 3.4), layout="constrained")
  for (method, of_period), marker in zip(errors.items(), "vos", strict=True):
    values = [100 * np.mean(of_period[period]) for period in PERIODS]
    ax.plot(PERIODS, values, marker=marker, label=method)
  ax.set(
    xscale="log",
    yscale="log",
    xlabel="steps between exchanges",
    ylabel="test error of the center (%)",
    title=f"Digits, {REPLICAS} replicas, equal numbers of exchanges",
  )
  ax.set_xticks(PERIODS, map(str, PERIODS))
  ax.minorticks_off()
  ticks = (2, 5, 10, 20, 50, 100)
  ax.set_yticks(ticks, map(str, ticks))
  ax.grid(alpha=0.3)
  ax.legend()
  return figure


def main():
  """Runs all, prints the errors and what the paper leads to expect."""
  parser = results.parser(__doc__)
  parser.add_argument("--exchanges", type=int, default=1000)
  args = parser.parse_args()
  train, test = load_splits()
  keys = jax.random.split(jax.random.key(0), SPLITS)
  errors: dict[str, dict[int, list[float]]] = {}
  for method in METHODS:
    errors[method] = {}
    for period in PERIODS:
      begin = time.perf_counter()
      run = jax.jit(
        jax.vmap(
          lambda *split, m=method, t=period: test_error(
            m, t, args.exchanges, *split
          )
        )
      )
      values = np.asarray(run(keys, train, test))
      errors[method][period] = values.tolist()
      print(
        f"{method:9} period {period:2}: test error {100 * values.mean():6.2f} %"
        f" (of {SPLITS} splits {100 * values.min():.2f} to"
        f" {100 * values.max():.2f}), {time.perf_counter() - begin:.0f} s",
        flush=True,
      )
  mean = {m: {t: np.mean(e) for t, e in of.items()} for m, of in errors.items()}
  for period in (16, 64):
    ratio = mean["DOWNPOUR"][period] / mean["DOWNPOUR"][1]
    print(f"DOWNPOUR at {period} is {ratio:.1f} times worse than at 1 (>= 10)")
  elastic = mean["EASGD"].values()
  spread = 100 * (max(elastic) - min(elastic))
  print(f"EASGD differs by {spread:.2f} points over the periods (<= 1)")
  behind = 100 * max(mean["EAMSGD"][t] - mean["EASGD"][t] for t in PERIODS)
  print(f"EAMSGD is at most {behind:+.2f} points from EASGD (<= +0.3)")
  results.save(args, lambda: draw(errors), errors)


if __name__ == "__main__":
  main()
