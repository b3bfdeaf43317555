"""Checks of parameters and gradients; errors name the leaf that is wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_dist.coordinator._internal.fingerprints import words_of

_REMEDY = (
  "Give the tree of parameters alone: nnx.state(model, nnx.Param) of a flax nnx"
  " module, variables['params'] of a linen one, eqx.filter(model,"
  " eqx.is_inexact_array) of an equinox one"
)


def as_params(params: Any) -> Any:
  """The parameters as a tree of JAX arrays.

  Raises:
    TypeError: a leaf is not an array of a floating dtype.
    ValueError: there are no leaves, no numbers in them, or NaN.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  if not leaves:
    raise ValueError("params must have at least one array, got none.")
  for path, leaf in leaves:
    name = f"params{jax.tree_util.keystr(path)}"
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int):
      raise TypeError(
        f"{name} must be an array, got {type(leaf).__name__}. {_REMEDY}."
      )
    # Checked here, since JAX's error for an array of objects or texts names no leaf.
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.asarray(leaf).dtype
    if not jnp.issubdtype(dtype, jnp.floating):
      raise TypeError(
        f"{name} must be of a floating dtype to have a gradient, got {dtype}."
        f" {_REMEDY}."
      )
  if not any(np.size(leaf) for _, leaf in leaves):
    raise ValueError("params must have at least one number, got empty arrays.")
  params = jax.tree.map(lambda x: jnp.asarray(own(x)), params)
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if jnp.isnan(leaf).any():
      raise ValueError(
        f"params{jax.tree_util.keystr(path)} must have no NaN: the parameters of the"
        " first replica are those of all. Initialize it, or resume from an earlier"
        " checkpoint."
      )
  return params


def own(array: Any) -> Any:
  """An array that the caller can't change: NumPy arrays are copied.

  JAX does not always copy NumPy arrays, and a program may write into them before JAX
  has read them.
  """
  return np.array(array) if isinstance(array, np.ndarray) else array


def placed_like(array: Any, leaf: jax.Array) -> jax.Array:
  """Puts an array on a leaf's devices, committed to them only if the leaf is.

  Otherwise a program that was compiled for the leaf would be compiled again for the
  array.
  """
  return jax.device_put(array, leaf.sharding if leaf.committed else None)


def leaves_of(tree: Any) -> list[Any]:
  """The leaves of a tree; random keys as their words."""
  return [words_of(leaf)[0] for leaf in jax.tree.leaves(tree)]


def restorer(leaf: Any) -> Callable[[Any], Any]:
  """A function that puts arrays on the devices of a leaf, without keeping the leaf.

  The arrays' memory must not be written to any more. The words of a random key become
  a key.
  """
  if not isinstance(leaf, jax.Array):
    return lambda array: array
  sharding = leaf.sharding if leaf.committed else None
  _, kind = words_of(leaf)
  if kind is None:
    return lambda array: jax.device_put(array, sharding)
  wrap = functools.partial(jax.random.wrap_key_data, impl=kind)
  return lambda array: jax.device_put(wrap(jnp.array(array)), sharding)


def widened(tree: Any, like: Any) -> Any:
  """A tree whose numbers have the dtypes of another, where these are wider."""

  def widen(x: Any, y: Any) -> Any:
    kinds = jnp.result_type(x), y.dtype
    wider = all(jnp.issubdtype(kind, jnp.floating) for kind in kinds)
    if wider and jnp.finfo(kinds[0]).bits < jnp.finfo(kinds[1]).bits:
      return jnp.asarray(x, y.dtype)
    return x

  if jax.tree.structure(tree) != jax.tree.structure(like):  # type: ignore[operator]
    return tree  # `check_like` names the difference.
  return jax.tree.map(widen, tree, like)


def soundness(tree: Any) -> Callable[[Any], bool]:
  """A function which checks that all leaves that are finite in a tree still are.

  Example:
    >>> is_sound = soundness({"best": jnp.inf, "mean": jnp.zeros(2)})
    >>> is_sound({"best": jnp.inf, "mean": jnp.ones(2)})
    True
    >>> is_sound({"best": jnp.inf, "mean": jnp.array([0.0, jnp.nan])})
    False
  """
  finite = jax.jit(lambda leaves: [jnp.isfinite(x).all() for x in leaves])
  floats = lambda tree: [
    x
    for x in jax.tree.leaves(tree)
    if jnp.issubdtype(jnp.result_type(x), jnp.floating)
  ]
  before = finite(floats(tree))
  if not before:
    return lambda other: True

  def is_sound(other: Any) -> bool:
    after = finite(floats(other))
    return all(x or not y for x, y in zip(after, before, strict=True))

  return is_sound


def check_like(name: str, tree: Any, wanted: Any) -> None:
  """Checks that a tree has the leaves of another, with their shapes and dtypes.

  Raises:
    ValueError: they differ; the message names the first difference.
  """
  have, want = described(tree), described(wanted)
  if have == want:
    return
  for path in [*want, *have]:
    if have.get(path) != want.get(path):
      raise ValueError(
        f"{name}{path} must be {want.get(path, 'left out')}, got"
        f" {have.get(path, 'none')}. It must be like the one of this optimizer and"
        " these parameters; leave it out to start afresh."
      )


def described(tree: Any) -> dict[str, str]:
  """Shape and dtype of each leaf, by its path.

  Example:
    >>> described({"w": np.zeros((2, 3), np.float32)})
    {"['w']": 'float32[2, 3]'}
  """
  return {
    jax.tree_util.keystr(path): (
      f"{jnp.result_type(x)}{list(jnp.shape(x))}"
      if hasattr(x, "dtype") or isinstance(x, int | float | complex)
      else type(x).__name__
    )
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def check_alive(tree: Any, error: BaseException) -> None:
  """Raises a clear error if arrays were donated to another program.

  Args:
    tree: arrays that all replicas share.
    error: the error from using them.

  Raises:
    ValueError: an array is deleted.
  """
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    if isinstance(x, jax.Array) and x.is_deleted():
      raise ValueError(
        f"The replica's array {jax.tree_util.keystr(path)} has been donated or"
        " deleted, and the next update needs it. Don't donate replica.params"
        " (donate_argnums), or donate a copy: jax.tree.map(jnp.copy,"
        " replica.params)."
      ) from error


def is_local(params: Any) -> bool:
  """Whether this process holds all of the parameters."""
  return all(x.is_fully_addressable for x in jax.tree.leaves(params))


class Template:
  """The structure, shapes and dtypes that gradients must have."""

  def __init__(self, params: Any):
    paths_and_leaves, self._tree = jax.tree_util.tree_flatten_with_path(params)
    self._names = [jax.tree_util.keystr(path) for path, _ in paths_and_leaves]
    self._keys = _keys(paths_and_leaves)
    self._leaves = [
      jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in paths_and_leaves
    ]
    self._is_local = is_local(params)
    # For arrays that span several processes; gradients get the same shardings.
    self._shardings = (
      [] if self._is_local else [x.sharding for _, x in paths_and_leaves]
    )
    self._reshard: Any = None

  def fit(self, grads: Any) -> Any:
    """A gradient as a tree with the structure of the parameters.

    Other containers with the same keys are accepted, such as the `nnx.State` that
    `nnx.grad` returns for a module.

    Raises:
      ValueError: it does not match the parameters.
    """
    leaves, tree = jax.tree_util.tree_flatten(grads)
    if tree != self._tree:  # type: ignore[operator]
      paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(grads)
      if _keys(paths_and_leaves) != self._keys:
        names = [jax.tree_util.keystr(path) for path, _ in paths_and_leaves]
        raise ValueError(
          "grads must have the structure of the parameters,"
          f" {_shown(self._names)}, got {_shown(names)}."
        )
    for name, like, grad in zip(self._names, self._leaves, leaves, strict=True):
      shape, dtype = getattr(grad, "shape", ()), getattr(grad, "dtype", None)
      if (shape, dtype) != (like.shape, like.dtype):
        raise ValueError(
          f"grads{name} must be {like.dtype}{list(like.shape)}, as the"
          f" parameter, got {dtype or type(grad).__name__}{list(shape)}."
        )
    # Copied, since they may become part of a sum that is submitted later.
    owned = [own(leaf) for leaf in leaves]
    grads = jax.tree_util.tree_unflatten(self._tree, owned)
    return grads if self._is_local else self._place(grads)

  def _place(self, grads: Any) -> Any:
    """A gradient with the shardings of the parameters."""
    leaves = jax.tree.leaves(grads)
    if all(
      isinstance(grad, jax.Array)
      and grad.sharding.is_equivalent_to(sharding, grad.ndim)
      for grad, sharding in zip(leaves, self._shardings, strict=True)
    ):
      return grads
    if self._reshard is None:
      shardings = jax.tree.unflatten(self._tree, self._shardings)
      self._reshard = jax.jit(lambda tree: tree, out_shardings=shardings)
    return self._reshard(grads)


def _keys(paths_and_leaves: Any) -> list[str]:
  """Key paths in which an attribute and a key of the same name are alike."""
  return [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, _ in paths_and_leaves
  ]


def _shown(names: list[str]) -> str:
  """Leaves by their paths; the path of a tree that is one array is empty."""
  if names == [""]:
    return "one array"
  return f"{', '.join(names):.500}" or "no array"
