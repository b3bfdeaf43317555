"""Named axes in each map: size, tracking, and errors.

With it a transform takes the same step in every map, and refuses an unbound axis by
name.

JAX binds axis names in several ways: ``vmap(axis_name=)`` batches on one device,
``pmap`` and ``shard_map`` run one program per device, and ``shard_map`` with
``check_vma=True`` also *tracks*, in the type of every value, the axes over which
it varies.

All code in this library that depends on such a difference, or on a difference
between JAX versions, uses this module.
"""

import numbers
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core as _core  # No public way to list the bound axes.
from jax.sharding import NamedSharding

AxisName: TypeAlias = Hashable
AxisNames: TypeAlias = AxisName | tuple[AxisName, ...] | list[AxisName]


class UnboundAxisError(NameError):
  """An axis name is used outside of every map that binds it."""


def canonical_names(
  axis_name: AxisNames, argument: str = "axis_name"
) -> tuple[AxisName, ...]:
  """Returns ``axis_name`` as a non-empty tuple of distinct names.

  Args:
    axis_name: a name, or a list or tuple of names.
    argument: what the caller calls it, for messages.

  Returns:
    A tuple of names, in the given order.

  Raises:
    ValueError: if there is no name, or one is repeated, or something else.

  Example:
    >>> canonical_names("data"), canonical_names(["data", "model"])
    (('data',), ('data', 'model'))
  """
  names = (
    tuple(axis_name) if isinstance(axis_name, list | tuple) else (axis_name,)
  )
  if not names:
    raise ValueError(
      f"`{argument}` must hold at least one axis name, got none."
    )
  if not all(map(_is_name, names)):
    raise ValueError(
      f"`{argument}` must be an axis name, or a list or tuple of axis names, got"
      f" {axis_name!r:.100}."
    )
  if len(set(names)) != len(names):
    raise ValueError(f"`{argument}` must not repeat a name, got {axis_name!r}.")
  return names


def _is_name(x: Any) -> bool:
  """Whether ``x`` can be an axis name: a string, or any object that stands for one.

  JAX's collectives take a number for the position of an axis, so that a mean over
  the replicas would be one over the elements of an array.
  """
  if x is None or isinstance(x, str):
    return x is not None
  others = numbers.Number | np.generic | Iterable | Callable
  return isinstance(x, Hashable) and not isinstance(x, others)


def levels_of(
  inner_axes: Any, argument: str = "inner_axes"
) -> list[tuple[AxisName, ...]]:
  """Returns the names of each entry of a list or tuple of axis names.

  Raises:
    ValueError: if it is something else; a single name would be taken apart.
  """
  if not isinstance(inner_axes, list | tuple):
    raise ValueError(
      f"`{argument}` must be a list or tuple, with an axis name or names for each"
      f" level of replicas, got {inner_axes!r:.100}."
    )
  return [canonical_names(names, argument) for names in inner_axes]


def bound_axes() -> dict[AxisName, int]:
  """Returns the size of every axis that is bound at this point of the trace."""
  return dict(_core.get_axis_env().axis_sizes)


def check_bound(
  names: Iterable[AxisName], transform_name: str, remedy: str = ""
) -> dict[AxisName, int]:
  """Returns the sizes of the axes ``names``, if all of them are bound.

  Args:
    names: the axis names that ``transform_name`` was built with.
    transform_name: the transform that needs the axes, for the message:
      ``"cross_shard"``.
    remedy: the message's advice for plain ``jax.jit``, unless ``transform_name`` is
      simply unnecessary there.

  Returns:
    A dictionary from each name to its size.

  Raises:
    UnboundAxisError: if a name is not bound; lists the names that are.
  """
  names = tuple(names)
  bound = bound_axes()
  missing = [name for name in names if name not in bound]
  if missing:
    what = ", ".join(map(repr, missing))
    if bound:
      known = "the axes bound here are " + ", ".join(
        f"{name!r} (size {size})" for name, size in bound.items()
      )
    else:
      known = "no axis is bound here"
    under_jit = (
      "Under plain jax.jit with sharded arrays the gradient is global already, and"
      f" {transform_name} is not needed."
    )
    raise UnboundAxisError(
      f"{transform_name}: unbound axis name {what}; {known}. Call it inside"
      " jax.shard_map, jax.pmap or jax.vmap(..., axis_name=...) over that axis."
      f" ({remedy or under_jit})"
    )
  return {name: bound[name] for name in names}


def is_tracked(name: AxisName) -> bool:
  """Whether types indicate which values vary over the (bound) axis ``name``.

  True under ``shard_map(check_vma=True)``, False in every other map. The index
  along the axis varies over it by definition, so its type indicates it.
  """
  return name in varying_axes(jax.lax.axis_index(name))


def varying_axes(x: Any) -> frozenset[AxisName]:
  """Returns the tracked axes over which ``x``, a value or its type, varies."""
  is_type = isinstance(x, jax.ShapeDtypeStruct | jax.core.AbstractValue)
  aval = x if is_type else jax.typeof(x)
  manual = getattr(aval, "manual_axis_type", None)
  if manual is not None:
    return frozenset(manual.varying)
  return frozenset(getattr(aval, "vma", None) or ())


def known_to_vary(x: Any) -> frozenset[AxisName]:
  """Returns the axes over which the type of ``x`` varies, or ``vmap`` batches it.

  Under ``pmap``, with ``check_vma=False`` and in a function that is traced separately
  inside of ``vmap``, JAX does not show that a value varies.
  """
  names = set(varying_axes(x)) if hasattr(x, "dtype") else set()
  # JAX has no public way to ask. vmap and grad wrap the values that they trace.
  while isinstance(x, jax.core.Tracer):
    if getattr(x, "batch_dim", None) is not None:
      names.add(x._trace.axis_data.name)
    x = getattr(x, "primal", getattr(x, "val", None))
  return frozenset(names)


def tracked_axes(names: Iterable[AxisName]) -> frozenset[AxisName]:
  """Returns the tracked axes among the given (bound) axes."""
  return frozenset(name for name in names if is_tracked(name))


def all_varying_axes(tree: Any) -> frozenset[AxisName]:
  """Returns the tracked axes over which any array of ``tree`` varies."""
  return frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))


def listed(names: Iterable[AxisName]) -> str:
  """Returns the names of axes, in order, for messages."""
  return ", ".join(sorted(map(repr, names)))


def unreduced_axes(x: Any) -> frozenset[AxisName]:
  """Returns the tracked axes over which ``x`` is still to be summed."""
  manual = [
    getattr(jax.typeof(leaf), "manual_axis_type", None)
    for leaf in jax.tree.leaves(x)
  ]
  return frozenset().union(*(m.unreduced for m in manual if m is not None))


def cast_to_varying(tree: Any, names: Iterable[AxisName]) -> Any:
  """Casts every array to vary over the tracked axes among ``names``.

  If nothing is tracked, every value already counts as varying, and the tree is
  returned unchanged. No data is moved.

  Args:
    tree: a pytree of arrays.
    names: names of bound axes.

  Returns:
    The same values; under ``shard_map(check_vma=True)``, typed as varying.
  """
  tracked = tuple(name for name in names if is_tracked(name))
  if not tracked:
    return tree

  return jax.tree.map(lambda x: _cast(x, tracked), tree)


def _cast(x: Any, names: Iterable[AxisName]) -> Any:
  missing = tuple(name for name in names if name not in varying_axes(x))
  return jax.lax.pcast(x, missing, to="varying") if missing else x


def when(predicate: Any, new: Callable[[], Any], old: Callable[[], Any]) -> Any:
  """Returns ``new()`` if ``predicate`` is true, and ``old()`` otherwise.

  Unlike ``jax.lax.cond``, it accepts branches that vary over different tracked
  axes, such as zeros and a gradient: each result is cast to vary over the axes of
  both.

  Args:
    predicate: a boolean scalar, equal on all replicas if a branch communicates;
      or the Python value True, for always.
    new: returns the result if ``predicate`` is true.
    old: returns the result otherwise, with the same structure and shapes. It has
      the dtypes to which ``new`` is cast.

  Returns:
    The chosen result.
  """
  if predicate is True:
    return new()
  types = jax.eval_shape(old)
  # Only with tracked axes, since the types take a second trace of everything.
  over = jax.tree.map(lambda _: (), types)
  if any(map(is_tracked, bound_axes())):
    over = jax.tree.map(
      lambda a, b: tuple(sorted(varying_axes(a) | varying_axes(b), key=str)),
      types,
      jax.eval_shape(new),
    )

  def cast(x: Any, like: Any, over: tuple[AxisName, ...]) -> Any:
    return _cast(with_dtype(x, like.dtype), over)

  return jax.lax.cond(
    predicate,
    lambda: jax.tree.map(cast, new(), types, over),
    lambda: jax.tree.map(cast, old(), types, over),
  )


def with_dtype(x: Any, dtype: Any) -> jax.Array:
  """Returns an array of a dtype, which may be that of random keys."""
  x = jnp.asarray(x)
  return x if x.dtype == dtype else x.astype(dtype)


def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
  """Returns zeros of a shape and dtype, sharded as ``like`` over Explicit axes."""
  sharding = like.sharding
  spec = getattr(sharding, "spec", ())
  if all(part is None for part in spec):
    sharding = None
  return jnp.zeros(like.shape, like.dtype, out_sharding=sharding)


def names_in(spec: Iterable[Any]) -> list[AxisName]:
  """Returns the mesh axes that a spec shards over, in order."""
  names: list[AxisName] = []
  for entry in spec:
    if entry is not None:
      names += entry if isinstance(entry, tuple) else (entry,)
  return names


def in_auto(fun: Callable[..., Any], like: Any, *args: Any) -> Any:
  """Returns ``fun(*args)``, in which the compiler shards over Explicit axes.

  Over these, JAX refuses to flatten, slice or multiply arrays if it would have to
  decide how the result is sharded. Over Auto axes the compiler decides.

  Args:
    fun: a function of pytrees of arrays. Its other arrays must not be on the mesh.
    like: a pytree like the result, of arrays (or shardings) that it is sharded as.
    *args: its arguments.

  Returns:
    The result. If nothing is sharded over an Explicit axis, this is a call.
  """
  used = [sharding_of(x) for x in jax.tree.leaves((args, like))]
  mesh = next((s.mesh for s in used if any(s.spec)), None)
  if mesh is None:
    return fun(*args)
  to = jax.tree.map(sharding_of, like)
  on_mesh = lambda s: s if s.mesh == mesh else NamedSharding(mesh, s.spec)
  call = jax.sharding.auto_axes(
    fun, axes=mesh.explicit_axes, out_sharding=jax.tree.map(on_mesh, to)
  )
  # JAX can't change the types of axes eagerly inside of a map.
  return jax.jit(call)(*args)


def sharding_of(x: Any) -> NamedSharding:
  """Returns the sharding in the type of ``x``, or ``x`` if it is a sharding."""
  return x if isinstance(x, NamedSharding) else jax.typeof(x).sharding


def mesh_axes() -> frozenset[AxisName]:
  """Returns the bound axes that are mesh axes, with one program per device.

  An axis of ``vmap`` is not one of them, even if ``spmd_axis_name`` spreads it
  over a mesh: then the compiler inserts the communication, not the program.
  """
  return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def platform() -> str:
  """Returns the platform that this trace is for: "cpu", "gpu", "tpu", ..."""
  mesh = jax.sharding.get_abstract_mesh()
  device = getattr(mesh, "abstract_device", None)
  return getattr(device, "platform", None) or jax.default_backend()
