"""Costs of a whole training step with each transform, against hand-written ones.

The step is that of a transformer of some 100 leaves with AdamW: gradient,
aggregation, inner optimizer, new parameters. The same step is written by hand with
the same meaning, as a user would who needs it once. With ``--tpu`` both are compiled
for 8 chips of TPU v5e (needs the extra ``[tpu-aot]``, but no TPU), and their bytes
from and to HBM, bytes accessed by XLA's count, flops, peak memory and collectives are
compared. Otherwise both run on 8 CPU devices, or with ``--gpu`` on one GPU (where there
is nothing to send), interleaved: time of a step, and processor time to trace, lower and
compile it.

    python benchmarks/whole_step.py [--tpu | --gpu] [--only NAME ...] [--json FILE]
"""

import argparse
import collections
import functools
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ratios
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dist

AXIS = "data"
DEVICES = 8
LAYERS, VOCABULARY, LENGTH = 8, 512, 64
# Of the model.
WIDTHS = {"tpu": 256, "gpu": 1024, "cpu": 128}
PERIOD = 10
GOALS = {"hbm": 1.05, "peak": 1.05, "step": 1.05, "compile": 1.25}
INNER = optax.adamw(1e-3)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


# --- The model -----------------------------------------------------------------


def parameters(width: int) -> Any:
  """Returns the parameters: 12 arrays for each layer, and 4."""
  array = functools.partial(jnp.ones, dtype=jnp.float32)
  layer = lambda: {
    "norm1": [array(width), array(width)],
    "attention": [array((width, width)) / width for _ in range(4)],
    "norm2": [array(width), array(width)],
    "up": [array((width, 4 * width)) / width, array(4 * width)],
    "down": [array((4 * width, width)) / width, array(width)],
  }
  return {
    "embedding": array((VOCABULARY, width)),
    "positions": array((LENGTH, width)),
    "layers": [layer() for _ in range(LAYERS)],
    "norm": [array(width), array(width)],
  }


def loss(params: Any, tokens: jax.Array) -> jax.Array:
  """The loss of predicting each token from those before it."""
  x = params["embedding"][tokens] + params["positions"]
  mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
  for layer in params["layers"]:
    q, k, v, out = layer["attention"]
    y = _norm(x, *layer["norm1"])
    scores = (y @ q) @ jnp.swapaxes(y @ k, 1, 2) / np.sqrt(x.shape[-1])
    scores = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    x = x + scores @ (y @ v) @ out
    y = _norm(x, *layer["norm2"])
    y = jax.nn.gelu(y @ layer["up"][0] + layer["up"][1])
    x = x + y @ layer["down"][0] + layer["down"][1]
  logits = _norm(x, *params["norm"]) @ params["embedding"].T
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits[:, :-1], tokens[:, 1:]
  )
  return jnp.mean(losses)


def _norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
  return jax.nn.standardize(x, epsilon=1e-6) * scale + shift


# --- Steps by hand -------------------------------------------------------------


class Case(NamedTuple):
  """A step in both forms.

  Attributes:
    tx: the transform.
    init: the state by hand, of one replica's parameters: what is equal on all
      replicas, and what is one replica's.
    update: from the gradient, both states and the parameters to the updates and
      the states, by hand.
    own_params: whether each replica has its own parameters.
  """

  tx: optax.GradientTransformation
  init: Callable[[Any], tuple[Any, Any]]
  update: Callable[..., tuple[Any, Any, Any]]
  own_params: bool = False


def _mean(grads, common, own, params):
  updates, common = INNER.update(jax.lax.pmean(grads, AXIS), common, params)
  return updates, common, own


def _where(yes, new, old):
  return jax.tree.map(lambda x, y: jnp.where(yes, x, y), new, old)


def _is_finite(tree):
  return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in tree]))


def _zeros(tree):
  return jax.tree.map(jnp.zeros_like, tree)


def _add(xs, ys):
  return jax.tree.map(jnp.add, xs, ys)


def _held(grads, total, count):
  """The sum of the finite gradients of one replica, and their number."""
  finite = _is_finite(jax.tree.leaves(grads))
  return _where(finite, _add(total, grads), total), count + finite


def _sync(grads, common, own, params):
  """A step of k = N: in each step, if all gradients are finite."""
  total, count = _held(grads, *own)
  sums, all_in = jax.lax.psum((total, count), AXIS)
  enough = all_in >= DEVICES
  mean = jax.tree.map(lambda x: x / jnp.maximum(all_in, 1), sums)
  updates, new = INNER.update(mean, common, params)
  updates, common = _where(enough, (updates, new), (_zeros(updates), common))
  return updates, common, _where(enough, _zeros((total, count)), (total, count))


def _accumulate(grads, common, own, params):
  """A step of k = 4 N: communicates only where there can be enough."""
  inner_state, iterations = common
  total, count = _held(grads, *own)

  def aggregate():
    sums, all_in = jax.lax.psum((total, count), AXIS)
    enough = all_in >= 4 * DEVICES
    mean = jax.tree.map(lambda x: x / jnp.maximum(all_in, 1), sums)
    updates, new = INNER.update(mean, inner_state, params)
    return _where(
      enough,
      (updates, (new, jnp.zeros_like(iterations)), _zeros((total, count))),
      (_zeros(updates), (inner_state, iterations + 1), (total, count)),
    )

  def wait():
    return _zeros(params), (inner_state, iterations + 1), (total, count)

  return jax.lax.cond(iterations + 1 >= 4, aggregate, wait)


def _elastic(grads, common, own, params):
  center, iterations = common
  local_center, inner_state = own
  rate = 0.9 / PERIOD / DEVICES
  grads = jax.tree.map(
    lambda g, x, c: g + rate / 1e-3 * (x - c), grads, params, local_center
  )
  updates, inner_state = INNER.update(grads, inner_state, params)

  def meet():
    moved = optax.apply_updates(params, updates)
    finite = _is_finite(jax.tree.leaves(moved))
    pull = jax.tree.map(
      lambda x, c: jnp.where(finite, rate * (x - c), 0), moved, center
    )
    new_center = _add(center, jax.lax.psum(pull, AXIS))
    return jax.tree.map(jnp.subtract, updates, pull), new_center, center, 0

  updates, center, local_center, iterations = jax.lax.cond(
    iterations + 1 >= PERIOD,
    meet,
    lambda: (updates, center, local_center, iterations + 1),
  )
  return updates, (center, iterations), (local_center, inner_state)


def _diloco(grads, common, own, params):
  center, outer_state, iterations = common
  updates, own = INNER.update(grads, own, params)

  def meet():
    moved = optax.apply_updates(params, updates)
    finite = _is_finite(jax.tree.leaves(moved))
    gap = jax.tree.map(lambda c, x: jnp.where(finite, c - x, 0), center, moved)
    gap, count = jax.lax.psum((gap, finite.astype(jnp.float32)), AXIS)
    gap = jax.tree.map(lambda x: x / jnp.maximum(count, 1), gap)
    steps, new_state = OUTER.update(gap, outer_state, center)
    new = optax.apply_updates(center, steps)
    return jax.tree.map(jnp.subtract, new, params), (new, new_state, 0)

  updates, common = jax.lax.cond(
    iterations + 1 >= PERIOD,
    meet,
    lambda: (updates, (center, outer_state, iterations + 1)),
  )
  return updates, common, own


def _dimension(x):
  """The first dimension that the devices divide."""
  return next(i for i, size in enumerate(x.shape) if size % DEVICES == 0)


def _slice(x, index):
  size = x.shape[_dimension(x)] // DEVICES
  return jax.lax.dynamic_slice_in_dim(x, index * size, size, _dimension(x))


def _sharded(grads, common, own, params):
  """As in ZeRO: each device has a slice of each leaf of the optimizer state."""
  scatter = lambda x: jax.lax.psum_scatter(
    x, AXIS, scatter_dimension=_dimension(x), tiled=True
  )
  gather = lambda x, whole: jax.lax.all_gather(
    x, AXIS, axis=_dimension(whole), tiled=True
  )
  part = jax.tree.map(lambda x: scatter(x) / DEVICES, grads)
  mine = jax.tree.map(lambda x: _slice(x, jax.lax.axis_index(AXIS)), params)
  updates, own = INNER.update(part, own, mine)
  return jax.tree.map(gather, updates, params), common, own


def cases() -> dict[str, Case]:
  """Returns the steps by name."""
  sync = functools.partial(
    optax_dist.sync_replicas, INNER, AXIS, total_num_replicas=DEVICES
  )
  period = {"communication_period": PERIOD, "num_replicas": DEVICES}
  zero = lambda: jnp.zeros([], jnp.int32)
  counted = lambda params: (_zeros(params), zero())
  part = functools.partial(jax.tree.map, lambda x: _slice(x, 0))
  return {
    "cross_shard": Case(
      optax.chain(optax_dist.cross_shard(AXIS), INNER),
      lambda params: (INNER.init(params), ()),
      _mean,
    ),
    "sync_replicas, all_arrive": Case(
      sync(replicas_to_aggregate=DEVICES, all_arrive=True),
      lambda params: (INNER.init(params), ()),
      _mean,
    ),
    "sync_replicas, k = N": Case(
      sync(replicas_to_aggregate=DEVICES),
      lambda params: (INNER.init(params), counted(params)),
      _sync,
    ),
    "sync_replicas, k = 4 N": Case(
      sync(replicas_to_aggregate=4 * DEVICES),
      lambda params: ((INNER.init(params), zero()), counted(params)),
      _accumulate,
    ),
    "elastic_average": Case(
      optax_dist.elastic_average(INNER, AXIS, learning_rate=1e-3, **period),
      lambda params: ((params, zero()), (params, INNER.init(params))),
      _elastic,
      own_params=True,
    ),
    "diloco": Case(
      optax_dist.local_updates(INNER, OUTER, AXIS, **period),
      lambda params: (
        (params, OUTER.init(params), zero()),
        INNER.init(params),
      ),
      _diloco,
      own_params=True,
    ),
    "sharded": Case(
      optax_dist.sharded(INNER, AXIS, num_replicas=DEVICES),
      lambda params: ((), INNER.init(part(params))),
      _sharded,
    ),
  }


# --- Programs ------------------------------------------------------------------


def step_of(case: Case, by_hand: bool, mesh: Any, width: int) -> Any:
  """Returns a jitted step, and the types of its arguments, on a mesh."""
  params = jax.eval_shape(lambda: parameters(width))
  spec = P(AXIS) if case.own_params else P()
  if by_hand:
    common, own = jax.eval_shape(case.init, params)
    state = common, _stacked(own)
    specs = (
      jax.tree.map(lambda _: P(), common),
      jax.tree.map(lambda _: P(AXIS), own),
    )
  else:
    state = jax.eval_shape(case.tx.init, params)
    specs = optax_dist.states.state_specs(state, AXIS)

  def step(params, state, tokens):
    if case.own_params:
      params = _row(params)
    grads = jax.grad(loss)(params, tokens)
    if by_hand:
      common, own = state
      updates, common, own = case.update(grads, common, _row(own), params)
      state = common, _block(own)
    else:
      updates, state = case.tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    return _block(params) if case.own_params else params, state

  all_specs = (
    jax.tree.map(lambda _: spec, params),
    specs,
    P(AXIS),
  )
  run = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=all_specs,
    out_specs=all_specs[:2],
    check_vma=False,
  )
  inputs = (
    _stacked(params) if case.own_params else params,
    state,
    jax.ShapeDtypeStruct((4 * DEVICES, LENGTH), jnp.int32),
  )
  types = jax.tree.map(
    lambda spec, tree: jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
      ),
      tree,
    ),
    all_specs,
    inputs,
    is_leaf=lambda x: isinstance(x, P),
  )
  return jax.jit(run, donate_argnums=(0, 1)), types


def _row(tree):
  return jax.tree.map(lambda x: x[0], tree)


def _block(tree):
  return jax.tree.map(lambda x: x[None], tree)


def _stacked(tree):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((DEVICES, *x.shape), x.dtype), tree
  )


# --- TPU -----------------------------------------------------------------------


def _collectives(text: str) -> str:
  kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
  outcome = re.findall(rf" ({kinds})(?:-start)?\(", text)
  counts = collections.Counter(outcome)
  return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))


_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4}
_OPERATION = re.compile(
  r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)"
)


def _memory_bytes(text: str) -> int:
  """Returns the bytes read from and written to HBM, in all branches.

  XLA's own count includes what only moves within the chip: it counts an array that
  the compiler fetches ahead of time three times.
  """
  text = re.sub(r"/\*.*?\*/", "", text)
  fused = set(re.findall(r"calls=%?([\w.-]+)", text))
  types: dict[str, str] = {}
  totals: collections.Counter[str] = collections.Counter()
  computation = ""
  for line in text.splitlines():
    if header := re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line):
      computation = header[1]
    outcome = _OPERATION.match(line)
    if not outcome:
      continue
    name, kind, op, rest = outcome.groups()
    types[name] = kind
    moved = {"copy-start", "slice-start"}
    moves_nothing = {"get-tuple-element", "bitcast", "tuple", "parameter"}
    moves_nothing |= {"constant", "conditional"}
    if computation in fused or op in moves_nothing or op.endswith("-done"):
      continue
    results = list(_arrays(kind))
    if op in moved:
      size = min(size for size, _ in results[:2])
      totals[computation] += size * sum(in_hbm for _, in_hbm in results[:2])
      continue
    operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
    read = [x for name in operands for x in _arrays(types.get(name, ""))]
    totals[computation] += sum(
      size for size, in_hbm in read + results if in_hbm
    )
  return sum(totals.values())


def _arrays(kind: str) -> Iterator[tuple[int, bool]]:
  """Yields the bytes of each array in a type, and whether it is in HBM."""
  for name, shape, layout in re.findall(r"(\w+)\[([\d,]*)\](\{.*?\})?", kind):
    dims = [int(dim) for dim in shape.split(",") if dim]
    yield _BYTES.get(name, 0) * math.prod(dims), "S(" not in layout


def on_tpu(case: Case, width: int) -> dict[str, Any]:
  """Compiles both for TPU v5e; returns figures and their ratios."""
  chips = topologies.get_topology_desc(
    platform="tpu", topology_name="v5e:2x4"
  ).devices
  mesh = jax.sharding.Mesh(np.array(chips), (AXIS,))
  sides = []
  for by_hand in (False, True):
    run, types = step_of(case, by_hand, mesh, width)
    begin = time.perf_counter()
    compiled = run.lower(*types).compile()
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    sides.append(
      {
        "seconds": time.perf_counter() - begin,
        "hbm": _memory_bytes(compiled.as_text()),
        "bytes": cost["bytes accessed"],
        "flops": cost["flops"],
        "peak": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "collectives": _collectives(compiled.as_text()),
      }
    )
  ours, theirs = sides
  ratio = {
    key: ours[key] / theirs[key]
    for key in ("hbm", "bytes", "flops", "peak", "seconds")
  }
  return {"ratio": ratio, "ours": ours, "theirs": theirs}


# --- CPU and GPU ---------------------------------------------------------------


def on_this_machine(case: Case, width: int, rounds: int) -> dict[str, Any]:
  """Compiles and runs both, interleaved; returns ratios."""
  mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(AxisType.Auto,))
  times: dict[bool, list[float]] = {False: [], True: []}
  loops = {}
  for _ in range(2):
    for by_hand, into in times.items():
      jax.clear_caches()
      run, types = step_of(case, by_hand, mesh, width)
      begin = time.process_time()
      compiled = run.lower(*types).compile()
      into.append(time.process_time() - begin)
      loops[by_hand] = _loop(compiled, types)
  step = ratios.compare(loops[False], loops[True], rounds)
  ours, theirs = (min(times[by_hand]) for by_hand in (False, True))
  ratio = {
    "step": step["ratio"],
    "shortest": step["ratio_of_shortest"],
    "processor": step["ratio_of_processor_time"],
    "compile": ours / theirs,
  }
  return {
    "ratio": ratio,
    "ours": {"step_ms": step["ours_ms"], "compile_s": ours},
    "theirs": {"step_ms": step["theirs_ms"], "compile_s": theirs},
  }


def _loop(compiled: Any, types: Any) -> Callable[[], Any]:
  """Returns a function that takes a step, each from where the last one ended."""
  params, state, tokens = jax.tree.map(
    lambda x: jax.device_put(jnp.ones(x.shape, x.dtype) * 0, x.sharding), types
  )
  carry = [params, state]

  def step():
    carry[:] = jax.block_until_ready(compiled(*carry, tokens))

  return step


def main() -> None:
  """Prints a line for each transform."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  where = parser.add_mutually_exclusive_group()
  where.add_argument("--tpu", action="store_true", help="compile for v5e")
  where.add_argument("--gpu", action="store_true", help="run on one GPU")
  parser.add_argument("--only", nargs="+", default=tuple(cases()))
  parser.add_argument("--rounds", type=int, default=40, help="of steps")
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
  args = parser.parse_args()
  if args.gpu:
    global DEVICES
    DEVICES = 1
  jax.config.update("jax_platforms", "cuda" if args.gpu else "cpu")
  jax.config.update("jax_num_cpu_devices", DEVICES)
  if args.tpu:
    # There is no TPU machine whose metadata could be asked for.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Nor one that two processes could not share.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  results = {}
  for name in args.only:
    case = cases()[name]
    if args.tpu:
      result = on_tpu(case, WIDTHS["tpu"])
    else:
      width = WIDTHS["gpu" if args.gpu else "cpu"]
      result = on_this_machine(case, width, args.rounds)
    results[name] = result
    cells = "  ".join(
      f"{key} {x:.2f}{' MISSED' if x > GOALS.get(key, x) else ''}"
      for key, x in result["ratio"].items()
    )
    print(f"{name:<26} {cells}", flush=True)
    for who in ("ours", "theirs"):
      figures = "  ".join(
        f"{key} {x if isinstance(x, str) else f'{x:.4g}'}"
        for key, x in result[who].items()
      )
      print(f"  {who:<6} {figures}", flush=True)
  if args.json:
    args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
  main()
