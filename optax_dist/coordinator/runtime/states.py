"""The model's state: computed before its commit, and published with it.

    Apply    mean     -> a state ahead of the published one
    Publish           -> the state ahead is the published one
    Restore  snapshot -> the published one

The protocol core counts steps; the arrays are here. A state may be published
before it is computed: its readers wait. Who computes it: the event loop, if it
is small; a background thread; or, in a replica of several processes, whoever
reads it first, which is the training loop.
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

# What takes longer is done in the background, so that messages go on meanwhile: a
# snapshot or a fingerprint of more bytes, an update of more seconds.
_SMALL = 256 << 10
# A state of more bytes is not computed beside the gradient that it comes from.
_LARGE = 64 << 20
# A smaller array of a snapshot would keep all of its memory, perhaps for ever.
_COPIED = 64 << 10
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
  """The state all replicas share at a step; it may still be being computed.

  Attributes:
    step: its step.
    inner: the state of a replica's own optimizer that goes with it: of this
      replica, or of the one that served it; None without a strategy that has one.
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
    # Held until it is ready.
    self._pending = threading.Lock()
    if not self.is_ready:
      self._pending.acquire()
    # For a state that its first reader computes, and what runs after that.
    self._work: Callable[[], Any] | None = None
    self._post: Callable[[Callable[[], None]], None] | None = None
    self._actions: list[Callable[[], None]] = []

  def compute(self, work: Callable[[], Any]) -> None:
    """Computes it in this thread."""
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
    """Lets the first thread that gets it compute it.

    Args:
      work: computes it.
      post: schedules a function on the event loop.
    """
    self._work, self._post = work, post

  def then(self, action: Callable[[], None]) -> None:
    """Runs a function on the event loop, which calls this, once it is ready.

    Immediately, unless the state was deferred: background work that uses the
    state runs after it was computed there.
    """
    if self._post is None or self.is_ready:
      action()
      return
    self._actions.append(action)
    if self.is_ready:  # Since then.
      self._run_actions()

  def _run_actions(self) -> None:
    while self._actions and self._post is not None:
      # An action has the state, and two threads may come here.
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
    published: the state that the log has decided.
    nbytes: size of a state in a snapshot.
    inner: the state of this replica's own optimizer, as `keep` sets it.
    seconds: that the last update took.
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
      background: runs slow work; small states are computed at once, and all
        are without it.
      post: schedules a function on the event loop.
      shards: of a state (and what is in `inner`) whose arrays span several
        processes. The first thread that gets a state computes it then: the
        training loop's, where all processes of a replica launch the same
        programs in the same order.
      inner: the initial value of `inner`, a tree of arrays; None for none.
    """
    self.published = State(step, initial, inner)
    self._speculative: State | None = None
    # What computes it once it is published; None if it is computed.
    self._postponed: Callable[[], Any] | None = None
    self._apply = apply
    leaves, self._tree = jax.tree.flatten((initial, inner))
    # Not the leaves, which would live as long as this.
    self._restorers = list(map(trees.restorer, leaves))
    self._shards, self._post = shards, post
    self.inner, self._is_own = inner, False
    blocks = shards.templates if shards else [as_numpy(leaf) for leaf in leaves]
    self._layout = layout.layout(blocks).bounded(0)
    self.nbytes = self._layout.nbytes
    self._background = background if self.nbytes > _SMALL else None
    # The first update may be slow.
    self.seconds, self._is_quick = 0.0, False

  def apply(
    self,
    read: Callable[[], Sequence[np.ndarray]],
    changes: Mapping[str, float] = types.MappingProxyType({}),
    reused: bool = True,
  ) -> None:
    """Computes the state after the published one, before it is published.

    A large one waits for that: the gradient is freed then, so both don't take
    memory at once.

    Args:
      read: returns the leaves of the mean.
      changes: hyperparameters to set before, by name.
      reused: whether the mean's memory is used again once it is computed; if not,
        the program is started, and nobody waits for it here.
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
    """Continues from the bytes that `parts` has on another replica."""
    self._speculative = self._postponed = None
    after = self.published = State(step)

    def work() -> Any:
      value, theirs = self._read(raw)
      if not self._is_own:
        self.inner = theirs
      return self._with_inner(after, value)

    self._compute(after, work)

  def _with_inner(self, after: State, value: Any) -> Any:
    """Notes what goes with a state; the optimizer has it from its next exchange on."""
    if self.inner is not None:
      after.inner = hyperparams.put(self.inner, value.hyperparams)
    return value

  def keep(self, inner: Any) -> None:
    """Sets what goes with states from now on; from any thread.

    Until then it is what the replica was created with, or what a snapshot has.
    """
    self.inner, self._is_own = inner, True

  def parts(self, state: State) -> list[memoryview]:
    """A state's bytes in order, where they are; they stay as they are."""
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
    # The others stay where they were received.
    leaves = [
      restore(array.copy() if array.nbytes < _COPIED else array)
      for restore, array in pairs
    ]
    return jax.tree.unflatten(self._tree, leaves)


def digest_of(shared: Any) -> str:
  """Two fingerprints in one text: of the parameters, and of the whole state."""
  return f"{fingerprint(shared.params)}-{fingerprint(shared)}"
