"""Times sync_replicas against the same written by hand and optax.MultiSteps.

Prints ratios of whole training steps, both run in turns in the same process or
processes, with parameters and state donated; below 1 is faster:

* all replicas arrive, k = N, against pmean and the inner optimizer by hand;
* k = 4 N, against optax.MultiSteps around a pmean, per update, with how many
  collectives each executes for an update;
* k = 6 of 8 with two stragglers: the cost of an iteration, against the same by hand
  without any.

    python benchmarks/sync_replicas.py [--quick] [--json FILE]
"""

import functools
import itertools
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
import ratios
from cross_shard import AXIS, DEVICES, launch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dist

# Widths of the layers, and examples per replica and iteration.
MODELS = {
  "200 leaves, 32 wide": ([32] * 101, 32),
  "20 leaves, 128 wide": ([128] * 11, 32),
  "6 leaves, 768 wide": ([768] * 4, 32),
  "6 leaves, 768 wide, batch 256": ([768] * 4, 256),
}
ACCUMULATED = 4
STEP_GOAL = 1.02
INNER = optax.sgd(1e-2, momentum=0.9)


def by_hand() -> optax.GradientTransformation:
  """The mean of the gradients, then the inner optimizer."""
  mean = optax.stateless(lambda grads, _: jax.lax.pmean(grads, AXIS))
  return optax.chain(mean, INNER)


def sync(needed: float, **kwargs) -> optax.GradientTransformation:
  """``sync_replicas`` with ``needed`` gradients of each replica."""
  size = jax.device_count()
  return optax_dist.sync_replicas(
    INNER,
    AXIS,
    replicas_to_aggregate=int(needed * size),
    total_num_replicas=size,
    **kwargs,
  )


class Trainer:
  """A compiled training step and its initial state."""

  def __init__(self, tx, widths, batch: int, masks: bool = False):
    """Compiles the step; with ``masks`` two replicas arrive now and then."""
    # MultiSteps holds replicas' own sums as if they were equal: not tracked.
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    rng = np.random.default_rng(0)
    draw = lambda *shape: np.asarray(rng.normal(size=shape), np.float32)
    params = [
      (draw(n, m) / np.sqrt(n, dtype=np.float32), np.zeros(m, np.float32))
      for n, m in itertools.pairwise(widths)
    ]
    specs = optax_dist.states.state_specs(jax.eval_shape(tx.init, params), AXIS)
    is_spec = lambda node: isinstance(node, P)

    def step(params, state, x, arrived):
      grads = jax.grad(_loss)(params, x)
      extra = {"arrived": arrived} if masks else {}
      updates, state = tx.update(grads, state, params, **extra)
      return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P(), specs, P(AXIS), P(AXIS)),
      out_specs=(P(), specs),
      check_vma=False,
    )
    place = lambda spec, x: jax.make_array_from_callback(
      x.shape, NamedSharding(mesh, spec), lambda index: x[index]
    )
    arrivals = rng.random((16, mesh.size)) < 0.5
    arrivals[:, 2:] = True
    self._arrivals = itertools.cycle([place(P(AXIS), row) for row in arrivals])
    self._x = place(P(AXIS), draw(batch * mesh.size, widths[0]))
    state = jax.tree.map(
      lambda spec, part: jax.tree.map(
        lambda x: place(spec, np.asarray(x)), part
      ),
      specs,
      tx.init(params),
      is_leaf=is_spec,
    )
    params = jax.tree.map(lambda x: place(P(), x), params)
    self._run = jax.jit(mapped, donate_argnums=(0, 1))
    self._carry = params, state

  def iterate(self) -> None:
    """Makes a step and waits for it."""
    self._carry = self._run(*self._carry, self._x, next(self._arrivals))
    jax.block_until_ready(self._carry)

  def update(self) -> None:
    """Makes as many steps as an update takes when gradients are accumulated."""
    for _ in range(ACCUMULATED):
      self.iterate()

  def collectives(self) -> int:
    """How many are executed for an update when gradients are accumulated."""
    total = 0
    for _ in range(ACCUMULATED):
      args = (*self._carry, self._x, next(self._arrivals))
      jaxpr = jax.make_jaxpr(self._run)(*args)
      mine = [x.addressable_data(0) for x in jax.tree.leaves(args)]
      total += _execute(jaxpr.jaxpr, jaxpr.consts, mine)[1]
      self.iterate()
    return total


def _loss(params, x):
  for w, b in params:
    x = jnp.tanh(x @ w + b[None])
  return jnp.mean(jnp.square(x))


def _execute(jaxpr, consts, args) -> tuple[list[Any], int]:
  """Runs one replica's part as if all were equal, and counts its collectives.

  Counting them in the program's text would not tell which branches are taken.
  """
  env = dict(zip(jaxpr.constvars, consts, strict=True))
  env |= dict(zip(jaxpr.invars, args, strict=True))
  read = lambda v: v.val if isinstance(v, jax.extend.core.Literal) else env[v]
  count = 0
  for eqn in jaxpr.eqns:
    name, params = eqn.primitive.name, eqn.params
    values = [read(v) for v in eqn.invars]
    inner = params.get("jaxpr") or params.get("call_jaxpr")
    more = 0
    if name == "axis_index":
      results = [jnp.int32(0)]
    elif name.startswith(("psum", "all_gather")):
      results, more = values, len(values)
    elif name == "cond":
      branch = params["branches"][int(values[0])]
      results, more = _execute(branch.jaxpr, branch.consts, values[1:])
    elif name in ("jit", "pjit", "shard_map", "custom_jvp_call"):
      consts = getattr(inner, "consts", [])
      results, more = _execute(getattr(inner, "jaxpr", inner), consts, values)
    else:
      results = eqn.primitive.bind(*values, **params)
      results = results if eqn.primitive.multiple_results else [results]
    count += more
    env |= dict(zip(eqn.outvars, results, strict=True))
  return [read(v) for v in jaxpr.outvars], count


# --- What is measured --------------------------------------------------------


def steps(rounds: int) -> list[dict[str, Any]]:
  """All arrive, with k = N; and k = 6 of 8 with stragglers."""
  results = []
  for name, (widths, batch) in MODELS.items():
    theirs = Trainer(by_hand(), widths, batch).iterate
    ours = {
      "k = N, all_arrive": Trainer(sync(1, all_arrive=True), widths, batch),
      "k = N": Trainer(sync(1), widths, batch),
      "k = 3/4 N, stragglers": Trainer(sync(0.75), widths, batch, True),
    }
    for what, trainer in ours.items():
      results.append(
        {
          "where": f"1 process, {DEVICES} devices",
          "what": f"{what}; {name}",
          "goal": STEP_GOAL if what.startswith("k = N") else None,
          **ratios.compare(trainer.iterate, theirs, rounds),
        }
      )
  return results


def accumulation(name: str, rounds: int) -> dict[str, dict[str, Any]]:
  """Times k = 4 N against MultiSteps, in this process or one of several."""
  widths, batch = MODELS[name]
  # MultiSteps compares a NumPy integer with a counter.
  with jax.numpy_dtype_promotion("standard"):
    multi = optax.MultiSteps(by_hand(), ACCUMULATED)
    theirs = Trainer(multi.gradient_transformation(), widths, batch)
    expected = theirs.collectives()
    results = {}
    for what, kwargs in {
      f"k = {ACCUMULATED} N, all_arrive": {"all_arrive": True},
      f"k = {ACCUMULATED} N": {},
    }.items():
      ours = Trainer(sync(ACCUMULATED, **kwargs), widths, batch)
      executed = ours.collectives()
      results[what] = {
        "collectives": [executed, expected],
        "note": f"{executed} collectives against {expected}",
        **ratios.compare(ours.update, theirs.update, rounds),
      }
  return results


def _in_two_processes(name: str, rounds: int) -> dict[str, dict[str, Any]]:
  # A process waits for the other in each call, so either one's time will do.
  return launch.run(accumulation, name, rounds, processes=2, timeout=600)[0]


def accumulations(rounds: int) -> list[dict[str, Any]]:
  """The same in one process, and over two processes and gloo."""
  results = []
  for name in list(MODELS)[:3]:
    places = {
      f"1 process, {DEVICES} devices": functools.partial(
        accumulation, name, rounds
      ),
      "2 processes": functools.partial(_in_two_processes, name, rounds),
    }
    for where, measure in places.items():
      for what, figures in measure().items():
        results.append(
          {
            "where": where,
            "what": f"{what}; {name}",
            "goal": None,
            **figures,
          }
        )
  return results


# --- The command -------------------------------------------------------------


def main() -> None:
  """Prints a line for each comparison."""
  args = ratios.parser(__doc__).parse_args()
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", DEVICES)
  ratios.report(
    args,
    {"where": 21, "what": 53},
    ((steps, 200), (accumulations, 40)),
    quick=10,
  )


if __name__ == "__main__":
  main()
