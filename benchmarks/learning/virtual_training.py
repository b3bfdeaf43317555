"""Trains a real model in virtual time, with the staleness that latencies give.

`simulate.simulate_timing` says who contributes to which step, on which parameters;
`optax_dist.sync_replicas` aggregates. All replicas are batched with `vmap` on one
device, and gradients that will be dropped are not computed.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_dist
from optax_dist import simulate

sync_replicas = functools.cache(optax_dist.sync_replicas)
_jitted = functools.cache(jax.jit)


class Training(NamedTuple):
  """A training in virtual time.

  Attributes:
    times: virtual seconds at each evaluation.
    metrics: what was evaluated, by name.
    timing: how the replicas' time was spent.
  """

  times: np.ndarray
  metrics: dict[str, np.ndarray]
  timing: simulate.Timing

  def time_to(self, metric: str, value: float) -> float:
    """Seconds until a rising metric first reaches a value, or infinity."""
    series = self.metrics[metric]
    reached = np.flatnonzero(series >= value)
    if not reached.size:
      return math.inf
    i = int(reached[0])
    if i == 0:
      return float(self.times[0])
    part = (value - series[i - 1]) / (series[i] - series[i - 1])
    return float(self.times[i - 1] + part * (self.times[i] - self.times[i - 1]))


class _Schedule:
  """A journal that keeps who contributes to each step, on which parameters.

  Attributes:
    members: for each step its contributors, and the steps of their parameters.
    restarts: for each step the replicas that took its parameters without having
      contributed to the step before.
  """

  def __init__(self, replicas: int):
    self.members: list[tuple[list[int], list[int]]] = []
    self.restarts = [np.zeros(replicas, bool)]

  def write(self, kind: str, /, **fields: Any) -> None:
    if kind == "commit":
      names = "replica", "local_step"
      who, local = ([m[name] for m in fields["members"]] for name in names)
      self.members.append((who, local))
      self.restarts.append(np.zeros_like(self.restarts[0]))
    elif kind in ("join", "drop"):
      self.restarts[-1][fields["replica"]] = True


def train(
  strategy: simulate.Strategy,
  latency: simulate.Latency,
  replicas: int,
  *,
  params: Any,
  gradient: Callable[[Any, jax.Array], Any],
  optimizer: optax.GradientTransformation,
  evaluate: Callable[[Any], dict[str, jax.Array]],
  seconds: float,
  seed: int,
  evaluations: int = 20,
  staleness_weight: Any = None,
) -> Training:
  """Trains for some virtual time.

  Args:
    strategy: of gradients, of which a step takes at most one of each replica.
    latency: how long a gradient takes on each host.
    replicas: number of replicas.
    params: the initial parameters.
    gradient: takes parameters and a key, which selects the batch.
    optimizer: applied to the mean gradient.
    evaluate: computes scalars by name from parameters.
    seconds: virtual time; it ends with the last whole chunk of steps that fits.
    seed: seed of latencies and batches.
    evaluations: approximate number of evaluations.
    staleness_weight: see `optax_dist.sync_replicas`.
  """
  simulated = functools.partial(
    simulate.simulate_timing, strategy, latency, replicas, seed=seed
  )
  many = 1000
  while (times := simulated(steps=many).commit_times)[-1] <= seconds:
    many *= 2
  steps = max(1, int(np.sum(times <= seconds)))
  schedule = _Schedule(replicas)
  timing = simulated(steps=steps, journal=schedule)
  members, local_steps = np.array(schedule.members, np.int32).swapaxes(0, 1)
  tx = sync_replicas(
    optimizer,
    "replicas",
    replicas_to_aggregate=strategy.replicas_to_aggregate,
    total_num_replicas=replicas,
    max_staleness=strategy.max_staleness,
    staleness_weight=staleness_weight,
  )
  params = jax.tree.map(jnp.asarray, params)
  held = jax.tree.map(lambda x: jnp.repeat(x[None], replicas, 0), params)
  carry = params, held, tx.init(params)
  inputs = (
    np.arange(steps, dtype=np.int32),
    members,
    local_steps,
    np.array(schedule.restarts[:steps]),
  )
  # Chunks of equal length share one program; a power of two is the same for
  # most seeds.
  size = 2 ** int(math.log2(max(steps / evaluations, 1)))
  evaluate = _jitted(evaluate)
  rows, ends = [evaluate(params)], []
  for i in range(0, steps - size + 1, size):
    part = tuple(x[i : i + size] for x in inputs)
    carry = _run(tx, gradient, jax.random.key(seed), carry, part)
    rows.append(evaluate(carry[0]))
    ends.append(i + size - 1)
  return Training(
    np.concatenate([[0.0], timing.commit_times[ends]]),
    {name: np.array([float(row[name]) for row in rows]) for name in rows[0]},
    timing,
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(tx, gradient, key, carry, inputs):
  """Takes a chunk of steps."""
  axes = optax_dist.states.state_axes(carry[2])

  def update(gradient, state, params, arrived, local_step):
    return tx.update(
      gradient, state, params, arrived=arrived, local_step=local_step
    )

  update_all = jax.vmap(
    update,
    in_axes=(0, axes, None, 0, 0),
    out_axes=(0, axes),
    axis_name="replicas",
  )

  def commit(carry, x):
    params, held, state = carry
    step, members, local_steps, restarts = x
    held = _select(restarts, params, held)
    own = jax.tree.map(lambda x: x[members], held)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(
      jax.random.fold_in(key, step), members
    )
    gradients = jax.vmap(gradient)(own, keys)
    # The others have not arrived; their values are ignored.
    put = lambda x, g: jnp.zeros_like(x).at[members].set(g)
    arrived = jnp.zeros(restarts.shape[0], bool).at[members].set(True)
    updates, state = update_all(
      jax.tree.map(put, held, gradients),
      state,
      params,
      arrived,
      jnp.full(restarts.shape[0], step).at[members].set(local_steps),
    )
    params = optax.apply_updates(params, jax.tree.map(lambda u: u[0], updates))
    return (params, _select(arrived, params, held), state), None

  return jax.lax.scan(commit, carry, inputs)[0]


def _select(chosen, params, held):
  """The held parameters, with those of the chosen replicas replaced."""
  choose = lambda new, old: jnp.where(
    chosen.reshape(-1, *[1] * new.ndim), new[None], old
  )
  return jax.tree.map(choose, params, held)
