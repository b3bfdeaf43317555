"""Models that the processes of a run train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class Model(NamedTuple):
  """A model to train.

  Attributes:
    opt: the optimizer.
    params: the initial parameters.
    gradient: of parameters; a number that differs between replicas and steps;
      and the samples or the slot, if there are any.
  """

  opt: optax.GradientTransformation
  params: Any
  gradient: Callable[[Any, int, Any], Any]


def flat(width: int = 600) -> Model:
  """A vector of some numbers, and a short one."""
  params = {
    "w": np.linspace(-1.0, 1.0, width, dtype=np.float32),
    "b": np.zeros(7, np.float32),
  }

  @jax.jit
  @jax.grad
  def gradient(p, x):
    return jnp.sum(jnp.sin(p["w"] * x) ** 2) + jnp.sum((p["b"] - x) ** 2)

  return Model(
    optax.adam(0.01),
    params,
    lambda params, number, _: gradient(params, 0.1 + 0.01 * number),
  )


def sharded(width: int = 60) -> Model:
  """Sharded over the devices of all processes of a replica.

  Its gradient and update need collectives among them (gloo, on loopback).
  """
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
  specs = {"b": jax.P(), "w": jax.P("fsdp", None)}
  rows = 2 * mesh.size
  values = {
    "b": np.linspace(-1.0, 1.0, 70, dtype=np.float32),
    # All shards differ.
    "w": np.linspace(0.5, 1.5, rows * width, dtype=np.float32).reshape(
      rows, width
    ),
  }

  def place(name: str) -> jax.Array:
    value = values[name]
    where = jax.NamedSharding(mesh, specs[name])
    return jax.make_array_from_callback(value.shape, where, value.__getitem__)

  @jax.jit
  def gradient(params, x):
    # The total is a collective over all processes of the replica.
    total = jnp.sum(params["w"]) / params["w"].size
    return jax.tree.map(lambda p: 0.1 * p + jnp.sin(x + p + total), params)

  return Model(
    # So is the clipped norm.
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    {name: place(name) for name in values},
    lambda params, number, _: gradient(params, np.float32(number)),
  )
