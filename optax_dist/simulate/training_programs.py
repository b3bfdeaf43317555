"""The compiled programs of a training in virtual time, one for each kind.

A carry goes in and comes out; the inputs of a call are those of a chunk of
steps. Programs are cached by the identity of their functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist.states.specs import state_axes
from optax_dist.transforms.elastic_exchange import elastic_exchange
from optax_dist.transforms.local_updates import local_updates
from optax_dist.transforms.sync_replicas import sync_replicas

_AXIS = "replicas"

Gradient = Callable[[Any, jax.Array], Any]
Carry = tuple[Any, ...]
Inputs = tuple[jax.Array, ...]


_cached_sync_replicas = functools.lru_cache(sync_replicas)
_cached_local_updates = functools.lru_cache(local_updates)


def sync_replicas_of(
  optimizer: optax.GradientTransformation,
  k: int,
  n: int,
  late: int | None,
  weight: Any,
) -> optax.GradientTransformationExtraArgs:
  """The transform in which `k` of `n` replicas' gradients make a step."""
  return _cached_sync_replicas(
    optimizer,
    _AXIS,
    replicas_to_aggregate=k,
    total_num_replicas=n,
    max_staleness=late,
    staleness_weight=weight,
  )


def local_updates_of(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  period: int,
  n: int,
) -> optax.GradientTransformationExtraArgs:
  """The transform in which `n` replicas average changes once per `period`."""
  return _cached_local_updates(
    inner, outer, _AXIS, communication_period=period, num_replicas=n
  )


def _stack(tree: Any, n: int) -> Any:
  return jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x)[None], n, 0), tree)


def _select(predicate: jax.Array, new: Any, old: Any) -> Any:
  """Selects the rows of `new` where the predicate `[N]` holds."""
  choose = lambda a, b: jnp.where(
    predicate.reshape(-1, *[1] * (b.ndim - 1)), a, b
  )
  return jax.tree.map(choose, new, old)


def _keys(key: jax.Array, step: jax.Array, replicas: jax.Array) -> jax.Array:
  """A key for each of these replicas' contributions to a step."""
  return jax.vmap(jax.random.fold_in, (None, 0))(
    jax.random.fold_in(key, step), replicas
  )


# Gradients: common parameters, of which late replicas hold old versions.


def start_gradients(
  tx: optax.GradientTransformation, params: Any, n: int
) -> Carry:
  """The first carry of :func:`run_gradients`.

  Returns:
    The parameters, those that each replica holds (with a leading axis of `n`),
    and the state of `tx`.
  """
  params = jax.tree.map(jnp.asarray, params)
  return params, _stack(params, n), tx.init(params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_gradients(
  tx: optax.GradientTransformationExtraArgs,
  gradient: Gradient,
  key: jax.Array,
  carry: Carry,
  inputs: Inputs,
) -> Carry:
  """Takes a chunk of steps.

  Args:
    tx: the transform of :func:`sync_replicas_of`.
    gradient: takes parameters and a random key.
    key: the random key of the training.
    carry: see :func:`start_gradients`.
    inputs: for each step its number, the members, their local steps (int32,
      ``[steps]``, ``[steps, k]``), and which replicas restart before it
      (boolean, ``[steps, n]``).
  """
  axes = state_axes(carry[2])

  def update(
    gradient: Any,
    state: Any,
    params: Any,
    arrived: jax.Array,
    local_step: jax.Array,
  ) -> tuple[Any, Any]:
    return tx.update(
      gradient, state, params, arrived=arrived, local_step=local_step
    )

  update_all = jax.vmap(
    update,
    in_axes=(0, axes, None, 0, 0),
    out_axes=(0, axes),
    axis_name=_AXIS,
  )

  def commit(carry: Carry, x: Inputs) -> tuple[Carry, None]:
    params, held, state = carry
    step, members, local_steps, restarts = x
    held = _select(restarts, jax.tree.map(lambda x: x[None], params), held)
    own = jax.tree.map(lambda x: x[members], held)
    gradients = jax.vmap(gradient)(own, _keys(key, step, members))
    # The others have not arrived; their values are ignored.
    put = lambda x, g: jnp.zeros_like(x).at[members].set(g)
    n = restarts.shape[0]
    arrived = jnp.zeros(n, bool).at[members].set(True)
    updates, state = update_all(
      jax.tree.map(put, held, gradients),
      state,
      params,
      arrived,
      jnp.full(n, step).at[members].set(local_steps),
    )
    params = optax.apply_updates(params, jax.tree.map(lambda u: u[0], updates))
    held = _select(arrived, jax.tree.map(lambda x: x[None], params), held)
    return (params, held, state), None

  return jax.lax.scan(commit, carry, inputs)[0]


# Exchanges: parameters of each replica, and a center.


def start_exchanges(
  optimizer: optax.GradientTransformation, params: Any, n: int
) -> Carry:
  """The first carry of :func:`run_exchanges`.

  Returns:
    The center, and each replica's parameters and optimizer state (with a
    leading axis of `n`).
  """
  params = jax.tree.map(jnp.asarray, params)
  stacked = _stack(params, n)
  return params, stacked, jax.vmap(optimizer.init)(stacked)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run_exchanges(
  optimizer: optax.GradientTransformation,
  gradient: Gradient,
  period: int,
  rate: jax.Array,
  key: jax.Array,
  carry: Carry,
  inputs: Inputs,
) -> Carry:
  """Trains for a chunk of periods, with an exchange after each.

  Args:
    optimizer: the replicas' own optimizer.
    gradient: takes parameters and a random key.
    period: local steps between exchanges.
    rate: the moving rate (float scalar).
    key: the random key of the training.
    carry: see :func:`start_exchanges`.
    inputs: for each wave of exchanges its number (int32, ``[waves]``), the
      replicas in their order, which of these exchange, and which replicas
      restart before it (``[waves, n]``).
  """

  def train(params: Any, state: Any, key: jax.Array) -> tuple[Any, Any]:
    def one(carry: Carry, i: jax.Array) -> tuple[Carry, None]:
      params, state = carry
      grads = gradient(params, jax.random.fold_in(key, i))
      updates, state = optimizer.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(one, (params, state), jnp.arange(period))[0]

  def wave(carry: Carry, x: Inputs) -> tuple[Carry, None]:
    shared, own, states = carry
    number, order, on, restarts = x
    own = _select(restarts, jax.tree.map(lambda x: x[None], shared), own)
    n = order.shape[0]
    ready = jnp.zeros(n, bool).at[order].set(on)
    trained, new_states = jax.vmap(train)(
      own, states, _keys(key, number, jnp.arange(n))
    )
    own, states = _select(ready, (trained, new_states), (own, states))

    def meet(carry: Carry, turn: Inputs) -> tuple[Carry, None]:
      shared, own = carry
      replica, meets = turn
      mine = jax.tree.map(lambda x: x[replica], own)
      met = elastic_exchange(mine, shared, jnp.where(meets, rate, 0.0))
      own = jax.tree.map(lambda x, m: x.at[replica].set(m), own, met.params)
      return (met.center, own), None

    (shared, own), _ = jax.lax.scan(meet, (shared, own), (order, on))
    return (shared, own, states), None

  return jax.lax.scan(wave, carry, inputs)[0]


# Changes: rounds of local steps, all replicas at once.


def start_changes(
  tx: optax.GradientTransformation, params: Any, n: int
) -> Carry:
  """The first carry of :func:`run_changes`.

  Returns:
    Each replica's parameters (with a leading axis of `n`), and the state of
    `tx`.
  """
  params = jax.tree.map(jnp.asarray, params)
  return _stack(params, n), tx.init(params)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run_changes(
  tx: optax.GradientTransformationExtraArgs,
  gradient: Gradient,
  period: int,
  key: jax.Array,
  carry: Carry,
  inputs: Inputs,
) -> Carry:
  """Trains for a chunk of rounds.

  Args:
    tx: the transform of :func:`local_updates_of`.
    gradient: takes parameters and a random key.
    period: steps in a round.
    key: the random key of the training.
    carry: see :func:`start_changes`.
    inputs: the number of each round (int32, ``[rounds]``).
  """
  axes = state_axes(carry[1])

  def update(params: Any, state: Any, key: jax.Array) -> tuple[Any, Any]:
    updates, state = tx.update(gradient(params, key), state, params)
    return optax.apply_updates(params, updates), state

  update_all = jax.vmap(
    update,
    in_axes=(0, axes, 0),
    out_axes=(0, axes),
    axis_name=_AXIS,
  )
  n = jax.tree.leaves(carry[0])[0].shape[0]

  def round_of_steps(carry: Carry, x: Inputs) -> tuple[Carry, None]:
    (number,) = x

    def one(carry: Carry, i: jax.Array) -> tuple[Carry, None]:
      keys = _keys(jax.random.fold_in(key, number), i, jnp.arange(n))
      return update_all(carry[0], carry[1], keys), None

    return jax.lax.scan(one, carry, jnp.arange(period))[0], None

  return jax.lax.scan(round_of_steps, carry, inputs)[0]
