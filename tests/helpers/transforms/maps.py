"""The map matrix: one per-replica function, run under every map JAX has."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dist

AXIS = "data"
NAMES = (
  "vmap",
  "jit_vmap_spmd",
  "pmap",
  "shard_map",
  "shard_map_vma",
  "shard_map_explicit",
  "shard_map_explicit_vma",
  "plain_jit",
)
#: The maps under which JAX tracks, in types, what varies over the axis.
TRACKED = ("shard_map_vma", "shard_map_explicit_vma")

every_map = pytest.mark.parametrize("map_name", NAMES)
tracked_map = pytest.mark.parametrize("map_name", TRACKED)
#: Where the map itself is not what is tested: one that tracks and one that doesn't.
both_kinds = pytest.mark.parametrize("map_name", ["vmap", "shard_map_vma"])
untracked_map = pytest.mark.parametrize(
  "map_name", [name for name in NAMES if name not in TRACKED]
)


class Replicated(NamedTuple):
  """An argument that every replica gets whole."""

  value: Any


@functools.cache
def mesh(size: int, explicit: bool = False) -> jax.sharding.Mesh:
  """Returns a mesh of the first ``size`` devices along ``AXIS``."""
  kind = AxisType.Explicit if explicit else AxisType.Auto
  return jax.make_mesh(
    (size,), (AXIS,), axis_types=(kind,), devices=jax.devices()[:size]
  )


def mapped(map_name: str, fn, args, size: int):
  """Returns ``fn`` mapped and jitted for arguments like ``args``.

  Args:
    map_name: one of ``NAMES``.
    fn: a function of one replica's values that returns one replica's results.
    args: per argument a pytree with a leading replica axis, or ``Replicated``.
    size: the number of replicas.

  Returns:
    A function of ``args`` that returns results with a leading replica axis.
  """
  shared = [isinstance(arg, Replicated) for arg in args]
  in_axes = tuple(None if s else 0 for s in shared)
  values = lambda args: [
    a.value if s else a for a, s in zip(args, shared, strict=True)
  ]
  if map_name == "vmap":
    run = jax.jit(jax.vmap(fn, in_axes=in_axes, axis_name=AXIS))
    return lambda *args: run(*values(args))
  if map_name == "pmap":
    run = jax.pmap(
      fn, in_axes=in_axes, axis_name=AXIS, devices=jax.devices()[:size]
    )
    return lambda *args: run(*values(args))
  if map_name == "jit_vmap_spmd":
    run = jax.jit(
      jax.vmap(fn, in_axes=in_axes, axis_name=AXIS, spmd_axis_name=AXIS)
    )
    shard = functools.partial(_shard, shared, mesh(size), values)

    def run_in_mesh(*args):
      with jax.set_mesh(mesh(size)):
        return run(*shard(args))

    return run_in_mesh
  if map_name == "plain_jit":
    return _plain_jit(fn, shared, size)
  where = mesh(size, explicit="explicit" in map_name)

  def body(*args):
    own = [
      a if s else jax.tree.map(lambda x: x[0], a)
      for a, s in zip(args, shared, strict=True)
    ]
    return jax.tree.map(lambda x: jnp.asarray(x)[None], fn(*own))

  run = jax.jit(
    jax.shard_map(
      body,
      mesh=where,
      in_specs=tuple(P() if s else P(AXIS) for s in shared),
      out_specs=P(AXIS),
      check_vma="vma" in map_name,
    )
  )
  shard = functools.partial(_shard, shared, where, values)
  return lambda *args: run(*shard(args))


def _plain_jit(fn, shared, size):
  """Runs ``fn`` as the update of a transformation, with no map around it."""

  def update_fn(own, state, params=None, *, whole):
    del params
    own, whole = iter(own), iter(whole)
    return fn(*(next(whole) if s else next(own) for s in shared)), state

  tx = optax_dist.under_jit(
    optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn),
    AXIS,
    mesh=mesh(size),
    own_params=True,
  )

  @jax.jit
  def run(own, whole):
    return tx.update(own, optax.EmptyState(), whole=whole)[0]

  def split(*args):
    own = [a for a, s in zip(args, shared, strict=True) if not s]
    whole = [a.value for a, s in zip(args, shared, strict=True) if s]
    return run(
      *optax_dist.states.place((own, whole), mesh(size), (P(AXIS), P()))
    )

  return split


def _shard(shared, where, values, args):
  return [
    jax.device_put(value, NamedSharding(where, P() if s else P(AXIS)))
    for value, s in zip(values(args), shared, strict=True)
  ]


def run(map_name: str, fn, *args, size: int):
  """Runs ``fn`` on every replica and returns the stacked results, on the host."""
  return jax.tree.map(_on_host, mapped(map_name, fn, args, size)(*args))


def _on_host(x):
  if isinstance(x, jax.core.Tracer):
    return x
  if jnp.issubdtype(x.dtype, jax.dtypes.extended):
    return x  # The indices of sparse updates, which numpy can't hold.
  # JAX can't fetch a sharded array that has no elements.
  return np.asarray(x) if x.size else np.zeros(x.shape, x.dtype)


def stepper(map_name: str, fn, state, size: int):
  """Returns ``fn`` mapped, jitted, with an optimizer state that goes through.

  Args:
    map_name: one of ``NAMES``.
    fn: a function of one replica's ``(state, *own)`` that returns its
      ``(result, state)``.
    state: the state as a whole, made outside of the map.
    size: the number of replicas.

  Returns:
    A function of ``(state, *stacked)`` that returns the stacked results and the
    state as a whole.
  """
  mapper = {"vmap": jax.vmap, "jit_vmap_spmd": jax.vmap, "pmap": jax.pmap}.get(
    map_name
  )
  if mapper is not None:
    kwargs = {"axis_name": AXIS}
    if map_name == "jit_vmap_spmd":
      kwargs["spmd_axis_name"] = AXIS
    if map_name == "pmap":
      kwargs["devices"] = jax.devices()[:size]
    batch = optax_dist.states.state_axes(state)

    def over_replicas(state, args):
      return fn(state, *args)

    run = mapper(
      over_replicas, in_axes=(batch, 0), out_axes=(0, batch), **kwargs
    )
    run = run if map_name == "pmap" else jax.jit(run)
    if map_name != "jit_vmap_spmd":
      return lambda state, *args: _result_on_host(run(state, args))
    place = _placer(mesh(size), optax_dist.states.state_specs(state, AXIS))

    def run_in_mesh(state, *args):
      with jax.set_mesh(mesh(size)):
        return _result_on_host(run(*place(state, args)))

    return run_in_mesh
  if map_name == "plain_jit":
    return _plain_jit_stepper(fn, state, size)
  where = mesh(size, explicit="explicit" in map_name)
  specs = optax_dist.states.state_specs(state, AXIS)

  def body(state, args):
    result, state = fn(state, *jax.tree.map(lambda x: x[0], args))
    return jax.tree.map(lambda x: jnp.asarray(x)[None], result), state

  run = jax.jit(
    jax.shard_map(
      body,
      mesh=where,
      in_specs=(specs, P(AXIS)),
      out_specs=(P(AXIS), specs),
      check_vma="vma" in map_name,
    )
  )

  place = _placer(where, specs)
  return lambda state, *args: _result_on_host(run(*place(state, args)))


def _plain_jit_stepper(fn, state, size):
  def update_fn(own, state, params=None, **extra_args):
    del params, extra_args
    return fn(state, *own)

  tx = optax_dist.under_jit(
    optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn),
    AXIS,
    mesh=mesh(size),
    own_params=True,
  )
  run = jax.jit(lambda state, args: tx.update(args, state))
  place = _placer(mesh(size), optax_dist.states.state_specs(state, AXIS))
  return lambda state, *args: _result_on_host(run(*place(state, args)))


def _placer(where, specs):
  return lambda state, args: optax_dist.states.place(
    (state, args), where, (specs, P(AXIS))
  )


def _result_on_host(result_and_state):
  result, state = result_and_state
  return jax.tree.map(_on_host, result), state
