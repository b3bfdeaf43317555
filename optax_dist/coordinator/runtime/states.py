"""The model's state: computed before its commit, and published with it.

    Apply    mean     -> a state ahead of the published one
    Publish           -> the state ahead is the published one
    Restore  snapshot -> the published one

The protocol core counts steps; the arrays are here. A state may be published before it
is computed; then its readers wait. A small state is computed by the event loop, a large
one by a background thread. In a replica of several processes, the first reader computes
it, which is the training loop.
"""

from __future__ import annotations

import contextlib
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from optax_dist.coordinator._internal.fingerprints import (
  as_numpy,
  fingerprint,
  words_of,
)
from optax_dist.coordinator.aggregation import layout, means
from optax_dist.coordinator.aggregation.reduce_scatter_gather import Background
from optax_dist.coordinator.runtime import trees
from optax_dist.coordinator.strategies import hyperparams

# A snapshot, update or fingerprint of a state of more bytes is computed in the
# background, so that the event loop handles messages meanwhile.
_SMALL = 256 << 10
# A state of more bytes is computed only once its gradient is freed, to save memory.
_LARGE = 64 << 20
# Smaller arrays of a snapshot are copied: a view would keep the whole snapshot alive.
_COPIED = 64 << 10
# An update of fewer seconds is computed at once, by the event loop.
_QUICK = 0.005
# Seconds after which a thread that waits for a state looks whether to go on.
_POLL_SECONDS = 1.0


# Computes the next state from a state and the leaves of a mean.
Apply: TypeAlias = Callable[[Any, Sequence[np.ndarray]], Any]


class Shards(Protocol):
  """One process's part of arrays that are sharded over several processes.

  Attributes:
    templates: shapes and dtypes of the shards, as `jax.ShapeDtypeStruct`s.
  """

  templates: list[jax.ShapeDtypeStruct]

  def split(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """The distinct shards of this process, array by array."""
    ...

  def join(self, shards: Sequence[np.ndarray]) -> list[jax.Array]:
    """Whole arrays, from the shards that this process holds."""
    ...


class State:
  """The state all replicas share at a step; it may not be computed yet.

  Attributes:
    step: its step.
    inner: the state of a replica's own optimizer that goes with it: of this replica,
      or of the replica that served it; None if the strategy has no such optimizer.
    is_ready: whether it is computed, so that `get` does not wait.
    before: the state before it, while it is the published one.
    value: the arrays, once it is ready; see `get`.
  """

  def __init__(self, step: int, value: Any = None, inner: Any = None):
    """Creates a state that is ready, or one to be computed (None)."""
    self.step, self.inner = step, inner
    self.is_ready = value is not None
    self.before: State | None = None
    self.value = value
    self._error: BaseException | None = None
    # Locked until the state is ready.
    self._pending = threading.Lock()
    if not self.is_ready:
      self._pending.acquire()
    # For a state that its first reader computes, and the actions that follow.
    self._work: Callable[[], Any] | None = None
    self._post: Callable[[Callable[[], None]], None] | None = None
    self._actions: list[Callable[[], None]] = []

  def compute(self, work: Callable[[], Any]) -> None:
    """Computes the state in this thread."""
    try:
      self.value = work()
    except BaseException as error:
      self._error = error
      raise
    finally:
      self.is_ready = True
      self._pending.release()
      if self._actions:
        self._run_actions()

  def defer(
    self,
    work: Callable[[], Any],
    post: Callable[[Callable[[], None]], None],
  ) -> None:
    """Lets the first thread that gets the state compute it.

    Args:
      work: computes the state.
      post: schedules a function on the event loop.
    """
    self._work, self._post = work, post

  def then(self, action: Callable[[], None]) -> None:
    """Runs a function on the event loop, which calls this, once the state is ready.

    The function runs immediately, unless the state was deferred. Background work that
    the function starts runs after the state was computed there.
    """
    if self._post is None or self.is_ready:
      action()
      return
    self._actions.append(action)
    if self.is_ready:  # Another thread has computed it since the first check.
      self._run_actions()

  def _run_actions(self) -> None:
    while self._actions and self._post is not None:
      # Popped, since an action refers to the state; and two threads may run this.
      with contextlib.suppress(IndexError):
        self._post(self._actions.pop())

  def get(self, check: Callable[[float], None] = lambda waited: None) -> Any:
    """Returns the state, waiting until it is computed.

    Args:
      check: called now and then with the seconds waited so far; may raise an error.
    """
    if not self.is_ready:
      work, self._work = self._work, None
      if work is not None:
        self.compute(work)
      waited = 0.0
      while not self._pending.acquire(timeout=_POLL_SECONDS):
        waited += _POLL_SECONDS
        check(waited)
      self._pending.release()
    if self._error is not None:
      raise self._error
    return self.value


class States:
  """The published state, and at most one that is computed ahead.

  Attributes:
    published: the state after the last commit.
    nbytes: size of a state in a snapshot.
    inner: the state of this replica's own optimizer, as `keep` sets it.
    seconds: seconds that the last update took.
  """

  def __init__(
    self,
    initial: Any,
    step: int,
    apply: Apply,
    background: Background | None,
    post: Callable[[Callable[[], None]], None],
    shards: Shards | None = None,
    inner: Any = None,
  ):
    """Starts with an initial state.

    Args:
      initial: a tree of arrays.
      step: its step.
      apply: computes the next state.
      background: runs slow work; small states are computed at once, and without
        `background` all states are.
      post: schedules a function on the event loop.
      shards: this process's shards of a state (and of `inner`) whose arrays span
        several processes. Then the first thread that gets a state computes it: that of
        the training loop, since there all processes of a replica launch the same
        programs in the same order.
      inner: the initial value of `inner`, a tree of arrays; None for none.
    """
    self.published = State(step, initial, inner)
    self._speculative: State | None = None
    # Computes the speculative state once it is published; None if that has begun.
    self._postponed: Callable[[], Any] | None = None
    self._apply = apply
    leaves, self._tree = jax.tree.flatten((initial, inner))
    # The leaves themselves are not kept: they would live as long as this object.
    self._restorers = list(map(trees.restorer, leaves))
    self._shards, self._post = shards, post
    self.inner, self._is_own = inner, False
    blocks = shards.templates if shards else [as_numpy(leaf) for leaf in leaves]
    self._layout = layout.layout(blocks).bounded(0)
    self.nbytes = self._layout.nbytes
    self._background = background if self.nbytes > _SMALL else None
    # The first update may compile, so it is not assumed to be quick.
    self.seconds, self._is_quick = 0.0, False

  def apply(
    self,
    read: Callable[[], Sequence[np.ndarray]],
    changes: Mapping[str, float] = types.MappingProxyType({}),
    reused: bool = True,
  ) -> None:
    """Computes the state after the published one, before it is published.

    A large state is computed only when it is published: by then the gradient is freed,
    so the two don't take memory at the same time.

    Args:
      read: returns the leaves of the mean.
      changes: hyperparameters to set before, by name.
      reused: whether the mean's memory is reused after the computation, which then has
        to be awaited; if not, the program is only started.
    """
    base = self.published
    after = self._speculative = State(base.step + 1)

    def work() -> Any:
      start = time.monotonic()
      state = base.get()
      if changes:
        state = hyperparams.change(state, changes)
      value = self._apply(state, read())
      if reused:
        jax.block_until_ready(value)
      self.seconds = time.monotonic() - start
      self._is_quick = self.seconds < _QUICK
      return self._with_inner(after, value)

    self._postponed = None
    if self._shards is None and base.is_ready and self._is_quick:
      # Waking another thread takes about as long.
      after.compute(work)
    elif self.nbytes > _LARGE:
      self._postponed = work
    else:
      self._compute(after, work)

  def publish(self, step: int) -> None:
    """Publishes the state computed ahead: it is committed."""
    assert self._speculative is not None
    assert self._speculative.step == step
    self.published, self._speculative = self._speculative, None
    work, self._postponed = self._postponed, None
    if work is not None:
      self._compute(self.published, work)

  def restore(self, step: int, raw: np.ndarray) -> None:
    """Continues from the bytes of a state that another replica's `parts` returned."""
    self._speculative = self._postponed = None
    after = self.published = State(step)

    def work() -> Any:
      value, theirs = self._read(raw)
      if not self._is_own:
        self.inner = theirs
      return self._with_inner(after, value)

    self._compute(after, work)

  def _with_inner(self, after: State, value: Any) -> Any:
    """Attaches the replica's own optimizer to a state, with its new hyperparameters.

    The optimizer itself gets these at its next exchange.
    """
    if self.inner is not None:
      after.inner = hyperparams.put(self.inner, value.hyperparams)
    return value

  def keep(self, inner: Any) -> None:
    """Sets the state of the replica's own optimizer, which goes with later states.

    Before the first call, it is the initial state or that of a snapshot. Callable from
    any thread.
    """
    self.inner, self._is_own = inner, True

  def parts(self, state: State) -> list[memoryview]:
    """A state's bytes in order, without a copy where possible; they don't change."""
    value = state.get()
    leaves = jax.tree.leaves((value, state.inner))
    if self._shards is not None:
      leaves = self._shards.split(leaves)
    words = [words_of(leaf)[0] for leaf in leaves]
    out = np.empty(self.nbytes, np.uint8)
    parts = means.write(words, self._layout, out, in_place=True)
    assert parts is not None
    return parts

  def fingerprint(self, state: State, done: Callable[[str], None]) -> None:
    """Computes a digest; `done` is called on the event loop."""
    digests: list[str] = []
    work = lambda: digests.append(digest_of(state.get()))
    self._run(work, lambda: done(digests[0]))

  def _compute(self, state: State, work: Callable[[], Any]) -> None:
    if self._shards is not None:
      state.defer(work, self._post)
    else:
      self._run(lambda: state.compute(work))

  def _run(
    self, work: Callable[[], None], done: Callable[[], None] | None = None
  ) -> None:
    """Runs work in the background, if there is one; then `done`."""
    if self._background is not None:
      self._background(work, done)
      return
    work()
    if done is not None:
      done()

  def _read(self, raw: np.ndarray) -> Any:
    arrays = means.read(self._layout, raw)
    if self._shards is not None:
      return jax.tree.unflatten(self._tree, self._shards.join(arrays))
    pairs = zip(self._restorers, arrays, strict=True)
    # Large arrays stay in the memory that received them.
    leaves = [
      restore(array.copy() if array.nbytes < _COPIED else array)
      for restore, array in pairs
    ]
    return jax.tree.unflatten(self._tree, leaves)


def digest_of(shared: Any) -> str:
  """Two fingerprints in one text: of the parameters, and of the whole state."""
  return f"{fingerprint(shared.params)}-{fingerprint(shared)}"
