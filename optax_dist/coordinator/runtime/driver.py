"""Drives a replica's protocol core: events become inputs, effects are executed.

    EventLoop      messages, lost peers  --+              +--> messages, Peers
    Arrays         means, snapshots      --+-> core.step -+--> Arrays, with States
    training loop  submissions, requests --+              +--> TrainingInbox

The core decides, one input at a time and in the order of the events; effects
are executed in their order, too. All of this is one thread, which never blocks
except to wait for the next event: slow work is done in the background, and the
training loop is notified through the `TrainingInbox`.
"""

from __future__ import annotations

import collections
import logging
import os
import queue
from collections.abc import Callable, Sequence
from typing import Any

from optax_dist.coordinator import errors
from optax_dist.coordinator._internal import phases
from optax_dist.coordinator.aggregation import reducer
from optax_dist.coordinator.protocol import (
  codec,
  inputs,
  liveness,
  messages,
)
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol.deadlines import Deadlines
from optax_dist.coordinator.runtime import (
  arrays,
  event_loop,
  inbox,
  peers,
  states,
)
from optax_dist.coordinator.runtime import endpoint as endpoints
from optax_dist.coordinator.runtime.processes import Core, Processes
from optax_dist.coordinator.transport import interface as transports

_log = logging.getLogger("optax_dist.coordinator")


class Driver:
  """Drives one replica, from `start` to `close`.

  Attributes:
    loop: the event loop, which runs in a thread of its own.
    arrays: gradients, means and states.
    inbox: notifications for the training loop.
    processes: the processes of the replica, of which this is one.
  """

  def __init__(
    self,
    core: Core,
    endpoint: endpoints.Endpoint,
    *,
    replica: int | str,
    reducer: reducer.Reducer,
    initial: Any,
    step: int,
    apply: states.Apply,
    deadlines: Deadlines,
    silence: liveness.Rule,
    processes: Processes,
    shards: states.Shards | None = None,
    inner: Any = None,
  ):
    """Creates the driver; nothing happens before `start`.

    Args:
      core: the protocol core.
      endpoint: its transport, and where its coordinator is.
      replica: the replica's id.
      reducer: averages gradients.
      initial: the initial state, a tree of arrays.
      step: the step of the initial state.
      apply: see `states.States`.
      deadlines: the run's deadlines.
      silence: how long the replica and its coordinator may be silent to each other.
      processes: the processes of its replica.
      shards: this process's shards of the state, if it spans several.
      inner: the initial state of the replica's own optimizer; None for none.
    """
    self._core, self._replica, self._endpoint = core, replica, endpoint
    self.processes = processes
    self._transport, self._nbytes = endpoint.transport, reducer.layout.nbytes
    self.loop = event_loop.EventLoop(
      endpoint,
      replica,
      self._on_event,
      self._run_pending,
      self._failed,
    )
    background, call_soon = self.loop.background, self.loop.call_soon
    self._peers = peers.Peers(endpoint, silence)
    self._inputs: collections.deque[Any] = collections.deque()
    self.arrays = arrays.Arrays(
      endpoint.transport,
      replica,
      reducer,
      states.States(initial, step, apply, background, call_soon, shards, inner),
      background,
      deadlines,
      self._inputs.append,
    )
    self.inbox = processes.inbox(
      self.arrays.states.published, self.enqueue, deadlines.replica
    )
    self._notify_training_loop = False
    # When to check for stuck transfers next.
    self._check_at = 0.0
    self._check_every = deadlines.transfer / 8
    self._effects = self._executed_by()

  # Called by the training loop.

  def start(self) -> None:
    """Starts the event loop; the replica calls its coordinator."""
    self._inputs.append(inputs.Started())
    self.loop.start()

  def check_process(self) -> None:
    """Raises an error in a forked child."""
    if os.getpid() != self.loop.process:
      raise errors.CoordinatorError(
        f"Replica {self._replica!r} lives in process {self.loop.process}; a forked"
        " child can't use it. Join from the child, or use the replica in the"
        " process that has joined."
      )

  def enqueue(self, input_: Any) -> None:
    """Queues an input for the core; callable from any thread."""
    self.check_process()
    self._inputs.append(input_)
    self.loop.wake()

  def submit(
    self,
    submitted: messages.SubmitGradient,
    parts: Sequence[memoryview] = (),
  ) -> None:
    """Submits a gradient.

    Args:
      submitted: the submission.
      parts: the gradient's bytes; none if it is sent inline, not finite, or too
        stale to count.
    """
    phases.reach("arrived", self._replica)
    self.arrays.submitted(submitted, parts)
    self._inputs.append(submitted)
    self.loop.wake()

  def allocate(self) -> memoryview:
    """Memory for a gradient; reused once no view of it is left."""
    return self._transport.allocate(self._nbytes)

  @property
  def process(self) -> str:
    """The name of this process, as the coordinator knows it."""
    return self._transport.name

  @property
  def shares_memory(self) -> bool:
    """Whether peers read arrays in this process's memory; callable from any thread."""
    return self._transport.shares_memory

  def stats(self) -> dict[str, int]:
    """Bytes of arrays so far, and transfers in progress."""
    bytes_in, bytes_out = self.arrays.moved()
    return {
      "bytes_in": bytes_in,
      "bytes_out": bytes_out,
      "pending": self._transport.pending(),
    }

  def missing(self) -> str:
    """A sentence that says what the event loop is waiting for."""
    answer: queue.SimpleQueue[str] = queue.SimpleQueue()
    self.loop.call_soon(
      lambda: answer.put(self._core.missing(self._transport.now()))
    )
    try:
      waits = answer.get(timeout=1.0)
    except queue.Empty:
      return "Its event loop does not answer."
    why = f" ({self._peers.unreached})" if self._peers.unreached else ""
    return f"It waits {waits}{why}."

  def stalled(self) -> bool:
    """Whether other replicas wait; callable from any thread."""
    return self._core.stalled

  def evict(self, reason: str, stacks: str) -> None:
    """Takes this replica out of the run at once, and stops.

    Args:
      reason: for messages and logs.
      stacks: stacks of this process's threads, for the journal.
    """
    failure = errors.CoordinatorError(
      f"Replica {self._replica!r} was evicted by its watchdog: {reason}."
    )
    self.loop.call_soon(lambda: self._fail(failure))
    final = not self.processes.may_restart
    self.enqueue(messages.Leave(True, reason, stacks, final))
    self.loop.close(reason)

  # The event loop.

  def _run_pending(self) -> None:
    """Does everything that needs no waiting."""
    finder = self._endpoint.finder
    if finder is not None and finder.has_moved():
      self._on_event(self._peers.moved())
    timed, now = False, self._transport.now()
    while True:
      if self.loop.posted:
        self.loop.run_posted()
      if self._inputs:
        while self._inputs:
          self._step(self._inputs.popleft(), now)
        continue
      if self.loop.closing:
        break
      if now >= self._check_at:
        # So a stuck transfer is noticed later by this interval at most.
        self._check_at = now + self._check_every
        self.arrays.check()
        continue
      due = self._core.deadline()
      self.loop.due = min(due, self._check_at)
      # Only once per call: the core may wait for events that have to be polled.
      if timed or due > now:
        break
      timed = True
      self._step(inputs.TimePassed(), now)
    if self._notify_training_loop:
      self._notify_training_loop = False
      # Once it wakes, the training loop takes the processor, so pending messages are
      # sent first.
      self._transport.flush()
      self.inbox.wake()

  def _step(self, input_: Any, now: float) -> None:
    effects = self._effects
    for effect in self._core.step(input_, now):
      effects.get(type(effect), self._notify)(effect)

  def _on_event(self, event: transports.Event) -> None:
    match event:
      case transports.Message(peer, payload):
        try:
          message = self.processes.codec.decode(payload)
        except codec.BadMessage as error:
          self._inputs.append(inputs.Malformed(peer, str(error)))
          return
        self._inputs.append(inputs.Received(peer, message))
      case transports.PeerLost():
        self._inputs.append(self._peers.lost(event))
      case transports.PeerUp():
        self._peers.up(event)
      case _:
        self.arrays.handle(event)

  def _failed(self, error: BaseException) -> None:
    """An error has ended the event loop."""
    self.inbox.fail(error)
    self.inbox.wake()

  # Effects.

  def _executed_by(self) -> dict[type, Callable[[Any], None]]:
    """The function for each kind of effect; all other effects notify the loop."""
    return {
      fx.Send: self._send,
      fx.UseRun: self._use_run,
      fx.Connect: lambda effect: self._endpoint.connect(
        effect.peer, effect.address
      ),
      fx.Disconnect: lambda effect: self._peers.disconnect(
        effect.peer, effect.reason
      ),
      fx.Aggregate: self.arrays.aggregate,
      fx.Release: self.arrays.release,
      fx.Apply: self.arrays.apply,
      fx.Publish: self._publish,
      fx.Restore: self._restore,
      messages.Serve: self.arrays.serve_snapshot,
      messages.Fetch: self.arrays.fetch_snapshot,
      fx.TakeFingerprint: self.arrays.take_fingerprint,
      fx.Resolved: self._resolve,
      fx.Admitted: self._admitted,
      fx.Fail: self._fail_by_core,
      fx.Log: lambda effect: _log.warning("%s", effect.text),
    }

  def _send(self, effect: fx.Send) -> None:
    if isinstance(effect.message, messages.Hello):
      phases.reach("joining", self._replica)
    encoded = self.processes.codec.encode(effect.message)
    for peer in effect.peers:
      self._transport.send(peer, [encoded])

  def _use_run(self, effect: fx.UseRun) -> None:
    self._transport.use_run(effect.nonce.encode())
    joined = self.inbox.joined
    joined.run_id, joined.lineage = effect.run_id, effect.lineage

  def _publish(self, effect: fx.Publish) -> None:
    self.arrays.publish(effect)
    self._notify(inbox.Published(self.arrays.states.published, effect.save))
    phases.reach("applied", self._replica)

  def _restore(self, effect: fx.Restore) -> None:
    self.arrays.restore(effect)
    self._notify(inbox.Published(self.arrays.states.published, False))

  def _resolve(self, resolved: fx.Resolved) -> None:
    self.arrays.resolve(resolved)
    self._notify(resolved)

  def _admitted(self, effect: fx.Admitted) -> None:
    # Once the replica is admitted, earlier failed connections don't matter any more.
    self._peers.unreached = ""
    self._notify(effect)

  def _notify(self, event: inbox.Event) -> None:
    """Notifies the training loop, which may continue with it."""
    self.inbox.notify(event)
    self._notify_training_loop = True

  def _fail_by_core(self, effect: fx.Fail) -> None:
    reason = effect.reason
    if self._peers.unreached:
      reason = f"{reason} {self._peers.unreached}."
    error = getattr(errors, effect.error)(reason)
    error.final = effect.final
    self._fail(error)

  def _fail(self, error: BaseException) -> None:
    self.inbox.fail(error)
    self._notify_training_loop = True
