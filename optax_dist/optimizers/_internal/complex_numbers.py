"""Support for complex parameters: squared magnitudes, or an error.

TensorFlow 1 has no optimizers for complex variables. If a rule squares
gradients, the squared magnitude is the meaningful choice, as in optax (and in
Keras's kernels): a step is then equivariant to rotations of the gradient. Rules
that take signs, compare numbers or accumulate anything other than squares raise
an error.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal.indexed_slices import is_indexed_slices


def abs_square(x: jax.Array) -> jax.Array:
  """Returns ``x`` times its conjugate, in the dtype of ``x``.

  Example:
    >>> abs_square(jnp.array([3 + 4j, -2]))
    Array([25.+0.j,  4.+0.j], dtype=complex64)
  """
  if not jnp.iscomplexobj(x):
    return jnp.square(x)
  return (jnp.square(x.real) + jnp.square(x.imag)).astype(x.dtype)


def real_only(
  name: str, inner: optax.GradientTransformationExtraArgs
) -> optax.GradientTransformationExtraArgs:
  """Rejects complex parameters and gradients.

  Args:
    name: The optimizer's name, for the message.
    inner: The transformation.

  Returns:
    The transformation; its ``init`` and ``update`` raise a ``TypeError`` if a
    leaf is complex.
  """

  def check(tree):
    leaves = jax.tree_util.tree_leaves_with_path(
      tree, is_leaf=is_indexed_slices
    )
    for path, leaf in leaves:
      dtype = _dtype(leaf)
      if jnp.issubdtype(dtype, jnp.complexfloating):
        where = jax.tree_util.keystr(path) or "the leaf"
        raise TypeError(
          f"{name} has no rule for complex numbers, as in TensorFlow, but {where}"
          f" is {dtype}. Update the real and the imaginary part with"
          f" optax.contrib.split_real_and_imaginary({name}(...))."
        )

  def init_fn(params):
    check(params)
    return inner.init(params)

  def update_fn(updates, state, params=None, **extra_args):
    check(updates)
    return inner.update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _dtype(leaf: Any) -> Any:
  # A leaf of another tree that is mapped over, such as a mask, may be anything.
  return getattr(leaf, "dtype", None) or jnp.result_type(type(leaf))
