"""The compression interface: replicas aggregate in fewer bytes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from optax_dist._internal import axes


class CompressionState(NamedTuple):
  """The state that one replica keeps between two updates.

  Attributes:
    residual: for each leaf, what was not sent yet (float32, the leaf's shape);
      None without error feedback. It differs between replicas.
    shared: state that is equal on all replicas, such as PowerSGD's factors.
      Like the residual it is in a tree like the updates, or None.
    num_updates: updates so far (int32 scalar, equal on all).
  """

  residual: Any
  shared: Any
  num_updates: jax.Array


class Compression(NamedTuple):
  """A way to aggregate the replicas' updates in fewer bytes.

  Attributes:
    name: name of the method, for messages.
    init: takes a tree like the updates, returns one replica's
      :class:`CompressionState`.
    reduce: takes one replica's updates, its state, and the names of the bound
      axes over the replicas; returns the mean, equal on all, and the next
      state.
    sent: takes a tree like the updates; returns how many bytes a replica sends
      in one update.
    error_feedback: the share of its residual that a replica adds to its next
      update, from 0 to 1; None without error feedback.
    is_mean: whether all get the mean of what each replica has encoded by itself, and
      not a vote, or products with factors that they have in common.
  """

  name: str
  init: Callable[[Any], CompressionState]
  reduce: Callable[
    [Any, CompressionState, tuple[axes.AxisName, ...]],
    tuple[Any, CompressionState],
  ]
  sent: Callable[[Any], int]
  error_feedback: float | None
  is_mean: bool = True


def aggregate(
  compression: Compression,
  updates: Any,
  state: CompressionState,
  names: tuple[axes.AxisName, ...],
) -> tuple[Any, CompressionState]:
  """Calls ``compression.reduce``; keeps how its arguments are sharded.

  A method flattens leaves, which JAX refuses if they are sharded over Explicit
  axes: there the compiler decides how.
  """
  return axes.in_auto(
    lambda updates, state: compression.reduce(updates, state, names),
    (updates, state),
    updates,
    state,
  )


def check_compression(transform_name: str, compression: Any) -> None:
  """Checks the argument ``compression`` of a transform.

  Raises:
    TypeError: if it is neither None nor a compression method.
  """
  if compression is not None and not isinstance(compression, Compression):
    raise TypeError(
      f"{transform_name}: `compression` must be a method of optax_dist.compression,"
      f" such as compression.top_k(0.03), got {compression!r}."
    )
