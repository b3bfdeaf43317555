"""Gradient clipping as in the legacy Keras optimizers.

``clipvalue``, ``clipnorm`` and ``global_clipnorm`` are arguments of all their
classes. Sparse gradients are clipped by their values as given: TensorFlow does
not sum repeated indices before it clips.
"""

import jax.numpy as jnp
import optax

from optax_dist.optimizers._internal import complex_numbers, hyperparameters
from optax_dist.sparse import indexed_slices, rows


def clipped(
  inner: optax.GradientTransformation,
  *,
  clipnorm: hyperparameters.Scalar | None = None,
  clipvalue: hyperparameters.Scalar | None = None,
  global_clipnorm: hyperparameters.Scalar | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Clips the gradients of a transformation, first by value, then by norm.

  Args:
    inner: The transformation.
    clipnorm: Largest norm of the gradient of one leaf.
    clipvalue: Largest magnitude of an element of a gradient.
    global_clipnorm: Largest norm of all gradients together. A non-finite global
      norm makes all of them NaN, as in TensorFlow.

  Returns:
    A transformation with the state of ``inner``; ``inner`` itself if there is
    nothing to clip.

  Raises:
    TypeError: If an argument is not a number.
    ValueError: If an argument is not finite or negative, or both norms are
      given.

  Source: ``tf_keras.optimizers.legacy``, ``tf.clip_by_norm`` and
  ``tf.clip_by_global_norm``.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = clipped(optax.sgd(1.0), clipvalue=0.5)
    >>> grads = jnp.array([0.25, 2.0])
    >>> optimizer.update(grads, optimizer.init(grads))[0].tolist()
    [-0.25, -0.5]
  """
  inner = optax.with_extra_args_support(inner)
  limits = {
    "clipnorm": clipnorm,
    "clipvalue": clipvalue,
    "global_clipnorm": global_clipnorm,
  }
  limits = {name: value for name, value in limits.items() if value is not None}
  hyperparameters.check_not_negative(**limits)
  if clipnorm is not None and global_clipnorm is not None:
    raise ValueError(
      "clipnorm and global_clipnorm must not both be given, got"
      f" {clipnorm} and {global_clipnorm}"
    )
  if not limits:
    return inner

  def clip_by_value(values):
    if jnp.iscomplexobj(values):
      raise TypeError(
        "clipvalue has no meaning for complex gradients, got one of"
        f" {values.dtype}: clip by norm"
      )
    limit = hyperparameters.cast(clipvalue, values.dtype)
    return jnp.clip(values, -limit, limit)

  def clip_by_norm(values):
    limit = hyperparameters.cast(clipnorm, values.dtype)
    norm = jnp.sqrt(jnp.sum(complex_numbers.abs_square(values)))
    return values * limit / jnp.maximum(norm, limit)

  def clip_by_global_norm(updates):
    leaves, _ = rows.flatten_gradients(updates)
    leaves = [indexed_slices.values_of(x) for x in leaves if x is not None]
    wide = jnp.float32
    if any(hyperparameters.wide_dtype(x.dtype) == jnp.float64 for x in leaves):
      wide = jnp.float64
    norm = jnp.sqrt(
      sum(
        jnp.sum(jnp.square(x.astype(wide)))
        for leaf in leaves
        for x in ((leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,))
      )
    )
    limit = jnp.asarray(global_clipnorm, wide)
    scale = limit * jnp.minimum(1 / norm, 1 / limit)
    scale = jnp.where(jnp.isfinite(norm), scale, jnp.nan)
    return indexed_slices.map_values(
      lambda values: values * scale.astype(values.dtype), updates
    )

  def update_fn(updates, state, params=None, **extra_args):
    if clipvalue is not None:
      updates = indexed_slices.map_values(clip_by_value, updates)
    if clipnorm is not None:
      updates = indexed_slices.map_values(clip_by_norm, updates)
    if global_clipnorm is not None:
      updates = clip_by_global_norm(updates)
    return inner.update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(inner.init, update_fn)
