"""The compiled programs of a training in virtual time, one for each kind.

A carry goes in and comes out; the inputs of a call are those of a chunk of
steps. Programs are cached by the identity of their functions.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist.states.specs import state_axes
from optax_dist.transforms.elastic_exchange import elastic_exchange
from optax_dist.transforms.local_updates import local_updates
from optax_dist.transforms.sync_replicas import sync_replicas

_AXIS = "replicas"


_cached_sync_replicas = functools.lru_cache(sync_replicas)
_cached_local_updates = functools.lru_cache(local_updates)


def sync_replicas_of(optimizer, k, n, late, weight):
  return _cached_sync_replicas(
    optimizer,
    _AXIS,
    replicas_to_aggregate=k,
    total_num_replicas=n,
    max_staleness=late,
    staleness_weight=weight,
  )


def local_updates_of(inner, outer, period, n):
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


def start_gradients(tx, params, n):
  params = jax.tree.map(jnp.asarray, params)
  return params, _stack(params, n), tx.init(params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_gradients(tx, gradient, key, carry, inputs):
  axes = state_axes(carry[2])

  def update(gradient, state, params, arrived, local_step):
    return tx.update(
      gradient, state, params, arrived=arrived, local_step=local_step
    )

  update_all = jax.vmap(
    update,
    in_axes=(0, axes, None, 0, 0),
    out_axes=(0, axes),
    axis_name=_AXIS,
  )

  def commit(carry, x):
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


def start_exchanges(optimizer, params, n):
  params = jax.tree.map(jnp.asarray, params)
  stacked = _stack(params, n)
  return params, stacked, jax.vmap(optimizer.init)(stacked)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run_exchanges(optimizer, gradient, period, rate, key, carry, inputs):
  def train(params, state, key):
    def one(carry, i):
      params, state = carry
      grads = gradient(params, jax.random.fold_in(key, i))
      updates, state = optimizer.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(one, (params, state), jnp.arange(period))[0]

  def wave(carry, x):
    shared, own, states = carry
    number, order, on, restarts = x
    own = _select(restarts, jax.tree.map(lambda x: x[None], shared), own)
    n = order.shape[0]
    ready = jnp.zeros(n, bool).at[order].set(on)
    trained, new_states = jax.vmap(train)(
      own, states, _keys(key, number, jnp.arange(n))
    )
    own, states = _select(ready, (trained, new_states), (own, states))

    def meet(carry, turn):
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


def start_changes(tx, params, n):
  params = jax.tree.map(jnp.asarray, params)
  return _stack(params, n), tx.init(params)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run_changes(tx, gradient, period, key, carry, inputs):
  axes = state_axes(carry[1])

  def update(params, state, key):
    updates, state = tx.update(gradient(params, key), state, params)
    return optax.apply_updates(params, updates), state

  update_all = jax.vmap(
    update,
    in_axes=(0, axes, 0),
    out_axes=(0, axes),
    axis_name=_AXIS,
  )
  n = jax.tree.leaves(carry[0])[0].shape[0]

  def round_of_steps(carry, x):
    (number,) = x

    def one(carry, i):
      keys = _keys(jax.random.fold_in(key, number), i, jnp.arange(n))
      return update_all(carry[0], carry[1], keys), None

    return jax.lax.scan(one, carry, jnp.arange(period))[0], None

  return jax.lax.scan(round_of_steps, carry, inputs)[0]
