"""Times compilation of a training step with each transform, against pmean's.

Prints ratios: the processor time to trace, lower and compile a whole step (gradient,
aggregation, inner optimizer) under ``jax.shard_map`` on 8 CPU devices, over that of
the same step with ``jax.lax.pmean`` and the same inner optimizer. The model has many
small leaves, as one whose layers are not stacked. Processor time is of all threads, and
does not count what else the machine does; the compiler uses several.

    python benchmarks/compile_time.py [--leaves N ...] [--only NAME ...] [--json FILE]
"""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_dist

AXIS = "data"
DEVICES = 8
LEAVES = (40, 120, 400, 2000)
WIDTH = 32
GOAL = 1.5
INNER = optax.adam(1e-3)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


class Case(NamedTuple):
  """A transform, and whether each replica has its own parameters."""

  tx: optax.GradientTransformation
  own_params: bool = False


def cases() -> dict[str, Case]:
  """Returns what is compiled, by name; the first is what it is measured by."""
  mean = optax.stateless(lambda grads, _: jax.lax.pmean(grads, AXIS))
  sync = lambda needed, **kwargs: Case(
    optax_dist.sync_replicas(
      INNER,
      AXIS,
      replicas_to_aggregate=needed,
      total_num_replicas=DEVICES,
      **kwargs,
    )
  )
  period = {"communication_period": 10, "num_replicas": DEVICES}
  return {
    "pmean": Case(optax.chain(mean, INNER)),
    "cross_shard": Case(optax.chain(optax_dist.cross_shard(AXIS), INNER)),
    "sharded": Case(optax_dist.sharded(INNER, AXIS, num_replicas=DEVICES)),
    "sync_replicas, all_arrive": sync(DEVICES, all_arrive=True),
    "sync_replicas, k = N": sync(DEVICES),
    "sync_replicas, k = 4 N": sync(4 * DEVICES),
    "elastic_average": Case(
      optax_dist.elastic_average(INNER, AXIS, learning_rate=1e-3, **period),
      own_params=True,
    ),
    "local_updates": Case(
      optax_dist.local_updates(INNER, OUTER, AXIS, **period), own_params=True
    ),
    "streaming_updates": Case(
      optax_dist.streaming_updates(INNER, OUTER, AXIS, fragments=4, **period),
      own_params=True,
    ),
  }


def _loss(params, x):
  for w, b in zip(params[::2], params[1::2], strict=True):
    x = jnp.tanh(x @ w + b[None])
  return jnp.mean(jnp.square(x))


def step_of(case: Case, leaves: int) -> tuple[Any, tuple]:
  """Returns a jitted training step, and arguments to compile it for."""
  mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(AxisType.Auto,))
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  params = [array(WIDTH, WIDTH), array(WIDTH)] * (leaves // 2)
  state = jax.eval_shape(case.tx.init, params)
  specs = optax_dist.state_specs(state, AXIS)
  spec = P(AXIS) if case.own_params else P()

  def step(params, state, x):
    if case.own_params:
      params = jax.tree.map(lambda x: x[0], params)
    grads = jax.grad(_loss)(params, x)
    updates, state = case.tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    if case.own_params:
      params = jax.tree.map(lambda x: x[None], params)
    return params, state

  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(spec, specs, P(AXIS)),
    out_specs=(spec, specs),
    check_vma=False,
  )
  if case.own_params:
    params = [array(DEVICES, *x.shape) for x in params]
  args = params, state, array(32 * DEVICES, WIDTH)
  return jax.jit(mapped, donate_argnums=(0, 1)), args


def _seconds(make: Callable[[], tuple[Any, tuple]]) -> tuple[float, float]:
  """Returns the processor time to trace and lower a program, and to compile it."""
  run, args = make()
  jax.clear_caches()
  begin = time.process_time()
  lowered = run.lower(*args)
  middle = time.process_time()
  lowered.compile()
  return middle - begin, time.process_time() - middle


def main() -> None:
  """Prints a line for each transform and number of leaves."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--leaves", type=int, nargs="+", default=LEAVES)
  parser.add_argument("--only", nargs="+", default=tuple(cases()))
  parser.add_argument(
    "--rounds", type=int, default=1, help="medians of so many"
  )
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
  args = parser.parse_args()
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", DEVICES)
  by_hand, *others = cases()
  chosen = [name for name in others if name in args.only]
  _seconds(lambda: step_of(cases()[by_hand], 2))
  print(
    f"{'leaves':>6} {'what':<26} {'ratio':>6} {'lower/s':>8} {'compile/s':>9}"
  )
  results = []
  for leaves in args.leaves:
    times: dict[str, list] = {name: [] for name in (by_hand, *chosen)}
    for _ in range(args.rounds):
      for name, into in times.items():
        into.append(
          _seconds(lambda name=name, n=leaves: step_of(cases()[name], n))
        )
    base = statistics.median(map(sum, times[by_hand]))
    for name, found in times.items():
      ratio = statistics.median(map(sum, found)) / base
      lower, compiling = (
        statistics.median(column) for column in zip(*found, strict=True)
      )
      goal = ""
      if name != by_hand:
        met = "met" if ratio <= GOAL else "MISSED"
        goal = f"  <= {GOAL:.2f} {met}"
      print(
        f"{leaves:6} {name:<26} {ratio:6.2f} {lower:8.2f} {compiling:9.2f}{goal}",
        flush=True,
      )
      results.append(
        {"leaves": leaves, "what": name, "ratio": ratio}
        | {"lower_s": lower, "compile_s": compiling}
      )
  if args.json:
    args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
  main()
