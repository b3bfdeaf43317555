"""A replica's side of the protocol: its coordinator, and the decisions it gets.

the coordinator -> Connection   whether it is connected, when it is called
                -> Known        how far the run is, and what to compute next
                -> Applier      the state: means, updates, snapshots
the loop        -> Submissions  until each has its outcome
"""

from __future__ import annotations

import math
from typing import Literal, assert_never

import optax_dist
from optax_dist import quorum
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.client.applier import Applier
from optax_dist.coordinator.protocol.client.connection import (
  CoordinatorConnection,
)
from optax_dist.coordinator.protocol.client.known import Known
from optax_dist.coordinator.protocol.client.requests import Requests
from optax_dist.coordinator.protocol.client.submissions import Submissions
from optax_dist.coordinator.protocol.codec import replace
from optax_dist.coordinator.protocol.config import Config, Me
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import (
  Committed,
  Ended,
  Removed,
)
from optax_dist.coordinator.protocol.inputs import Input
from optax_dist.ledger import Spans
from optax_dist.ledger import spans as sp


class Client:
  """The protocol core of a replica's process.

  Attributes:
    incarnation: incarnation of the membership; -1 for none.
    over: whether the replica has ended: failed, finished, left, or aborted.
  """

  def __init__(self, config: Config, me: Me):
    """Starts without a membership.

    Args:
      config: the run's.
      me: which replica this is.
    """
    self._config, self._me = config, me
    self._out: list[Effect] = []
    self.over = False
    self._connection = CoordinatorConnection(
      config.deadlines, me.coordinator_address
    )
    self.submissions = Submissions()
    self.applier = Applier(
      me.start,
      config.rules.fingerprint_every,
      me.wants_inner,
      self.submissions,
      self._out,
      self._send,
    )
    data, k = config.job.data, config.rules.replicas_to_aggregate
    unit = 0 if data is None else data.unit(k)
    self._known = Known(me.process, me.start, unit > 0, self._out)
    self._requests = Requests(me.process, config.deadlines)
    # When the replica will have waited for too long, and the step of its state then: a
    # new step starts a new wait.
    self._wait_by, self._waits_at = math.inf, -1
    # How the run has ended, and until when to wait for the final state, once it was
    # requested or is on its way; infinity before.
    self._ended: Ended | None = None
    self._end_by = math.inf
    # The membership, and the one that the training loop knows of.
    self.incarnation = self._admitted = -1

  @property
  def stalled(self) -> bool:
    """Whether the coordinator has warned that a step takes long."""
    return bool(self._connection.missing)

  @property
  def _connected(self) -> bool:
    """Whether the coordinator has welcomed this replica on a live connection."""
    return self._connection.status == "welcomed"

  def step(self, input_: Input, now: float) -> list[Effect]:
    """Processes an input; returns the effects, in order."""
    if not self.over:
      self._handle(input_, now)
    elif isinstance(input_, ins.Received) and isinstance(
      input_.message, msg.Serve
    ):
      # The replica is done, and serves its final state to others.
      self.applier.serve(input_.message)
    if not self.over:
      self._run_pending(now)
    effects, self._out[:] = self._out[:], []
    return effects

  def deadline(self) -> float:
    """When `TimePassed` must be the next input, at the latest."""
    if self.over:
      return math.inf
    connection = self._connection
    return min(
      self._requests.leave_by,
      self._end_by,
      self._wait_by,
      connection.call_at,
      connection.answer_by,
      connection.warn_at,
    )

  def _run_pending(self, now: float) -> None:
    """Does what follows from an input, and from the time."""
    connection = self._connection
    if now >= connection.answer_by:
      self._disconnect("no answer", now)
    if now >= connection.warn_at:
      connection.warn_at, connection.has_warned = math.inf, True
      self._warn_of_coordinator(
        f"is gone ({connection.trouble}): replica {self._me.replica!r} goes"
        f" on, and waits for it for at most {self._config.deadlines.replica:.0f} s"
      )
    if self._admitted != self.incarnation:
      self._admit(now)
    if self._ended is not None:
      self._end(self._ended, now)
    if self.over:
      return
    if now >= self._requests.leave_by:
      self._leave()
      return
    if now >= connection.call_at:
      self._call(now)
    self._check_waiting(now)

  def _handle(self, input_: Input, now: float) -> None:
    match input_:
      case ins.Started():
        self._call(now)
      case ins.TimePassed():
        pass
      case ins.Received(peer, message):
        self._receive(peer, message, now)
      case ins.Malformed(peer, error):
        self._out.append(fx.Log(f"{peer} sent nonsense: {error}"))
        self._out.append(fx.Send((peer,), msg.Rejected(error)))
        if peer == self._me.coordinator and self._connection.status == "called":
          self._fail("JoinRefused", _unread("its answer can't be read", error))
      case ins.PeerLost(peer, how, reason):
        if peer == self._me.coordinator:
          self._lost(how, reason, now)
      case ins.SnapshotFetched():
        self.applier.fetched(input_)
      case ins.SnapshotFailed():
        self.applier.fetch_failed(input_)
      case msg.Done():
        self.applier.aggregated(input_)
      case msg.Failed():
        self.applier.aggregate_failed(input_)
      case msg.SubmitGradient():
        self._submit(input_)
      case msg.Leave(lost=True):
        self._send(input_)
        self._stop()
      case msg.SetHyperparams(values):
        self._request(self._requests.hyperparams(values), now)
      case msg.Fingerprint(step) if not self.applier.fingerprints.counts(step):
        pass
      case msg.Leave() | msg.Finish() | msg.Save() | msg.Fingerprint():
        # If it is no member now, it has to become one before it may leave: other
        # replicas may wait for it.
        self._request(input_, now)
      case _:
        assert_never(input_)

  # The coordinator.

  def _call(self, now: float) -> None:
    """Asks for membership, on a new connection."""
    me = self._me
    self._connection.call(now)
    applier, known = self.applier, self._known
    self._out.append(fx.Connect(me.coordinator, me.coordinator_address))
    if applier.start is None:
      applier.start = known.offer(applier.step)
    submitted = [s.data for s in self.submissions.unresolved.values()]
    hello = msg.Hello(
      self._config.job,
      me.replica,
      me.address,
      applier.start,
      known.epoch,
      self.incarnation,
      known.beginnings,
      known.read,
      applier.step if applier.belongs_to_run else -1,
      sp.union(known.lease, *submitted),
      me.follows,
      known.since(now),
      known.compute,
      known.nonce,
    )
    self._out.append(fx.Send((me.coordinator,), hello))

  def _lost(self, how: str, reason: str, now: float) -> None:
    """Handles the loss of the connection, which may be the coordinator's death."""
    if self._connection.status == "lost":
      return
    if how == "refused" and self._known.epoch < 0:
      where = f"the coordinator at {self._me.coordinator_address}"
      self._fail("JoinRefused", f"No connection with {where}: {reason}.")
      return
    self._disconnected(reason, now)

  def _warn_of_coordinator(self, what: str) -> None:
    text = f"the coordinator at {self._me.coordinator_address} {what}"
    self._out.append(fx.Log(text))

  def _disconnect(self, reason: str, now: float, removed: bool = False) -> None:
    """Closes the connection, and calls again after a pause."""
    self._out.append(fx.Disconnect(self._me.coordinator, reason))
    self._disconnected(reason, now, removed)

  def _disconnected(
    self, reason: str, now: float, removed: bool = False
  ) -> None:
    if self._connected:
      self._end_by = math.inf  # The next coordinator gets the whole time again.
    self._connection.lost(reason, now, removed)
    self.applier.disconnected()

  def _welcomed(self, welcome: msg.Welcome, now: float) -> None:
    """Takes part from now on, as the same member or as a new one."""
    if welcome.epoch < self._known.epoch:
      self._disconnect("another coordinator has started since", now)
      return
    if self._connection.has_warned:
      self._warn_of_coordinator("is there again")
    self._connection.welcome()
    # The incarnation alone is not enough: other logs have the same numbers.
    stays = not welcome.anew and welcome.incarnation == self.incarnation >= 0
    first = self._known.epoch < 0
    # Whether the replica knows all commits now; the coordinator keeps only the latest.
    is_whole = not welcome.anew and self._known.read == welcome.step
    self._known.welcomed(welcome, not stays, now)
    # The run may have begun again, or its log may have lost steps.
    self._out += self.submissions.revoked(welcome.step)
    if not is_whole:
      # Submissions may be in a commit that this replica will never get.
      self._out += self.submissions.lost(quorum.Reason.LOST.value)
      self.applier.skip()
    if welcome.anew:
      self.applier.begin_anew()
    if not stays:
      self._end_membership()
      if welcome.incarnation < 0:
        return
      self._out += self.submissions.lost(quorum.Reason.LOST.value)
      self.incarnation = welcome.incarnation
      self._wait_by = math.inf
      self._requests.joined()
    self.applier.begin(welcome.origin, welcome.step, welcome.alone)
    if welcome.anew and not first and not self.applier.belongs_to_run:
      text = "the run goes on from another replica's state, not that of step"
      text += f" {self.applier.step}, which replica {self._me.replica!r} has"
      self._out.append(fx.Log(text))
    self.applier.report_state()
    self._requests.are_set(welcome.changes)
    for request in self._requests.all():
      self._request(request, now)
    # Last, so that hyperparameters that were set before these submissions are in their
    # commit.
    for submitted in self.submissions.unresolved.values():
      self._arrive(submitted)

  def _request(self, message: msg.Message, now: float) -> None:
    """Sends a request, and keeps it: a coordinator that starts again gets it again."""
    self._send(self._requests.add(message, now))

  def _send(self, message: msg.Message) -> bool:
    """Sends to the coordinator, if it is connected; returns whether it is."""
    if connected := self._connected:
      self._out.append(fx.Send((self._me.coordinator,), message))
    return connected

  # Messages.

  def _receive(
    self, peer: str, message: msg.Message | Committed, now: float
  ) -> None:
    if isinstance(message, msg.Rejected):
      text = f"{peer} has rejected a message: {message.reason}"
      self._out.append(fx.Log(text))
      if peer == self._me.coordinator and self._connection.status == "called":
        text = _unread("it can't read the call", message.reason)
        self._fail("JoinRefused", text)
      return
    if peer != self._me.coordinator or not isinstance(
      message, msg.FromCoordinator
    ):
      kind = type(message).__name__
      text = f"{kind} of a process that is no coordinator"
      self._out.append(fx.Log(f"{peer} sent a forged message: {text}"))
      self._out.append(fx.Send((peer,), msg.Rejected(text)))
      return
    self._connection.last_message = now, type(message).__name__
    # Any message shows that the coordinator has the call; its answer may have to wait.
    self._connection.answer_by = math.inf
    match message:
      case msg.Welcome():
        if self._connection.status == "called":
          self._welcomed(message, now)
      case Committed():
        self._committed(message, now)
      case Removed(incarnation, left, reason):
        if incarnation == self.incarnation:
          self._removed(left, reason, now)
      case Ended():
        self._ended = message
        self._out += self.submissions.lost(quorum.Reason.FINISHED.value)
      case msg.Round():
        self.applier.means.announced(message, self.incarnation)
      case msg.Cancel(round_):
        self.applier.means.cancelled(round_)
      case msg.Dropped(sequence, reason, count, lease):
        self._known.lease_to(self.incarnation, lease)
        self._known.request(count)
        self._out += self.submissions.dropped(sequence, reason)
      case msg.RequestGradients(sequence, count, lease):
        self._requested(sequence, count, lease)
      case msg.Call():
        self._out.append(message)
      case msg.Serve():
        self.applier.serve(message)
      case msg.Fetch():
        self.applier.fetch(message)
      case msg.Report():
        self.applier.report(message)
      case msg.Stalled(step, waited, missing):
        self._connection.missing = missing
        text = f"step {step} has taken {waited:.1f} s so far: {missing}"
        self._out.append(fx.Log(text if waited else missing))
      case msg.Refused(reason, again):
        if again:
          self._fail("CoordinatorError", reason, final=False)
        else:
          replica = self._me.replica
          text = f"The job refuses replica {replica!r}: {reason}."
          self._fail("JoinRefused", text)
      case _:
        assert_never(message)

  def _requested(self, sequence: int, count: int, lease: Spans) -> None:
    """Notes what to compute next, unless a later commit has said otherwise."""
    deterministic = self._config.deterministic
    if lease or deterministic:
      self._known.lease_to(self.incarnation, lease)
    if sequence < 0 or sequence in self.submissions.unresolved:
      self._known.request(count)
    self._out += self.submissions.asked_for_more(sequence)

  def _committed(self, commit: Committed, now: float) -> None:
    if commit.round.step != self._known.read:
      return  # Only a faulty coordinator repeats a commit, or leaves one out.
    self._connection.missing = ""
    incarnation = self.incarnation
    self._known.committed(commit, incarnation, self.applier.step, now)
    if commit.save or commit.changes:
      self._requests.committed(commit)
    self.submissions.committed(commit, incarnation)
    self.applier.committed(commit)

  # Membership.

  def _end_membership(self) -> None:
    if self._admitted == self.incarnation >= 0:
      self._out.append(fx.Suspended())
    self.incarnation = self._admitted = -1
    self._known.lease = ()
    self.applier.end()

  def _removed(self, left: bool, reason: str, now: float) -> None:
    self._out += self.submissions.lost(quorum.Reason.LOST.value)
    self._end_membership()
    if left:
      self._leave()
      return
    self._out.append(
      fx.Log(
        f"replica {self._me.replica!r} was removed ({reason}); it joins again",
      )
    )
    self._disconnect("it was removed", now, removed=True)

  def _admit(self, now: float) -> None:
    """Notifies the training loop, once the replica is a member and has the state."""
    applier, joined = self.applier, self.incarnation
    if joined >= 0 and applier.is_usable:
      self._admitted = joined
      ends_in = self._known.ends_in(applier.step, now)
      self._out.append(fx.Admitted(joined, ends_in))

  def _leave(self) -> None:
    self._out.append(fx.Left())
    self._stop()

  # The training loop.

  def _submit(self, submitted: msg.SubmitGradient) -> None:
    if self._ended is not None:
      reason = quorum.Reason.FINISHED
    elif not submitted.incarnation == self._admitted == self.incarnation:
      reason = quorum.Reason.LOST
    else:
      self._known.compute = submitted.compute or 0.0
      self.submissions.submit(submitted)
      self._arrive(submitted)
      return
    self._out.append(fx.Resolved(submitted.sequence, reason.value, 0))

  def _arrive(self, submitted: msg.SubmitGradient) -> None:
    """Sends a submission, and begins an early round with it."""
    if not self._connected:
      return  # It is sent once the replica is connected (`_welcomed`).
    step, early = self.applier.step, None
    if (
      submitted.finite and submitted.count == 1 and submitted.local_step == step
    ):
      early = self.applier.begin_early(self.incarnation, submitted.sequence)
    self._send(replace(submitted, applied=step, early=early))

  # Ends.

  def _end(self, ended: Ended, now: float) -> None:
    applier = self.applier
    applier.apply_ready_commits()
    if ended.error:
      diverged = ended.error == "Diverged"
      self._fail("Diverged" if diverged else "CoordinatorError", ended.reason)
    elif applier.is_usable and applier.step >= ended.step:
      self._out += self.submissions.lost("finished", counted=True)
      self._out.append(fx.Finished(ended.reason))
      self._stop()
    elif not applier.is_stuck_without_snapshot:
      self._end_by = math.inf
    elif math.isinf(self._end_by):
      self._end_by = now + self._config.deadlines.transfer
      applier.mark_stale("the run has ended")
      applier.request_snapshot()
    elif now >= self._end_by:
      replica = self._me.replica
      lacks = f"has only the parameters of step {applier.step}"
      if not applier.belongs_to_run:
        lacks = "has received none of its parameters"
      self._fail(
        "RunFinished",
        f"The run has ended ({ended.reason}) at step {ended.step}, and replica "
        f"{replica!r} {lacks}: no replica is left that could send the final "
        "ones. They are in the last checkpoint; a job that is to train on needs "
        "a coordinator, or a run name, of its own.",
      )

  def _fail(
    self,
    error: Literal[
      "CoordinatorError", "JoinRefused", "RunFinished", "Diverged"
    ],
    reason: str,
    final: bool = True,
  ) -> None:
    self._out.append(fx.Fail(error, reason, final))
    self._out += self.submissions.lost(quorum.Reason.LOST.value, counted=True)
    self._stop()

  def _stop(self) -> None:
    self.over = True
    self._connection.close()

  def _check_waiting(self, now: float) -> None:
    """Fails if the replica has waited too long, whatever the coordinator says."""
    waits = (
      self._admitted < 0
      or self.submissions.waits
      or not self.applier.current
      or self._requests.ends
      or self._ended is not None
    )
    limit, step = self._config.deadlines.replica, self.applier.step
    if not waits:
      self._wait_by = math.inf
    elif math.isinf(self._wait_by) or self._waits_at != step:
      self._wait_by, self._waits_at = now + limit, step
    elif now >= self._wait_by:
      waited = f"has waited {now - self._wait_by + limit:.1f} s"
      self._fail(
        "CoordinatorError",
        f"Replica {self._me.replica!r} {waited} {self.missing(now)}.",
        final=False,
      )

  def missing(self, now: float) -> str:
    """What this replica waits for, and why it is missing, human-readable."""
    awaited = self.applier.awaits
    if self.incarnation < 0:
      what = "for admission to the run"
    elif awaited:
      what = f"for {awaited}"
    elif self.submissions.waits:
      what = f"for the commit of step {self._known.read}"
    elif msg.Leave in self._requests:
      what = "for the confirmation that it may leave"
    elif msg.Finish in self._requests or self._ended is not None:
      what = "for the end of the run"
    else:
      what = f"for nothing (it has step {self.applier.step})"
    return self._connection.why(what, now)


def _unread(what: str, error: str) -> str:
  """The error text for a coordinator that has another version."""
  return (
    f"The coordinator has another version of optax_dist, as {what} ({error}); this"
    f" is {optax_dist.__version__}. Install the same one for all."
  )
