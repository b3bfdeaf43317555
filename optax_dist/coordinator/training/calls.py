"""What a training loop may do with its replica: one call at a time, and no edits."""

from __future__ import annotations

import threading
from typing import Any

from jax import tree_util


class Views:
  """The states that a training loop has been shown, as copies of their containers.

  All replicas must have the same state: an edit in place is found, and refused.

  Example:
    >>> views, state = Views(), {"rate": 0.5}
    >>> shown = views.show("opt_state", state)
    >>> shown["rate"] = 0.25
    >>> views.check()
    Traceback (most recent call last):
      ...
    ValueError: replica.opt_state was edited in place, on this replica alone; ...
    >>> state
    {'rate': 0.5}
  """

  def __init__(self) -> None:
    # By name: the state, its leaves, and the copy that was shown.
    self._shown: dict[str, tuple[Any, list[Any], Any]] = {}

  def show(self, name: str, tree: Any) -> Any:
    """A state to look at; the same one until the state is another."""
    known = self._shown.get(name)
    if known is None or known[0] is not tree:
      leaves, structure = tree_util.tree_flatten(tree)
      known = tree, leaves, tree_util.tree_unflatten(structure, leaves)
      self._shown[name] = known
    return known[2]

  def check(self) -> None:
    """Refuses edits of what was shown.

    Raises:
      ValueError: there is one; it is dropped.
    """
    for name, (_, leaves, copy) in list(self._shown.items()):
      if [*map(id, leaves)] != [*map(id, tree_util.tree_leaves(copy))]:
        del self._shown[name]
        raise ValueError(
          f"replica.{name} was edited in place, on this replica alone; the edit is"
          " dropped. For a hyperparameter of optax.inject_hyperparams call"
          " replica.set_hyperparams(learning_rate=...), which sets it on all"
          " replicas. For other computations take a copy."
        )


class OneThread:
  """Refuses a second thread: it could get the first one's answer."""

  def __init__(self, replica: object):
    """Starts without any.

    Args:
      replica: the replica's id.
    """
    self._replica, self._lock = replica, threading.RLock()

  def __enter__(self) -> None:
    if not self._lock.acquire(blocking=False):
      raise RuntimeError(
        f"Two threads are using replica {self._replica!r} at once. A replica has"
        " one training loop: let one thread call step, abandon and batches."
      )

  def __exit__(self, *error: object) -> None:
    self._lock.release()
