"""The replicas of a transform: their number, and their initial states.

A user calls ``init`` inside or outside of the map, on any mesh, and each replica's part
of the state is created on its own devices.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_dist._internal import axes
from optax_dist._internal.replica_blocks import PerReplica


def in_update(
  user: str,
  names: tuple[axes.AxisName, ...],
  given: int | None,
  argument: str = "num_replicas",
) -> int:
  """Returns the number of replicas along the bound axes ``names``.

  Args:
    user: the transform, for the message.
    names: names of the axes over the replicas.
    given: the number that ``user`` was created with; None for that of the axes.
    argument: the name of that argument.

  Raises:
    UnboundAxisError: if an axis is not bound.
    ValueError: if the number differs from ``given``.
  """
  sizes = axes.check_bound(names, user)
  return _count(user, names, sizes, given, argument)


def at_init(
  user: str,
  names: tuple[axes.AxisName, ...],
  given: int | None,
  argument: str = "num_replicas",
) -> int:
  """Returns the number of replicas when ``init`` is called, in a map or not.

  The arguments are those of :func:`in_update`.

  Raises:
    ValueError: if it is unknown, or contradicts ``given``.
  """
  if axes.bound_axes().keys() & set(names):
    return in_update(user, names, given, argument)
  sizes = dict(jax.sharding.get_abstract_mesh().shape)
  if sizes.keys() >= set(names):
    return _count(user, names, sizes, given, argument)
  if given is None:
    raise ValueError(
      f"{user}: the number of replicas is not known in `init`. Give"
      f" `{argument}`, or call init inside the map or under jax.set_mesh."
    )
  return given


def _count(
  user: str,
  names: tuple[axes.AxisName, ...],
  sizes: dict[axes.AxisName, int],
  given: int | None,
  argument: str,
) -> int:
  count = math.prod(sizes[name] for name in names)
  if given not in (None, count):
    raise ValueError(
      f"{user}: `{argument}` is {given}, but there are {count} replicas along"
      f" {names!r}. Leave it out to use the size of the axis."
    )
  return count


def start(own: Any, count: int, names: tuple[axes.AxisName, ...]) -> PerReplica:
  """Returns the replicas' part of a state, each starting from ``own``.

  Inside the map a replica creates only its own block. Outside of it, under
  ``jax.set_mesh`` or if ``own`` is on a mesh already, each replica's block is created
  on its own devices. Random keys are made different: replicas must not draw the same
  noise.

  Args:
    own: the state of one replica.
    count: the number of replicas.
    names: names of the axes over the replicas.
  """
  own = jax.tree.map(jnp.asarray, own)
  if axes.bound_axes().keys() >= set(names):
    index: Any = 0
    for name in names:
      index = index * axes.axes_size([name]) + jax.lax.axis_index(name)
    blocks = jax.tree.map(lambda x: _of_replica(x, index)[None], own)
    return PerReplica(axes.cast_to_varying(blocks, names))

  def stack(own):
    return jax.tree.map(lambda x: _of_replicas(x, count), own)

  mesh = _mesh(own, names)
  if mesh is None:
    return PerReplica(stack(own))
  specs = jax.tree.map(lambda x: _spec(x, mesh, names), own)
  if isinstance(mesh, jax.sharding.Mesh):
    specs = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  if all(kind == AxisType.Explicit for kind in mesh.axis_types):
    blocks = jax.jit(stack, out_shardings=specs)(own)
    return PerReplica(jax.sharding.reshard(blocks, specs))
  if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(own)):
    # The compiler chooses the sharding of each replica's part.
    free = jax.tree.map(
      lambda x: PartitionSpec(
        _entry(names), *[PartitionSpec.UNCONSTRAINED] * x.ndim
      ),
      own,
    )
    return PerReplica(jax.lax.with_sharding_constraint(stack(own), free))
  return PerReplica(jax.jit(stack, out_shardings=specs)(own))


def _mesh(own: Any, names: tuple[axes.AxisName, ...]) -> Any:
  """Returns the mesh of ``jax.set_mesh``, or of the arrays, that has ``names``."""
  arrays = [
    x for x in jax.tree.leaves(own) if not isinstance(x, jax.core.Tracer)
  ]
  shardings = [x.sharding for x in arrays]
  meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
  for mesh in (jax.sharding.get_abstract_mesh(), *meshes):
    if set(names) <= set(mesh.axis_names):
      return mesh
  return None


def _of_replica(x: jax.Array, index: Any) -> jax.Array:
  return jax.random.fold_in(x, index) if _is_key(x) else x


def _of_replicas(x: jax.Array, count: int) -> jax.Array:
  if _is_key(x):
    return jnp.stack([_of_replica(x, i) for i in range(count)])
  return jnp.broadcast_to(x[None], (count, *x.shape))


def _is_key(x: jax.Array) -> bool:
  return not x.ndim and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _spec(x: jax.Array, mesh: Any, names: tuple[axes.AxisName, ...]):
  """Puts each replica on its own devices, sharded there like ``x``."""
  rest: Any = ()
  sharding = getattr(jax.typeof(x), "sharding", None)
  if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
    sharding = x.sharding
  if isinstance(sharding, NamedSharding):
    of_x = sharding.mesh
    if dict(of_x.shape) == dict(mesh.shape) and not _uses(sharding.spec, names):
      rest = sharding.spec
  return PartitionSpec(_entry(names), *rest)


def _entry(names: tuple[axes.AxisName, ...]) -> Any:
  return names if len(names) > 1 else names[0]


def _uses(spec: Any, names: tuple[axes.AxisName, ...]) -> bool:
  used = [part if isinstance(part, tuple) else (part,) for part in spec]
  return any(name in names for part in used for name in part)


def check_counter(
  user: str, counter: Any, names: tuple[axes.AxisName, ...]
) -> None:
  """Checks that a counter that decides on communication is equal everywhere.

  Raises:
    ValueError: if its type says that it varies over one of ``names``, or if it
      is not a scalar.
  """
  remedy = (
    "Pass the state into the map with in_specs=optax_dist.states.state_specs(state,"
    " axis_name) for jax.shard_map, or in_axes=optax_dist.states.state_axes(state) for"
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
