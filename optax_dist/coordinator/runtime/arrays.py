"""A replica's arrays, as the protocol core uses them: gradients, means, states."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from optax_dist.coordinator._internal import phases
from optax_dist.coordinator.aggregation import (
  means,
  reduce_scatter_gather,
  reducer,
  scattered,
  snapshots,
)
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import entries, inputs, messages
from optax_dist.coordinator.protocol.deadlines import Deadlines
from optax_dist.coordinator.runtime import states
from optax_dist.coordinator.transport import interface as transports
from optax_dist.coordinator.transport.sockets import Transport


class Arrays:
  """Executes the effects that concern arrays.

  Attributes:
    states: the model's states.
    exchanged: the last submission that was exchanged, and the seconds that took.
  """

  def __init__(
    self,
    transport: Transport,
    replica: int | str,
    reducer: reducer.Reducer,
    states: states.States,
    background: reduce_scatter_gather.Background,
    deadlines: Deadlines,
    enqueue: Callable[[inputs.Input], None],
  ):
    """Starts with no gradient.

    Args:
      transport: sends and receives arrays.
      replica: the replica's id.
      reducer: averages gradients.
      states: the model's states.
      background: does slow work.
      deadlines: the run's deadlines.
      enqueue: queues an input for the core, in the event loop.
    """
    self.states = states
    self.exchanged = -1, 0.0
    self._exchange: tuple[entries.RoundId, int, float] | None = None
    self._transport, self._replica = transport, replica
    self._layout, self._enqueue = reducer.layout, enqueue
    self._aggregations = reduce_scatter_gather.Aggregations(
      transport,
      reducer,
      deadlines,
      self._answered,
      lambda phase: phases.reach(phase, replica),
    )
    self._snapshots = snapshots.Snapshots(
      transport,
      states.nbytes,
      background,
      deadlines.transfer,
      self._answered,
    )
    # Bytes of gradients and means sent inline.
    self._inline_in = self._inline_out = 0
    # The bytes of gradients without an outcome, by submission.
    self._gradients: dict[int, Sequence[memoryview]] = {}

  def moved(self) -> tuple[int, int]:
    """Bytes received and sent, including inline ones."""
    arrays = self._transport
    return (
      self._inline_in + arrays.bytes_in,
      self._inline_out + arrays.bytes_out,
    )

  def check(self) -> None:
    """Fails transfers that make no progress; to be called often."""
    self._aggregations.check()
    self._snapshots.check()

  def handle(self, event: transports.Event) -> None:
    """Handles an event of a transfer: of a round, or otherwise of a snapshot."""
    if not self._aggregations.handle(event):
      self._snapshots.handle(event)

  def submitted(
    self, submitted: messages.SubmitGradient, parts: Sequence[memoryview]
  ) -> None:
    """Keeps a gradient until `resolve`; `parts` as in `Driver.submit`."""
    if parts:
      self._gradients[submitted.sequence] = parts
    self._inline_out += len(submitted.payload)

  def resolve(self, resolved: fx.Resolved) -> None:
    """Frees a gradient."""
    self._gradients.pop(resolved.sequence, None)

  # Effects.

  def aggregate(self, effect: fx.Aggregate) -> None:
    """Executes `Aggregate`."""
    if effect.me is None:
      self._aggregations.begin(effect)
      return
    me = effect.peers[effect.me].incarnation
    own = [part.sequence for part in effect.parts if part.incarnation == me]
    if not self._gradients.keys() >= {*own}:
      why = "it has no such gradient"
      self._enqueue(messages.Failed(effect.round, None, why))
      return
    self._exchange = effect.round, own[-1], time.monotonic()
    whole = [part for sequence in own for part in self._gradients[sequence]]
    self._aggregations.begin(effect, scattered.Scattered(whole))

  def release(self, effect: fx.Release) -> None:
    """Executes `Release`."""
    self._aggregations.drop(effect.round)

  def apply(self, effect: fx.Apply) -> None:
    """Executes `Apply`."""
    # Sends pending bytes first, so that the others compute the same at this time.
    self._transport.flush()
    raw: bytes | np.ndarray
    if is_inline := isinstance(effect.mean, bytes):
      raw = effect.mean
      self._inline_in += len(raw)
    else:
      raw = self._aggregations.mean(effect.mean)
    self.states.apply(
      lambda: means.read(self._layout, raw),
      dict(effect.hyperparams),
      reused=not is_inline,
    )

  def publish(self, effect: fx.Publish) -> None:
    """Executes `Publish`."""
    self.states.publish(effect.step)
    if self._aggregations.rounds:
      self._aggregations.applied(effect.step)

  def restore(self, effect: fx.Restore) -> None:
    """Executes `Restore`."""
    self.states.restore(effect.step, self._snapshots.take(effect.transfer))

  def serve_snapshot(self, effect: messages.Serve) -> None:
    """Executes `Serve`."""
    phases.reach("serving", self._replica)
    published = self.states.published
    parts = lambda: self.states.parts(published)
    serve = lambda: self._snapshots.serve(effect, published.step, parts)
    published.then(serve)

  def fetch_snapshot(self, effect: messages.Fetch) -> None:
    """Executes `Fetch`."""
    phases.reach("fetching_snapshot", self._replica)
    self._snapshots.fetch(effect)

  def take_fingerprint(self, effect: fx.TakeFingerprint) -> None:
    """Executes `TakeFingerprint`."""
    step, state = effect.step, self.states.published
    taken = lambda digest: self._enqueue(messages.Fingerprint(step, digest))
    state.then(lambda: self.states.fingerprint(state, taken))

  def _answered(self, answer: inputs.Input) -> None:
    """An aggregation or a snapshot has ended."""
    if isinstance(answer, messages.Done):
      phases.reach("done", self._replica)
      if self._exchange is not None and self._exchange[0] == answer.round:
        _, sequence, began = self._exchange
        self.exchanged = sequence, time.monotonic() - began
    self._enqueue(answer)
