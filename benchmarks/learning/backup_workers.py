"""Backup workers, and the cost of staleness: Chen et al. at small scale.

Replicas learn scikit-learn's handwritten digits in virtual time, each gradient on
the parameters that its replica would hold. First 32 replicas of which some are
backups, under heavy-tailed latencies: the time to a fixed accuracy. Then
asynchronous replicas, more and more of them: the test error after the same number
of gradients. Prints both, as means over seeds with their standard deviation, and
draws them.

    python benchmarks/learning/backup_workers.py [--seeds N] [--image FILE]
      [--json FILE]

Chen, Pan, Monga, Bengio and Jozefowicz 2016, Revisiting Distributed Synchronous
SGD (https://arxiv.org/abs/1604.00981).
"""

import functools
import math
import time

import easgd_digits as digits
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import results
import virtual_training

from optax_dist import simulate

BATCH = 16

REPLICAS = 32
BACKUPS = (0, 1, 2, 4, 6, 8, 12, 16, 20, 24, 28)
HEAVY_TAIL = "pareto:1,1.5"
# For each gradient in a step, as the paper scales it.
RATE_PER_GRADIENT = 0.01
ACCURACY = 0.93
SECONDS = 2600.0

WORKERS = (1, 4, 8, 12, 16, 20, 24, 28, 32)
LATENCY = "lognormal:0,0.5"
ASYNCHRONOUS_RATE = 0.1
GRADIENTS = 2000
WEIGHTS = {"every gradient counts for 1": None, "for 1/staleness": "inverse"}

sgd = functools.cache(optax.sgd)


def problem():
  """Returns functions of the gradient and the evaluation, on the first split."""
  (images, labels), (x, y) = digits.load_splits()
  images, labels = jnp.asarray(images[0]), jnp.asarray(labels[0])
  x, y = jnp.asarray(x[0]), jnp.asarray(y[0])

  def gradient(params, key):
    batch = jax.random.randint(key, (BATCH,), 0, labels.size)
    return jax.grad(digits.loss)(params, images[batch], labels[batch])

  def evaluate(params):
    right = jnp.argmax(digits.logits(params, x), -1) == y
    return {"accuracy": jnp.mean(right)}

  return gradient, evaluate


def train(problem, strategy, spec, replicas, rate, seconds, seed, **options):
  """Trains once."""
  gradient, evaluate = problem
  return virtual_training.train(
    strategy,
    simulate.parse_latency(spec),
    replicas,
    params=digits.init(jax.random.key(seed)),
    gradient=gradient,
    evaluate=evaluate,
    optimizer=sgd(rate),
    seconds=seconds,
    seed=seed,
    **options,
  )


def backups(problem, seeds, scale):
  """Returns the seconds to the accuracy, by number of backups and seed."""
  result = {}
  for b in BACKUPS:
    k = REPLICAS - b
    runs = [
      train(
        problem,
        simulate.sync_replicas(k),
        HEAVY_TAIL,
        REPLICAS,
        RATE_PER_GRADIENT * k,
        SECONDS * scale,
        seed,
        evaluations=80,
      )
      for seed in range(seeds)
    ]
    result[b] = [run.time_to("accuracy", ACCURACY) for run in runs]
    step = np.mean([1 / run.timing.steps_per_second for run in runs])
    dropped = np.mean([run.timing.dropped_share for run in runs])
    print(
      f"{b:2} backups: {spread(result[b])} s to {ACCURACY:.0%}; {step:.2f} s a"
      f" step, {dropped:.0%} of the gradients dropped",
      flush=True,
    )
  return result


def asynchronous(problem, seeds, scale):
  """Returns test errors and staleness, by weight, workers and seed."""
  mean = math.exp(0.5**2 / 2)  # Of LATENCY.
  result = {name: {} for name in WEIGHTS}
  for name, weight in WEIGHTS.items():
    for n in WORKERS:
      runs = [
        train(
          problem,
          simulate.sync_replicas(1, max_staleness=None),
          LATENCY,
          n,
          ASYNCHRONOUS_RATE,
          GRADIENTS * scale * mean / n,
          seed,
          evaluations=10,
          staleness_weight=weight,
        )
        for seed in range(seeds)
      ]
      errors = [100 * (1 - float(r.metrics["accuracy"][-1])) for r in runs]
      late = float(np.mean([r.timing.mean_staleness for r in runs]))
      result[name][n] = {"staleness": late, "errors": errors}
      print(
        f"{n:2} workers, {name}: {late:4.1f} steps late, test error"
        f" {spread(errors)} %",
        flush=True,
      )
  return result


def spread(values):
  """A mean and its standard deviation over the seeds."""
  reached = np.isfinite(values)
  if not reached.all():
    return f"(reached by {reached.sum()} of {reached.size})"
  return f"{np.mean(values):6.1f} ± {np.std(values, ddof=1):4.1f}"


def predicted():
  """The best number of backups if a step is worth its gradients."""
  plan = simulate.plan(
    simulate.parse_latency(HEAVY_TAIL), REPLICAS, noise_scale=np.inf
  )
  best = plan.recommended.replicas_to_aggregate
  return REPLICAS - best, REPLICAS - plan.best_high, REPLICAS - plan.best_low


def draw(times, errors):
  """Draws both results side by side."""
  figure, (left, right) = plt.subplots(
    1, 2, figsize=(10, 3.8), layout="constrained"
  )
  reached = {b: t for b, t in times.items() if np.isfinite(t).all()}
  left.errorbar(
    list(reached),
    [np.mean(t) for t in reached.values()],
    [np.std(t, ddof=1) for t in reached.values()],
    marker="o",
    capsize=3,
  )
  left.set(
    xlabel=f"backups of {REPLICAS} replicas",
    ylabel="virtual seconds",
    title=f"Time to {ACCURACY:.0%} test accuracy, {HEAVY_TAIL}",
    ylim=(0, None),
  )
  for name, of_workers in errors.items():
    right.errorbar(
      [result["staleness"] for result in of_workers.values()],
      [np.mean(result["errors"]) for result in of_workers.values()],
      [np.std(result["errors"], ddof=1) for result in of_workers.values()],
      marker="o",
      capsize=3,
      label=name,
    )
  right.set(
    xlabel="mean staleness (steps)",
    ylabel="test error (%)",
    title=f"Asynchronous, after {GRADIENTS:,} gradients",
    ylim=(0, 100),
  )
  right.legend(loc="upper left")
  for axes in (left, right):
    axes.grid(alpha=0.3)
  return figure


def main():
  """Runs both."""
  parser = results.parser(__doc__)
  parser.add_argument("--seeds", type=int, default=8)
  parser.add_argument(
    "--scale",
    type=float,
    default=1.0,
    help="of the length of all trainings; small to see that it runs",
  )
  args = parser.parse_args()
  begin = time.perf_counter()
  functions = problem()
  times = backups(functions, args.seeds, args.scale)
  best = min(times, key=lambda b: np.mean(times[b]))
  at, low, high = predicted()
  print(
    f"fastest with {best} backups; counting gradients, the plan says {at} ({low}"
    f" to {high})"
  )
  if np.isfinite(times[0]).all():
    ratio = np.mean(times[0]) / np.mean(times[best])
    print(f"without backups it takes {ratio:.1f} times as long")
  errors = asynchronous(functions, args.seeds, args.scale)
  print(f"{time.perf_counter() - begin:.0f} s in all")
  result = {"backups": times, "asynchronous": errors}
  results.save(args, lambda: draw(times, errors), result)


if __name__ == "__main__":
  main()
