"""Times cross_shard against the same written by hand.

Prints ratios, ``cross_shard`` over the hand-written program, both run in turns in
the same process or processes; below 1 is faster. README.md says what each means.

    python benchmarks/cross_shard.py [--quick] [--sizes] [--json FILE]
"""

import itertools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ratios
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dist

# The tests' launcher: processes on loopback, with a deadline.
sys.path.append(
  str(
    pathlib.Path(__file__).resolve().parents[1]
    / "tests"
    / "helpers"
    / "processes"
  )
)
import launch

AXIS = "data"
DEVICES = 8
# Widths of the layers of the models whose whole training step is timed.
MODELS = {
  "200 leaves, 32 wide": [32] * 101,
  "20 leaves, 128 wide": [128] * 11,
  "6 leaves, 768 wide": [768] * 4,
}
# Leaves, and floats in each, of the gradients that are only aggregated.
LEAVES = {"200 x 1,000": (200, 1_000), "100 x 100,000": (100, 100_000)}
GOALS = {
  ("200 x 1,000", "per leaf"): 0.10,
  ("100 x 100,000", "per leaf"): 0.60,
  ("200 x 1,000", "flat"): 1.15,
  ("100 x 100,000", "flat"): 1.15,
}
STEP_GOAL = 1.02
# Aggregations in one program.
CALLS = 5
# Leaves, and KiB of each: what is joined, and what would be, by the rule.
SIZES_WITHIN = [(50, 8), (50, 32), (40, 64), (20, 256), (10, 1024), (400, 60)]
SIZES_BETWEEN = [(100, 400), (40, 1024), (30, 2048), (20, 4096)]


def _repeating(run, *args):
  return lambda: jax.block_until_ready(run(*args))


# --- One process, whole training step ----------------------------------------


def _loss(params, x):
  for w, b in params:
    x = jnp.tanh(x @ w + b[None])
  return jnp.mean(jnp.square(x))


def training_step(widths, by_hand: bool, check_vma: bool):
  """Returns a jitted step on all devices, and its arguments."""
  mesh = _mesh()
  inner = optax.sgd(1e-2, momentum=0.9)
  tx = inner if by_hand else optax.chain(optax_dist.cross_shard(AXIS), inner)

  def step(params, state, x):
    at = params
    if check_vma and by_hand:
      at = jax.lax.pcast(params, AXIS, to="varying")
    elif check_vma:
      at = optax_dist.local_params(params, AXIS)
    gradient = jax.grad(_loss)(at, x)
    if by_hand:
      gradient = jax.lax.pmean(gradient, AXIS)
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  run = jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P(), P(), P(AXIS)),
      out_specs=P(),
      check_vma=check_vma,
    )
  )
  rng = np.random.default_rng(0)
  draw = lambda *shape: np.float32(rng.normal(size=shape))
  params = [
    (draw(n, m) / np.float32(np.sqrt(n)), np.zeros(m, np.float32))
    for n, m in itertools.pairwise(widths)
  ]
  x = draw(32 * mesh.size, widths[0])
  place = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
  params = place(params, P())
  return run, (params, place(tx.init(params), P()), place(x, P(AXIS)))


def single_process(rounds: int) -> Iterator[dict[str, Any]]:
  """Times whole steps on 8 CPU devices of this process."""
  for name, widths in MODELS.items():
    for check_vma in (False, True):
      ours, theirs = (
        _repeating(*_flattened(training_step(widths, by_hand, check_vma)))
        for by_hand in (False, True)
      )
      yield {
        "where": f"1 process, {DEVICES} devices",
        "what": f"step, {name}, check_vma={check_vma}",
        "against": "pmean",
        "goal": STEP_GOAL,
        **ratios.compare(ours, theirs, rounds),
      }


def _flattened(run_and_args):
  run, args = run_and_args
  return run, *args


# --- Several processes, aggregation alone ------------------------------------


def aggregation(leaves: int, size: int, rounds: int) -> dict[str, dict]:
  """Runs in each process; returns what it measured against each other way."""
  tx = optax_dist.cross_shard(AXIS)
  ours = _aggregating(lambda g: tx.update(g, optax.EmptyState())[0])
  by_hand = _aggregating(lambda g: jax.lax.pmean(g, AXIS))
  tree = _placed(leaves, size)
  others = {"per leaf": tree, "flat": _placed(1, leaves * size)}
  return {
    name: ratios.compare(
      _repeating(ours, tree), _repeating(by_hand, arg), rounds, CALLS
    )
    for name, arg in others.items()
  }


def joining(leaves: int, size: int, rounds: int) -> dict[str, float]:
  """Times the sum of leaves joined in one buffer against that of each."""
  total = lambda x: jax.lax.psum(x, AXIS)
  mean = lambda xs: [x / jnp.float32(jax.device_count()) for x in xs]

  def join(leaves):
    sums = total(jnp.concatenate([x.ravel() for x in leaves]))
    ends = itertools.accumulate(x.size for x in leaves)
    return mean(jnp.split(sums, [*ends][:-1]))

  joined = _aggregating(join)
  single = _aggregating(lambda g: mean([total(x) for x in g]))
  tree = _placed(leaves, size)
  return ratios.compare(
    _repeating(joined, tree), _repeating(single, tree), rounds, CALLS
  )


def _mesh():
  return jax.make_mesh(
    (jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,)
  )


def _placed(leaves: int, size: int) -> list[jax.Array]:
  sharding = NamedSharding(_mesh(), P(AXIS))
  one = np.ones((1, size), np.float32)
  return [
    jax.make_array_from_callback(
      (jax.device_count(), size), sharding, lambda _: one
    )
    for _ in range(leaves)
  ]


def _aggregating(fn):
  # In a loop, as a step has its gradients at hand: a call that takes and returns
  # hundreds of arrays would add its own time to that of the messages.
  def body(g):
    return jax.lax.fori_loop(0, CALLS, lambda _, g: fn(g), g)

  return jax.jit(
    jax.shard_map(
      body, mesh=_mesh(), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
  )


def several_processes(rounds: int) -> Iterator[dict[str, Any]]:
  """Times aggregation alone over two processes and gloo."""
  for name, (leaves, size) in LEAVES.items():
    # A process waits for the other in each call, so either one's time will do.
    measured, _ = launch.run(
      aggregation, leaves, size, rounds, processes=2, timeout=600
    )
    for against, figures in measured.items():
      yield {
        "where": "2 processes",
        "what": f"mean of {name}",
        "against": against,
        "goal": GOALS[name, against],
        **figures,
      }


def sizes(rounds: int) -> Iterator[dict[str, Any]]:
  """Times joining itself, over the sizes between which the rule decides."""
  for where, cases in (
    (f"1 process, {DEVICES} devices", SIZES_WITHIN),
    ("2 processes", SIZES_BETWEEN),
  ):
    for leaves, kib in cases:
      args = leaves, kib << 8, rounds
      if cases is SIZES_WITHIN:
        figures = joining(*args)
      else:
        figures = launch.run(joining, *args, processes=2, timeout=600)[0]
      yield {
        "where": where,
        "what": f"{leaves} x {kib} KiB, joined",
        "against": "per leaf",
        "goal": None,
        **figures,
      }


# --- The command -------------------------------------------------------------


def main() -> None:
  """Prints a line for each comparison."""
  parser = ratios.parser(__doc__)
  parser.add_argument(
    "--sizes", action="store_true", help="time joining by size of leaf instead"
  )
  args = parser.parse_args()
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", DEVICES)
  chosen = ((single_process, 100), (several_processes, 30))
  ratios.report(
    args,
    {"where": 21, "what": 42, "against": 9},
    ((sizes, 15),) if args.sizes else chosen,
    quick=8,
  )


if __name__ == "__main__":
  main()
