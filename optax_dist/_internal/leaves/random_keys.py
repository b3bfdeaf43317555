"""Random keys among the leaves of a tree."""

from typing import Any

import jax
import jax.numpy as jnp

#: Like JAX's, but for an array of random keys, of any shape.
fold_in = jnp.vectorize(jax.random.fold_in, excluded={1})


def is_key(x: Any) -> bool:
  """Whether an array holds random keys."""
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
