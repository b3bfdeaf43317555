"""EASGD and EAMSGD against DOWNPOUR at the paper's period of 10, 4 and 8 replicas.

The problem and the methods are those of easgd_digits.py, which varies the period
instead. As in the paper, each method is shown over learning rates. Prints the
center's test error, the mean over several splits of the data with its standard
deviation, and draws it.

    python benchmarks/learning/easgd_period10.py [--exchanges N] [--image FILE]
      [--json FILE]

Zhang, Choromanska and LeCun 2015, Deep learning with Elastic Averaging SGD
(https://arxiv.org/abs/1412.6651), at small scale.
"""

import easgd_digits as digits
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import results

PERIOD = 10
REPLICAS = (4, 8)
METHODS = ("DOWNPOUR", "EASGD", "EAMSGD")
RATES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)


def run(method, replicas, exchanges, keys, train, test):
  """Returns test errors in percent, `[rates, splits]`."""
  digits.REPLICAS = replicas
  digits.MOVING_RATE = 0.9 / replicas

  def one(rate, *split):
    # Read when the transformation is made, which is now.
    digits.LEARNING_RATE = rate
    return digits.test_error(method, PERIOD, exchanges, *split)

  of_splits = jax.vmap(one, (None, 0, 0, 0))
  of_rates = jax.jit(jax.vmap(of_splits, (0, None, None, None)))
  return 100 * np.asarray(of_rates(jnp.array(RATES), keys, train, test))


def draw(found):
  """Draws error over rate, a panel for each number of replicas."""
  figure, panels = plt.subplots(
    1, len(REPLICAS), figsize=(10, 3.8), layout="constrained", sharey=True
  )
  for axes, n in zip(panels, REPLICAS, strict=True):
    for method, marker in zip(METHODS, "vos", strict=True):
      errors = found[method, n]
      axes.errorbar(
        RATES,
        errors.mean(1),
        errors.std(1, ddof=1),
        marker=marker,
        capsize=3,
        label=method,
      )
    axes.set(
      xscale="log",
      yscale="log",
      xlabel="learning rate",
      title=f"{n} replicas, {PERIOD} steps between exchanges",
    )
    axes.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    ticks = (2, 5, 10, 20, 50, 100)
    axes.set_yticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
  panels[0].set_ylabel("test error of the center (%)")
  panels[0].legend()
  return figure


def main():
  """Runs all and prints the errors."""
  parser = results.parser(__doc__)
  parser.add_argument("--exchanges", type=int, default=1000)
  args = parser.parse_args()
  train, test = digits.load_splits()
  keys = jax.random.split(jax.random.key(0), digits.SPLITS)
  result = {}
  for n in REPLICAS:
    for method in METHODS:
      errors = run(method, n, args.exchanges, keys, train, test)
      result[method, n] = errors
      for rate, of_rate in zip(RATES, errors, strict=True):
        print(
          f"{n} replicas, {method:8} rate {rate:5.3f}: test error"
          f" {of_rate.mean():6.2f} ± {of_rate.std(ddof=1):.2f} %",
          flush=True,
        )
  for n in REPLICAS:
    best = {m: result[m, n][result[m, n].mean(1).argmin()] for m in METHODS}
    for method in METHODS[1:]:
      less = best["DOWNPOUR"] - best[method]
      error = less.std(ddof=1) / np.sqrt(less.size)
      print(
        f"{n} replicas, each at its best rate: {method} is {less.mean():+.2f} ±"
        f" {error:.2f} points better than DOWNPOUR (same splits, standard error)"
      )
  plain = {f"{m}, {n} replicas": e.tolist() for (m, n), e in result.items()}
  results.save(args, lambda: draw(result), plain)


if __name__ == "__main__":
  main()
