"""The event loop of a replica: events become inputs, effects are executed.

    Transport      messages, lost peers  --+              +--> messages, peers
    Aggregations   means                 --+-> core.step -+--> aggregations
    Snapshots      states                --+              +--> States, snapshots
    training loop  submissions, requests --+              +--> TrainingInbox

The core decides, one input at a time and in the order of the events; effects
are executed in their order, too. All of this is one thread, which never blocks
except to wait for the next event: slow work is done in the background, and the
training loop is notified through the `TrainingInbox`.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from optax_dist.coordinator import errors, phases
from optax_dist.coordinator.aggregation import (
  gradient,
  layout,
  means,
  reduce_scatter_gather,
  reducer,
  snapshots,
)
from optax_dist.coordinator.protocol import (
  codec,
  entries,
  inputs,
  liveness,
  messages,
)
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol.deadlines import Deadlines
from optax_dist.coordinator.runtime import (
  background,
  endpoint,
  inbox,
  states,
  threads,
)
from optax_dist.coordinator.runtime.processes import Core, Processes
from optax_dist.coordinator.transport import interface as transports

_log = logging.getLogger("optax_dist.coordinator")
# Seconds to wait for a closing thread.
_CLOSE_SECONDS = 5.0
# Seconds for which a coordinator may be silent before it is known how long it is.
_SILENT = 7.0


class Driver:
  """Drives one replica, from `start` to `close`.

  Attributes:
    inbox: what the training loop reads.
    exchanged: the last submission exchanged, and the seconds that its exchange
      took.
  """

  def __init__(
    self,
    core: Core,
    place: endpoint.Endpoint,
    *,
    replica: int | str,
    gradients: layout.Layout,
    reducer: reducer.Reducer,
    initial: Any,
    step: int,
    apply: Callable[[Any, Sequence[np.ndarray]], Any],
    deadlines: Deadlines,
    silence: liveness.Rule,
    processes: Processes,
    shards: states.Shards | None = None,
    inner: Any = None,
  ):
    """Creates the driver; nothing happens before `start`.

    Args:
      core: the protocol core.
      place: its transport, and where its coordinator is.
      replica: the replica's id.
      gradients: the layout of gradients, and of means.
      reducer: averages them.
      initial: the initial state, a tree of arrays.
      step: the step of the initial state.
      apply: see `states.States`.
      deadlines: how long everybody waits.
      silence: how long it and its coordinator may be silent to each other.
      processes: the processes of its replica.
      shards: this process's shards of the state, if it spans several.
      inner: the initial argument of `keep`; None for none.
    """
    self.exchanged = -1, 0.0
    self._exchange: tuple[entries.RoundId, int, float] | None = None
    self._core, self._replica, self._layout = core, replica, gradients
    self._transport, self._place = place.transport, place
    self._silence = silence
    # A transfer that is stuck is noticed so much later.
    self._check_every = deadlines.transfer / 8
    name = f"optax-dist-{replica}"
    target = threads.in_this_precision(self._run)
    self._thread = threading.Thread(target=target, name=name, daemon=True)
    self._background = background.Background(f"{name}-work", self.call_soon)
    self._processes = processes
    self._states = states.States(
      initial, step, apply, self._background, self.call_soon, shards, inner
    )
    self.inbox = processes.inbox(
      self._states.published, self.enqueue, deadlines.replica
    )
    self._aggregations = reduce_scatter_gather.Aggregations(
      place.transport,
      reducer,
      self._background,
      deadlines,
      self._answered,
      self._reach,
    )
    self._snapshots = snapshots.Snapshots(
      place.transport,
      self._states.nbytes,
      self._background,
      deadlines.transfer,
      self._answered,
    )
    # Bytes of gradients and means sent inline.
    self._inline_in = self._inline_out = 0
    self._posted: collections.deque[Callable[[], None]] = collections.deque()
    self._inputs: collections.deque[Any] = collections.deque()
    # Peers whose loss is in the input queue: what needs them must not start.
    self._lost: collections.Counter[str] = collections.Counter()
    # Peers to which arrays are sent, not lent.
    self._far: set[str] = set()
    # Why another replica could not be called; "" once this one is admitted.
    self._unreached = ""
    self._gradients: dict[int, gradient.Gradient] = {}
    self._notify_training_loop = False
    # The core's deadline, as of the last `_proceed`.
    self._due = math.inf
    self._closing = ""
    self._closed = False
    self._process = os.getpid()

  # Called by the training loop.

  def start(self) -> None:
    """Starts the event loop; the replica calls its coordinator."""
    self._inputs.append(inputs.Started())
    self._thread.start()

  def enqueue(self, input_: Any) -> None:
    """Queues an input for the core; callable from any thread."""
    self.check_process()
    self.call_soon(lambda: self._inputs.append(input_))

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
    self.call_soon(lambda: self._submit(submitted, parts))

  def allocate(self) -> memoryview:
    """Memory for a gradient; it is used again once no view of it is left."""
    return self._transport.allocate(self._layout.nbytes)

  def keep(self, inner: Any) -> None:
    """Sets the state of the replica's own optimizer that goes with its next state."""
    self._states.keep(inner)

  @property
  def kept(self) -> Any:
    """What `keep` was given last."""
    return self._states.inner

  @property
  def has_remote_peers(self) -> bool:
    """Whether arrays are sent to some peers, not lent; from any thread."""
    return bool(self._far)

  def call_soon(self, action: Callable[[], None]) -> None:
    """Schedules a function on the event loop."""
    self._posted.append(action)
    if not self._closed:
      self._transport.wake()

  @property
  def is_forked(self) -> bool:
    """Whether this is a forked child, which has no event loop."""
    return os.getpid() != self._process

  def check_process(self) -> None:
    """Raises an error in a forked child."""
    if self.is_forked:
      raise errors.CoordinatorError(
        f"Replica {self._replica!r} lives in process {self._process}; a forked"
        " child can't use it. Join from the child, or use the replica in the"
        " process that has joined."
      )

  def stats(self) -> dict[str, int]:
    """Bytes of arrays so far, and transfers in progress."""
    bytes_in, bytes_out = self.moved()
    return {
      "bytes_in": bytes_in,
      "bytes_out": bytes_out,
      "pending": self._transport.pending(),
    }

  def moved(self) -> tuple[int, int]:
    """Bytes of arrays received and sent, including inline ones."""
    arrays = self._transport
    return (
      self._inline_in + arrays.bytes_in,
      self._inline_out + arrays.bytes_out,
    )

  def missing(self) -> str:
    """A sentence that says what the event loop is waiting for."""
    answer: queue.SimpleQueue[str] = queue.SimpleQueue()
    self.call_soon(
      lambda: answer.put(self._core.missing(self._transport.now()))
    )
    try:
      waits = answer.get(timeout=1.0)
    except queue.Empty:
      return "Its event loop does not answer."
    why = f" ({self._unreached})" if self._unreached else ""
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

    def fail() -> None:
      self.inbox.fail(failure)
      self._notify_training_loop = True

    self.call_soon(fail)
    self.enqueue(messages.Leave(True, reason, stacks))
    self.close(reason)

  def close(self, reason: str = "closed") -> None:
    """Stops the threads and waits for them; unsent messages are lost."""
    if self.is_forked:
      return
    self.call_soon(lambda: setattr(self, "_closing", reason))
    if self._thread is threading.current_thread():
      return
    if self._thread.ident is None:
      self._end()
    # A thread stuck in foreign code must not block the caller.
    else:
      self._thread.join(_CLOSE_SECONDS)
    self._background.close(_CLOSE_SECONDS)

  # The event loop.

  def _run(self) -> None:
    try:
      self._proceed()
      while not self._closing:
        events = self._transport.poll(self._timeout())
        for event in events:
          self._on_event(event)
        self._proceed()
    except BaseException as error:
      _log.debug("replica %r fails", self._replica, exc_info=True)
      self.inbox.fail(error)
      self._closing = f"it has raised {error!r:.200}"
    finally:
      try:
        self._end()
      finally:
        self.inbox.wake()

  def _proceed(self) -> None:
    """Does everything that needs no waiting."""
    if self._place.has_moved():
      why = "another process is the coordinator now"
      self._transport.disconnect(endpoint.COORDINATOR, why)
      lost = transports.PeerLost(endpoint.COORDINATOR, "broken", why)
      self._on_event(lost)
    self._aggregations.check()
    self._snapshots.check()
    timed = False
    while True:
      while self._posted:
        self._posted.popleft()()
      if self._inputs:
        queued, self._inputs = self._inputs, collections.deque()
        for input_ in queued:
          self._step(input_)
        continue
      if self._closing:
        break
      self._due = self._core.deadline()
      # Once: what the core waits for may be among the events to poll.
      if timed or self._due > self._transport.now():
        break
      timed = True
      self._step(inputs.TimePassed())
    if self._notify_training_loop:
      self._notify_training_loop = False
      # The training loop takes the processor: others may get theirs first.
      self._transport.flush()
      self.inbox.wake()

  def _timeout(self) -> float:
    """The longest time to wait for an event."""
    if self._posted:
      return 0.0
    timeout = min(self._due - self._transport.now(), self._check_every)
    return max(0.0, timeout)

  def _step(self, input_: Any) -> None:
    if isinstance(input_, inputs.PeerLost):
      self._lost[input_.peer] -= 1
    for effect in self._core.step(input_, self._transport.now()):
      self._execute(effect)

  def _end(self) -> None:
    if self._closed:
      return
    self._closed = True
    try:
      self._place.close(self._closing)
    except Exception:
      _log.exception("replica %r could not close all", self._replica)
    self._posted.clear()
    self._gradients.clear()

  # Inputs.

  def _on_event(self, event: transports.Event) -> None:
    match event:
      case transports.Message(peer, payload):
        try:
          message = self._processes.codec.decode(payload)
        except codec.BadMessage as error:
          self._inputs.append(inputs.Malformed(peer, str(error)))
          return
        self._inputs.append(inputs.Received(peer, message))
      case transports.PeerLost(peer, how, reason):
        self._lost[peer] += 1
        if how == "ended" and self._lost[peer] == 1:
          _log.warning(
            "%s has ended (%s). If it has not, two processes tell others the"
            " same address: see ports= and advertise=.",
            peer,
            reason,
          )
        self._far.discard(peer)
        if peer == endpoint.COORDINATOR:
          self._place.revive(how)
        elif how in ("unreachable", "gone", "refused"):
          self._could_not_reach(peer, reason)
        self._inputs.append(inputs.PeerLost(peer, how, reason))
      case transports.PeerUp(peer, near):
        if not near and peer != endpoint.COORDINATOR:
          self._far.add(peer)
        if peer == endpoint.COORDINATOR:
          # It compiles nothing meanwhile, and people are to know soon.
          first = min(self._silence.first, _SILENT)
          rule = dataclasses.replace(self._silence, first=first)
          self._transport.allow(peer, rule)
      case _:
        # An unknown round was abandoned.
        if not self._aggregations.handle(event):
          self._snapshots.handle(event)

  def _could_not_reach(self, peer: str, why: str) -> None:
    who = f"Process {peer}"
    if peer == endpoint.COORDINATOR:
      who = "The coordinator"
    self._unreached = f"{who} could not be reached: {why}"

  def _answered(self, answer: inputs.Input) -> None:
    """An aggregation or a snapshot has ended."""
    if isinstance(answer, messages.Done):
      phases.reach("done", self._replica)
      if self._exchange is not None and self._exchange[0] == answer.round:
        _, sequence, began = self._exchange
        self.exchanged = sequence, time.monotonic() - began
    self._inputs.append(answer)

  def _submit(
    self, submitted: messages.SubmitGradient, parts: Sequence[memoryview]
  ) -> None:
    if parts:
      self._gradients[submitted.sequence] = gradient.Gradient(parts)
    self._inline_out += len(submitted.payload)
    phases.reach("arrived", self._replica)
    self._inputs.append(submitted)

  # Effects.

  def _execute(self, effect: Any) -> None:
    match effect:
      # The effects of every step come first, since cases are tried in order.
      case fx.Send(peer, message):
        if isinstance(message, messages.Hello):
          phases.reach("joining", self._replica)
        elif isinstance(message, messages.Refused):
          _log.warning("%s may not join: %s", peer, message.reason)
        self._send(peer, message)
      case fx.SendAll(peers, message):
        encoded = self._processes.codec.encode(message)
        for peer in peers:
          self._transport.send(peer, [encoded])
      case fx.Publish(step, save):
        self._states.publish(step)
        self._notify(inbox.Published(self._states.published, save))
        phases.reach("applied", self._replica)
      case fx.Resolved():
        self._resolve(effect)
      case fx.Apply():
        self._apply(effect)
      case fx.UseRun(nonce):
        self._transport.use_run(nonce.encode())
        self.inbox.run_id = entries.run_id(nonce)
      case fx.Connect(peer, address):
        self._place.connect(peer, address)
      case fx.Disconnect(peer, reason):
        trouble = self._transport.trouble(peer)
        if trouble:
          self._could_not_reach(peer, trouble)
        self._transport.disconnect(peer, reason)
        self._far.discard(peer)
      case fx.Aggregate():
        self._aggregate(effect)
      case fx.Release(round_):
        self._aggregations.drop(round_)
      case fx.Restore(step, transfer):
        self._states.restore(step, self._snapshots.take(transfer))
        self._notify(inbox.Published(self._states.published, False))
      case messages.Serve():
        phases.reach("serving", self._replica)
        published = self._states.published
        write = lambda out: self._states.write(published, out)
        serve = lambda: self._snapshots.serve(effect, published.step, write)
        published.then(serve)
      case messages.Fetch():
        phases.reach("fetching_snapshot", self._replica)
        if self._lost[effect.source]:
          reason = "the connection has just been lost"
          self._inputs.append(inputs.SnapshotFailed(effect.transfer, reason))
        else:
          self._snapshots.fetch(effect)
      case fx.TakeFingerprint(step):
        self._take_fingerprint(step, self._states.published)
      case fx.Admitted():
        # What it asked while it searched does not matter any more.
        self._unreached = ""
        self._notify(effect)
      case (
        fx.Leased()
        | fx.Progressed()
        | fx.Taken()
        | fx.Suspended()
        | fx.SetRequested()
        | messages.Call()
        | fx.Left()
        | fx.Finished()
      ):
        self._notify(effect)
      case fx.Fail(name, reason, final):
        if self._unreached:
          reason = f"{reason} {self._unreached}."
        error = getattr(errors, name)(reason)
        error.final = final
        self.inbox.fail(error)
        self._notify_training_loop = True
      case fx.Log(level, text):
        _log.log(getattr(logging, level.upper()), text)
      case _:
        reason = self._processes.execute(effect, self.inbox)
        self._notify_training_loop = True
        if reason:
          self.inbox.fail(errors.CoordinatorError(reason))
          self._closing = reason

  def _aggregate(self, effect: fx.Aggregate) -> None:
    for peer in effect.peers:
      if self._lost[peer.process]:
        self._inputs.append(
          messages.Failed(
            effect.round,
            peer.incarnation,
            "the connection has just been lost",
          )
        )
        return
    if effect.me is None:
      self._aggregations.begin(effect)
      return
    sequence = effect.parts[effect.me].sequence
    found = self._gradients.get(sequence)
    if found is None:
      self._inputs.append(
        messages.Failed(effect.round, None, "it has no such gradient")
      )
      return
    self._exchange = effect.round, sequence, time.monotonic()
    self._aggregations.begin(effect, found)

  def _apply(self, effect: fx.Apply) -> None:
    # The others compute the same meanwhile.
    self._transport.flush()
    raw: bytes | np.ndarray
    if isinstance(effect.mean, bytes):
      raw = effect.mean
      self._inline_in += len(raw)
    else:
      raw = self._aggregations.mean(effect.mean)
    changes = dict(effect.hyperparams)
    self._states.apply(lambda: means.read(self._layout, raw), changes)

  def _notify(self, event: inbox.Event) -> None:
    """Notifies the training loop, which may continue with it."""
    self.inbox.notify(event)
    self._notify_training_loop = True

  def _resolve(self, resolved: fx.Resolved) -> None:
    # A sum includes the earlier submissions.
    for sequence in [s for s in self._gradients if s <= resolved.sequence]:
      if sequence == resolved.sequence or not resolved.partial_only:
        del self._gradients[sequence]
    self._notify(resolved)

  def _take_fingerprint(self, step: int, state: states.State) -> None:
    taken = lambda digest: self._inputs.append(
      messages.Fingerprint(step, digest)
    )
    state.then(lambda: self._states.fingerprint(state, taken))

  def _send(self, peer: str, message: Any) -> None:
    self._transport.send(peer, [self._processes.codec.encode(message)])

  def _reach(self, phase: str) -> None:
    phases.reach(phase, self._replica)
