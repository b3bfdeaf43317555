"""The replicas of a transform: how many there are, and what each holds first."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from optax_dist._internal import axes
from optax_dist._internal.replica_blocks import PerReplica


def in_update(
  user: str,
  names: tuple[axes.AxisName, ...],
  given: int | None,
  argument: str = "num_replicas",
) -> int:
  """Returns the number of replicas along the axes ``names``, bound here.

  Args:
    user: what needs to know, for the message.
    names: of the axes that the replicas lie along.
    given: the number that ``user`` was made with; None for that of the axes.
    argument: what it is called there.

  Raises:
    UnboundAxisError: if an axis is not bound.
    ValueError: if there are not as many as ``given``.
  """
  found = math.prod(axes.check_bound(names, user).values())
  if given not in (None, found):
    raise ValueError(
      f"{user}: `{argument}` is {given}, but there are {found} replicas along"
      f" {names!r}. Leave it out to use the size of the axis."
    )
  return found


def at_init(
  user: str,
  names: tuple[axes.AxisName, ...],
  given: int | None,
  argument: str = "num_replicas",
) -> int:
  """Returns the number of replicas where ``init`` is called, in a map or not.

  The arguments are those of :func:`in_update`.

  Raises:
    ValueError: if it is not known, or contradicts ``given``.
  """
  if axes.bound_axes().keys() & set(names):
    return in_update(user, names, given, argument)
  sizes = dict(jax.sharding.get_abstract_mesh().shape)
  if sizes.keys() >= set(names):
    found = math.prod(sizes[name] for name in names)
    if given not in (None, found):
      raise ValueError(
        f"{user}: `{argument}` is {given}, but there are {found} replicas along"
        f" {names!r} of the mesh."
      )
    return found
  if given is None:
    raise ValueError(
      f"{user}: the number of replicas is not known in `init`. Give"
      f" `{argument}`, or call init inside the map or under jax.set_mesh."
    )
  return given


def start(own: Any, count: int, names: tuple[axes.AxisName, ...]) -> PerReplica:
  """Returns the replicas' part of a state, each starting from ``own``.

  Inside the map a replica makes its own block only.

  Args:
    own: what one replica holds.
    count: how many replicas there are.
    names: of the axes that they lie along.
  """
  inside = axes.bound_axes().keys() >= set(names)
  rows = 1 if inside else count
  stacked = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * rows), own)
  return PerReplica(axes.cast_to_varying(stacked, names) if inside else stacked)


def check_counter(
  user: str, counter: Any, names: tuple[axes.AxisName, ...]
) -> None:
  """Checks that a counter that decides on communication is equal everywhere.

  Raises:
    ValueError: if its type says that it varies over one of ``names``, or if it is
      not a scalar.
  """
  remedy = (
    "Pass the state into the map with in_specs=optax_dist.state_specs(state,"
    " axis_name) for jax.shard_map, or in_axes=optax_dist.state_axes(state) for"
    " jax.vmap and jax.pmap, and out of it in the same way."
  )
  if axes.varying_axes(counter) & set(names):
    raise ValueError(
      f"{user}: the state's counters vary over axis {names!r}, so replicas could"
      f" disagree on when to communicate. {remedy}"
    )
  if jnp.ndim(counter):
    raise ValueError(
      f"{user}: the state's counters have shape {jnp.shape(counter)}, which must"
      f" be (). {remedy}"
    )
