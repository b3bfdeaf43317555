"""A replica's model: its initial states, and the update."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_dist.coordinator import strategies
from optax_dist.coordinator.aggregation import layout, means
from optax_dist.coordinator.runtime import trees, update
from optax_dist.coordinator.runtime.processes import Parts, Processes
from optax_dist.coordinator.strategies import hyperparams


class Model(NamedTuple):
  """A model before its first step; made by `prepare`.

  Attributes:
    strategy: what replicas share, keep and send.
    params: the initial parameters.
    start: the initial state that all replicas share, as it was given.
    shared: the same state, on the devices where an update puts it.
    inner: the initial state of the replica's own optimizer; None for none.
    is_fresh: whether to use `inner` even if a snapshot brings another replica's.
    parts: this process's part of the arrays.
    update: splits gradients, and applies means.
    layout: the layout of gradients and means in bytes.
  """

  strategy: strategies.Strategy
  params: Any
  start: Any
  shared: Any
  inner: Any
  is_fresh: bool
  parts: Parts
  update: update.Update
  layout: layout.Layout


def prepare(
  strategy: strategies.Strategy,
  params: Any,
  wire: str,
  *,
  processes: Processes | None = None,
  opt_state: Any = None,
  inner_state: Any = None,
) -> Model:
  """Makes a model, and compiles its update, so that no round has to wait for it.

  Args:
    strategy: what replicas share, keep and send.
    params: the initial parameters.
    wire: the wire format of gradients.
    processes: the processes of the replica; None: this one.
    opt_state: the optimizer state of a checkpoint.
    inner_state: the state of the replica's own optimizer, or "fresh"; see `join`.

  Raises:
    ValueError, TypeError: an argument does not match the parameters.
  """
  params = trees.as_params(params)
  start = strategy.shared(params)
  if opt_state is not None:
    opt_state = trees.widened(opt_state, start.opt_state)
    trees.check_like("opt_state", opt_state, start.opt_state)
    # The caller's containers may be of another kind, with the same leaves.
    structure = jax.tree.structure(start.opt_state)
    own = map(trees.own, jax.tree.leaves(opt_state))
    opt_state = jax.tree.unflatten(structure, own)
    start = start._replace(opt_state=opt_state)
  inner = strategy.inner_state(strategy.local(start))
  is_fresh = isinstance(inner_state, str)
  if inner_state is not None and not is_fresh:
    inner = _restored(inner_state, inner, strategy)
    start = start._replace(hyperparams=hyperparams.find(inner))
  parts = (processes or Processes()).parts(strategy, params, start, inner)
  made = update.Update(strategy, params, parts)
  sent = layout.layout(made.blocks, wire)
  nothing = means.read(sent, np.zeros(sent.nbytes, np.uint8))
  after = made.apply(parts.shared, nothing)
  # Placed as an update places it: otherwise the first update would change placements,
  # and programs would be compiled again.
  shared = jax.tree.map(trees.placed_like, parts.shared, after)
  _compile_local(strategy, params, shared, parts.inner)
  return Model(
    *(strategy, params, start, shared, inner, is_fresh, parts, made, sent)
  )


def _compile_local(
  strategy: strategies.Strategy, params: Any, shared: Any, inner: Any
) -> None:
  """Compiles the local computations of a replica between two exchanges."""
  if isinstance(strategy, strategies.WaitingStrategy) and inner is not None:
    local = strategy.local(shared, inner)
    grads = jax.tree.map(jnp.zeros_like, params)
    strategy.contribute(shared, local, grads)
    strategy.so_far(shared, local)
    strategy.settle(shared, shared, local, mine=True)


def _restored(
  inner_state: Any, fresh: Any, strategy: strategies.Strategy
) -> Any:
  """The state of a replica's own optimizer, from such a tree or from its leaves.

  Args:
    inner_state: the argument `inner_state` of `join`.
    fresh: the state that the strategy begins with.
    strategy: the strategy, for errors.

  Raises:
    ValueError: `inner_state` does not match the fresh state.
  """
  if fresh is None:
    raise ValueError(
      "inner_state= is the state of a replica's own optimizer, with a strategy that"
      f" trains locally; {strategy.name!r} has none. Leave it out."
    )
  words = trees.leaves_of(inner_state)
  trees.check_like("inner_state", words, trees.leaves_of(fresh))
  leaves, tree = jax.tree.flatten(fresh)
  pairs = zip(words, leaves, strict=True)
  # Copies, since the caller may write to its own arrays.
  made = [trees.restorer(leaf)(np.array(array)) for array, leaf in pairs]
  return jax.tree.unflatten(tree, made)
