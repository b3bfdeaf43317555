"""Times steps with elastic_average against the inner optimizer alone.

One process with 8 CPU devices, a period of 10. Prints the ratio of the amortised
costs of a step, both programs run in turns, over whole periods: of training steps
(gradient and update), and of updates with the gradient at hand. The goal, at most
1.10, is for training steps.

    python benchmarks/elastic_average.py [--rounds N] [--json FILE]
"""

import argparse
import functools
import itertools
import json
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dist

AXIS = "data"
DEVICES = 8
PERIOD = 10
GOAL = 1.10
# Widths of the layers, and images per replica and step.
MODELS = {
  "20 leaves, 128 wide": ([128] * 11, 128),
  "6 leaves, 512 wide": ([512] * 4, 128),
}
INNER = {
  "sgd": lambda: optax.sgd(1e-2),
  "adam": lambda: optax.adam(1e-3),
}


def _loss(params, x):
  for w, b in params:
    x = jnp.tanh(x @ w + b[None])
  return jnp.mean(jnp.square(x))


def program(widths, batch: int, inner, elastic: bool, with_gradient: bool):
  """Returns a jitted step on all devices that donates, and its arguments."""
  mesh = jax.make_mesh((DEVICES,), (AXIS,))
  tx = inner
  if elastic:
    tx = optax_dist.elastic_average(
      inner, AXIS, num_replicas=DEVICES, communication_period=PERIOD, rho=0.1
    )
  rng = np.random.default_rng(0)
  draw = lambda *shape: np.float32(rng.normal(size=shape))
  params = [
    (draw(n, m) / np.float32(n**0.5), np.zeros(m, np.float32))
    for n, m in itertools.pairwise(widths)
  ]
  row = functools.partial(jax.tree.map, lambda x: x[0])
  block = functools.partial(jax.tree.map, lambda x: x[None])

  def step(params, state, x):
    own = row(params)
    gradient = jax.grad(_loss)(own, x[0]) if with_gradient else row(x)
    updates, state = tx.update(gradient, state if elastic else row(state), own)
    params = block(optax.apply_updates(own, updates))
    return params, state if elastic else block(state)

  stack = functools.partial(
    jax.tree.map, lambda x: np.stack([np.asarray(x)] * DEVICES)
  )
  state = tx.init(params)
  if elastic:
    specs = optax_dist.states.state_specs(state, AXIS)
  else:
    state, specs = stack(state), P(AXIS)
  x = draw(DEVICES, batch, widths[0]) if with_gradient else stack(params)
  run = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(AXIS), specs, P(AXIS)),
    out_specs=(P(AXIS), specs),
  )
  spread = NamedSharding(mesh, P(AXIS))
  place = lambda spec: NamedSharding(mesh, spec)
  shardings = jax.tree.map(place, specs, is_leaf=lambda s: isinstance(s, P))
  return jax.jit(run, donate_argnums=(0, 1)), (
    jax.device_put(stack(params), spread),
    jax.device_put(state, shardings),
    jax.device_put(x, spread),
  )


class Period:
  """Calls a program for one period; keeps what it donates."""

  def __init__(self, run, args):
    self.run = run
    *self.carry, self.x = args

  def __call__(self) -> tuple[float, float]:
    """Returns the seconds that the period took, and those of the processors."""
    begin = time.perf_counter(), time.process_time()
    for _ in range(PERIOD):
      self.carry = self.run(*self.carry, self.x)
    jax.block_until_ready(self.carry)
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def compare(ours: Period, theirs: Period, rounds: int) -> dict[str, float]:
  """Runs both in turns; returns the ratio of their times, and the times."""
  for period in (ours, theirs) * 2:
    period()
  times: tuple[list, list] = ([], [])
  for i in range(rounds):
    # Neither is always the one that follows the other.
    for which in (0, 1) if i % 2 else (1, 0):
      times[which].append((ours, theirs)[which]())
  ratio = lambda which: statistics.median(
    a[which] / b[which] for a, b in zip(*times, strict=True)
  )
  ms = lambda of: 1e3 * statistics.median(t for t, _ in of) / PERIOD
  return {
    "ratio": ratio(0),
    # Says more where the machine is busy with other work.
    "ratio_of_processor_time": ratio(1),
    "ours_ms": ms(times[0]),
    "theirs_ms": ms(times[1]),
  }


def main():
  """Runs all and prints the ratios."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=30)
  parser.add_argument("--json", type=pathlib.Path)
  args = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", DEVICES)
  results: list[dict[str, Any]] = []
  for what, with_gradient in (("step", True), ("update", False)):
    for model, (widths, batch) in MODELS.items():
      for name, make in INNER.items():
        ours, theirs = (
          Period(*program(widths, batch, make(), elastic, with_gradient))
          for elastic in (True, False)
        )
        result = {
          "what": what,
          "model": model,
          "inner": name,
          "goal": GOAL if with_gradient else None,
          **compare(ours, theirs, args.rounds),
        }
        results.append(result)
        print(
          f"{what:6} {model:20} {name:5} {result['ratio']:.3f}"
          f" ({result['ours_ms']:.2f} / {result['theirs_ms']:.2f} ms;"
          f" processor time {result['ratio_of_processor_time']:.3f})",
          flush=True,
        )
  if args.json:
    args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
  main()
