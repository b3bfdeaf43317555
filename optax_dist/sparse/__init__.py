"""Sparse gradients of embedding tables, and how to use optax with them."""

from optax_dist._internal.indexed_slices import (
  IndexedSlices,
  apply_updates,
  is_indexed_slices,
  lookup_value_and_grad,
  map_values,
  sum_duplicates,
)
from optax_dist.sparse.rows import row_wise, to_dense

__all__ = [
  "IndexedSlices",
  "apply_updates",
  "is_indexed_slices",
  "lookup_value_and_grad",
  "map_values",
  "row_wise",
  "sum_duplicates",
  "to_dense",
]
