"""Times each dense update rule against its formula in jnp and against optax.

For 10 million parameters under jit, parameters and state donated, prints for
each optimizer the time of one step and its ratio to the formula written by hand
and to the nearest optax optimizer, measured in turn in the same process:

  python benchmarks/optimizers.py [--repeats N] [--cpu-time] [NAME ...]
"""

import argparse
import random
import statistics
import time

import jax
import jax.numpy as jnp
import optax

from optax_dist import optimizers

LR = 0.01
B1, B2, EPS = 0.9, 0.999, 1e-8


def _descent(w, g, s):
  return w - LR * g, s


def _normalized(w, g, s):
  return w - LR * g * jax.lax.rsqrt(jnp.maximum(jnp.sum(g * g), 1e-12)), s


def _momentum(w, g, s):
  a = 0.9 * s[0] + g
  return w - LR * a, (a,)


def _adagrad(w, g, s):
  a = s[0] + g * g
  return w - LR * g * jax.lax.rsqrt(a), (a,)


def _adadelta(w, g, s):
  a = 0.95 * s[0] + 0.05 * g * g
  d = g * jnp.sqrt(s[1] + EPS) / jnp.sqrt(a + EPS)
  return w - LR * d, (a, 0.95 * s[1] + 0.05 * d * d)


def _rmsprop(w, g, s):
  a = 0.9 * s[0] + 0.1 * g * g
  b = 0.9 * s[1] + LR * g * jax.lax.rsqrt(a + 1e-10)
  return w - b, (a, b)


def _rate(t):
  return LR * jnp.sqrt(1 - B2**t) / (1 - B1**t)


def _adam(w, g, s):
  t = s[2] + 1
  m = B1 * s[0] + (1 - B1) * g
  v = B2 * s[1] + (1 - B2) * g * g
  return w - _rate(t) * m / (jnp.sqrt(v) + EPS), (m, v, t)


def _nadam(w, g, s):
  t = s[2] + 1
  m = B1 * s[0] + (1 - B1) * g
  v = B2 * s[1] + (1 - B2) * g * g
  ahead = B1 * m + (1 - B1) * g
  return w - _rate(t) * ahead / (jnp.sqrt(v) + EPS), (m, v, t)


def _amsgrad(w, g, s):
  m = B1 * s[0] + (1 - B1) * g
  v = B2 * s[1] + (1 - B2) * g * g
  top = jnp.maximum(s[2], v)
  return w - LR * m / (jnp.sqrt(top) + EPS), (m, v, top)


def _adagrad_da(w, g, s):
  t = s[2] + 1
  total, squares = s[0] + g, s[1] + g * g
  return -LR * total / (0.1 * t * LR + jnp.sqrt(squares)), (total, squares, t)


def _ftrl(w, g, s):
  accum = s[0] + g * g
  root = jnp.sqrt(accum)
  z = s[1] + g - (root - jnp.sqrt(s[0])) / LR * w
  q = root / LR
  w = jnp.where(jnp.abs(z) > 0.1, (0.1 * jnp.sign(z) - z) / q, 0.0)
  return w, (accum, z)


def _proximal_descent(w, g, s):
  p = w - LR * g
  return jnp.sign(p) * jnp.maximum(jnp.abs(p) - LR * 0.1, 0) / (1 + LR * 0.1), s


def _proximal_adagrad(w, g, s):
  a = s[0] + g * g
  r = LR * jax.lax.rsqrt(a)
  p = w - r * g
  return jnp.sign(p) * jnp.maximum(jnp.abs(p) - r * 0.1, 0) / (1 + r * 0.1), (
    a,
  )


def _neural(w, g, s):
  m = B1 * s[0] + (1 - B1) * g
  return w - LR * g * jnp.where(jnp.sign(g) == jnp.sign(m), 1.0, 0.1), (m,)


def _variance(w, g, s):
  m = B1 * s[0] + (1 - B1) * g
  d = (g - m) ** 2
  v = B2 * s[1] + (1 - B2) * d
  return w - LR * g * jnp.minimum(v / (d + EPS), 1), (m, v)


def _keras_nadam(w, g, s):
  t = s[2] + 1
  now = B1 * (1 - 0.5 * 0.96 ** (0.004 * t))
  after = B1 * (1 - 0.5 * 0.96 ** (0.004 * (t + 1)))
  product = s[3] * now
  m = B1 * s[0] + (1 - B1) * g
  v = B2 * s[1] + (1 - B2) * g * g
  ahead = (1 - now) / (1 - product) * g + after / (1 - product * after) * m
  w = w - LR * ahead / (jnp.sqrt(v / (1 - B2**t)) + 1e-7)
  return w, (m, v, t, product)


def _keras_adamax(w, g, s):
  t = s[2] + 1
  m = B1 * s[0] + (1 - B1) * g
  v = jnp.maximum(B2 * s[1], jnp.abs(g))
  return w - LR / (1 - B1**t) * m / (v + 1e-7), (m, v, t)


# Optimizer, formula, its arrays ("w") and scalars ("1"), nearest of optax.
RULES = {
  "gradient_descent": (
    optimizers.gradient_descent(LR),
    _descent,
    "",
    optax.sgd(LR),
  ),
  "custom_gradient_descent": (
    optimizers.custom_gradient_descent(LR),
    _descent,
    "",
    optax.sgd(LR),
  ),
  "normalized_sgd": (
    optimizers.normalized_sgd(LR),
    _normalized,
    "",
    optax.chain(optax.normalize_by_update_norm(), optax.sgd(LR)),
  ),
  "momentum": (
    optimizers.momentum(LR, 0.9),
    _momentum,
    "w",
    optax.sgd(LR, momentum=0.9),
  ),
  "adagrad": (optimizers.adagrad(LR), _adagrad, "w", optax.adagrad(LR)),
  "adadelta": (optimizers.adadelta(LR), _adadelta, "ww", optax.adadelta(LR)),
  "rmsprop": (
    optimizers.rmsprop(LR, momentum=0.9),
    _rmsprop,
    "ww",
    optax.rmsprop(LR, momentum=0.9),
  ),
  "adam": (optimizers.adam(LR), _adam, "ww1", optax.adam(LR)),
  "custom_adam": (optimizers.custom_adam(LR), _adam, "ww1", optax.adam(LR)),
  "nadam": (optimizers.nadam(LR), _nadam, "ww1", optax.nadam(LR)),
  "amsgrad": (
    optimizers.amsgrad(LR, beta2=B2, epsilon=EPS),
    _amsgrad,
    "www",
    optax.amsgrad(LR),
  ),
  "adagrad_da": (
    optimizers.adagrad_da(LR, l2_regularization_strength=0.1),
    _adagrad_da,
    "ww1",
    optax.adagrad(LR),
  ),
  "ftrl": (
    optimizers.ftrl(LR, l1_regularization_strength=0.1),
    _ftrl,
    "ww",
    optax.adadelta(LR),
  ),
  "proximal_gradient_descent": (
    optimizers.proximal_gradient_descent(LR, 0.1, 0.1),
    _proximal_descent,
    "",
    optax.sgd(LR),
  ),
  "proximal_adagrad": (
    optimizers.proximal_adagrad(
      LR, l1_regularization_strength=0.1, l2_regularization_strength=0.1
    ),
    _proximal_adagrad,
    "w",
    optax.adagrad(LR),
  ),
  "neural_optimizer1": (
    optimizers.neural_optimizer1(LR),
    _neural,
    "w",
    optax.sgd(LR, momentum=0.9),
  ),
  "grad_variance_scaled": (
    optimizers.grad_variance_scaled(LR),
    _variance,
    "ww",
    optax.adabelief(LR),
  ),
  "keras_nadam": (
    optimizers.keras("Nadam", learning_rate=LR),
    _keras_nadam,
    "ww1p",
    optax.nadam(LR),
  ),
  "keras_adamax": (
    optimizers.keras("Adamax", learning_rate=LR),
    _keras_adamax,
    "ww1",
    optax.adamax(LR),
  ),
}


def _of_transformation(transformation, w):
  def step(carry, g):
    w, state = carry
    updates, state = transformation.update(g, state, w)
    return optax.apply_updates(w, updates), state

  return step, (w, transformation.init(w))


def _of_formula(formula, slots, w):
  start = {"w": jnp.full_like(w, 0.1), "1": jnp.zeros([]), "p": jnp.ones([])}

  def step(carry, g):
    return formula(carry[0], g, carry[1])

  return step, (w, tuple(jnp.copy(start[slot]) for slot in slots))


def measure(contenders, g, repeats, clock=time.perf_counter):
  """Seconds of each step of each, measured in turn."""
  running = {}
  for name, (step, carry) in contenders.items():
    step = jax.jit(step, donate_argnums=0)
    running[name] = step, step(jax.tree.map(jnp.copy, carry), g)
  seconds = {name: [] for name in running}
  # Later ones may find the gradient in the cache, so the order is random.
  names, shuffled = list(running), random.Random(0)
  for _ in range(repeats):
    shuffled.shuffle(names)
    for name in names:
      step, carry = running[name]
      jax.block_until_ready(carry)
      start = clock()
      carry = jax.block_until_ready(step(carry, g))
      seconds[name].append(clock() - start)
      running[name] = step, carry
  return seconds


def ratio(times, others):
  """Median of the ratios of steps measured right after one another."""
  pairs = zip(times, others, strict=True)
  return statistics.median(time / other for time, other in pairs)


def main():
  """Prints a line for each optimizer."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
  parser.add_argument("names", nargs="*", metavar="NAME", default=list(RULES))
  parser.add_argument("--size", type=int, default=10_000_000)
  parser.add_argument("--repeats", type=int, default=31)
  parser.add_argument(
    "--cpu-time",
    action="store_true",
    help="measure CPU rather than wall-clock time, for a machine that is busy",
  )
  options = parser.parse_args()
  clock = time.process_time if options.cpu_time else time.perf_counter
  key = jax.random.key(0)
  w = jax.random.normal(key, options.size)
  g = jax.random.normal(jax.random.fold_in(key, 1), options.size)
  print(f"{'optimizer':26}{'ms':>8}{'/ formula':>12}{'/ optax':>10}")
  for name in options.names:
    ours, formula, slots, stock = RULES[name]
    times = measure(
      {
        "ours": _of_transformation(ours, w),
        "formula": _of_formula(formula, slots, w),
        "optax": _of_transformation(stock, w),
      },
      g,
      options.repeats,
      clock,
    )
    print(
      f"{name:26}{1e3 * statistics.median(times['ours']):8.2f}"
      f"{ratio(times['ours'], times['formula']):12.3f}"
      f"{ratio(times['ours'], times['optax']):10.3f}",
      flush=True,
    )


if __name__ == "__main__":
  main()
