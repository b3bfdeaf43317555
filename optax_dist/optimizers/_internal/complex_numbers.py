"""Complex parameters: squares are those of the magnitude, or there is no rule.

TensorFlow 1 has no optimizer for complex variables. Where a rule squares
gradients, the square of the magnitude is the one that makes sense, as in optax
(and in Keras's kernels): a step then turns with the gradient. A rule that takes
signs, compares numbers or adds up something else than squares refuses.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist.sparse.indexed_slices import is_indexed_slices


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
  """Refuses complex parameters and gradients.

  Args:
    name: The optimizer's name, for the message.
    inner: The transformation.

  Returns:
    The transformation; its ``init`` and ``update`` raise a ``TypeError`` where
    a leaf is complex.
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
  # A leaf of a tree that was mapped over, such as a mask, may be anything.
  return getattr(leaf, "dtype", None) or jnp.result_type(type(leaf))
