"""What parameters and gradients must be, told by name where they are not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def check_params(params: Any) -> None:
  """Raises TypeError or ValueError unless all leaves are of floating dtypes."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise TypeError(
        f"params{jax.tree_util.keystr(path)} must be of a floating dtype to "
        f"have a gradient, got {leaf.dtype}."
      )
  if not jax.tree.leaves(params):
    raise ValueError("params must have at least one array, got none.")


def check_grads(grads: Any, template: Any) -> None:
  """Raises ValueError unless the gradient is like the parameters.

  Args:
    grads: what the training loop gave.
    template: a tree of `jax.ShapeDtypeStruct`.
  """
  leaves, have = jax.tree.flatten(grads)
  likes, want = jax.tree.flatten(template)
  if have != want:  # type: ignore[operator]
    raise ValueError(
      f"grads must have the structure of the parameters, {want}, got {have}."
    )
  for index, (like, grad) in enumerate(zip(likes, leaves, strict=True)):
    if (grad.shape, grad.dtype) != (like.shape, like.dtype):
      path, _ = jax.tree_util.tree_leaves_with_path(template)[index]
      raise ValueError(
        f"grads{jax.tree_util.keystr(path)} must be {like.dtype}"
        f"{list(like.shape)}, as the parameter, got "
        f"{grad.dtype}{list(grad.shape)}."
      )
