"""Times local_updates and streaming_updates against DiLoCo written by hand.

One process with 8 CPU devices, AdamW inside, Nesterov momentum outside, a period of
10. Prints ratios of whole periods of training steps (gradient and update), both
programs run in turns, with parameters and state donated; below 1 is faster:

* by hand: the round is the branch of a ``jax.lax.cond``, one fragment and no delay;
* alone: the inner optimizer, without any communication.

    python benchmarks/local_updates.py [--models NAME ...] [--quick] [--json FILE]
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ratios
from cross_shard import AXIS, DEVICES
from jax.sharding import PartitionSpec as P

import optax_dist

PERIOD = 10
# Widths of the layers, and examples per replica and step.
MODELS = {
  "200 leaves, 32 wide": ([32] * 101, 32),
  "20 leaves, 128 wide": ([128] * 11, 128),
  "6 leaves, 512 wide": ([512] * 4, 128),
}
INNER = optax.adamw(4e-4)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)

_row = functools.partial(jax.tree.map, lambda x: x[0])
_block = functools.partial(jax.tree.map, lambda x: x[None])
_stack = functools.partial(
  jax.tree.map, lambda x: np.stack([np.asarray(x)] * DEVICES)
)


class Method(NamedTuple):
  """A way to train replicas.

  Attributes:
    init: returns a state, and the specs to pass it with, from parameters.
    step: returns parameters and state from a gradient, a state and parameters.
  """

  init: Callable[[Any], tuple[Any, Any]]
  step: Callable[[Any, Any, Any], tuple[Any, Any]]


def ours(tx: optax.GradientTransformation) -> Method:
  """A transform of this package."""

  def init(params):
    state = tx.init(params)
    return state, optax_dist.states.state_specs(state, AXIS)

  def step(gradient, state, params):
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  return Method(init, step)


def alone() -> Method:
  """The inner optimizer, on each replica by itself."""

  def step(gradient, state, params):
    updates, state = INNER.update(gradient, _row(state), params)
    return optax.apply_updates(params, updates), _block(state)

  return Method(lambda params: (_stack(INNER.init(params)), P(AXIS)), step)


def by_hand() -> Method:
  """DiLoCo as one would write it."""

  def init(params):
    inner = _stack(INNER.init(params))
    common = params, OUTER.init(params), np.zeros([], np.int32)
    return (inner, common), (P(AXIS), P())

  def step(gradient, state, params):
    inner, (center, outer, ticks) = state
    updates, inner = INNER.update(gradient, _row(inner), params)
    params = optax.apply_updates(params, updates)
    ticks += 1

    def communicate(params, center, outer):
      mean = jax.lax.pmean(params, AXIS)
      gap = jax.tree.map(jnp.subtract, center, mean)
      updates, outer = OUTER.update(gap, outer, center)
      center = optax.apply_updates(center, updates)
      return center, center, outer

    params, center, outer = jax.lax.cond(
      ticks % PERIOD == 0,
      communicate,
      lambda *args: args,
      params,
      center,
      outer,
    )
    return params, (_block(inner), (center, outer, ticks))

  return Method(init, step)


def methods() -> dict[str, Method]:
  """Returns what is timed, by name."""
  options = {"communication_period": PERIOD, "num_replicas": DEVICES}
  local = optax_dist.local_updates(INNER, OUTER, AXIS, **options)
  streaming = optax_dist.streaming_updates(
    INNER, OUTER, AXIS, fragments=4, **options
  )
  return {"local_updates": ours(local), "streaming_updates": ours(streaming)}


class Period:
  """Compiles a method's training step; a call runs it for one period."""

  def __init__(self, method: Method, widths: list[int], batch: int):
    """Starts all replicas from the same parameters."""
    mesh = jax.make_mesh((DEVICES,), (AXIS,))
    rng = np.random.default_rng(0)
    draw = lambda *shape: np.float32(rng.normal(size=shape))
    params = [
      (draw(n, m) / np.float32(n**0.5), np.zeros(m, np.float32))
      for n, m in itertools.pairwise(widths)
    ]
    state, specs = method.init(params)

    def step(params, state, x):
      own = _row(params)
      gradient = jax.grad(_loss)(own, x[0])
      own, state = method.step(gradient, state, own)
      return _block(own), state

    mapped = jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P(AXIS), specs, P(AXIS)),
      out_specs=(P(AXIS), specs),
      check_vma=False,
    )
    x = draw(DEVICES, batch, widths[0])
    *self._carry, self._x = optax_dist.states.place(
      (_stack(params), state, x), mesh, (P(AXIS), specs, P(AXIS))
    )
    self._run = jax.jit(mapped, donate_argnums=(0, 1))

  def __call__(self) -> None:
    """Waits for the last step."""
    for _ in range(PERIOD):
      self._carry = self._run(*self._carry, self._x)
    jax.block_until_ready(self._carry)


def _loss(params, x):
  for w, b in params:
    x = jnp.tanh(x @ w + b[None])
  return jnp.mean(jnp.square(x))


def steps(models: list[str], rounds: int) -> Iterator[dict[str, Any]]:
  """Times training steps of each model."""
  for name in models:
    others = {
      what: Period(method, *MODELS[name])
      for what, method in (("by hand", by_hand()), ("alone", alone()))
    }
    for what, method in methods().items():
      period = Period(method, *MODELS[name])
      for against, other in others.items():
        yield {
          "what": f"{what}; {name}",
          "against": against,
          "goal": None,
          **ratios.compare(period, other, rounds, PERIOD),
        }


def main() -> None:
  """Prints a line for each comparison."""
  parser = ratios.parser(__doc__)
  parser.add_argument("--models", nargs="+", default=list(MODELS))
  args = parser.parse_args()
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", DEVICES)
  ratios.report(
    args,
    {"what": 38, "against": 7},
    ((functools.partial(steps, args.models), 15),),
    quick=5,
  )


if __name__ == "__main__":
  main()
