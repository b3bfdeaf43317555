"""From commits to the replica's state: rounds, means, updates, snapshots.

The coordinator decides, the `Applier` applies: in order, each commit once, as soon as
its mean is here. If possible, a mean is applied to a speculative state before its
commit is known. A replica that can't get a mean any more needs a snapshot, and
continues from that state.
"""

from __future__ import annotations

import collections

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol.client.fingerprints import Fingerprints
from optax_dist.coordinator.protocol.client.means import Means, SendMessage
from optax_dist.coordinator.protocol.client.submissions import Submissions
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import (
  Committed,
  Hyperparams,
  Incarnation,
  RoundId,
  Start,
)
from optax_dist.coordinator.protocol.inputs import (
  SnapshotFailed,
  SnapshotFetched,
)
from optax_dist.coordinator.protocol.messages import (
  Applied,
  Done,
  Failed,
  Fetch,
  NeedsSnapshot,
  Report,
  Serve,
)


class Applier:
  """The core's view of the replica's state.

  Attributes:
    step: the step of the published state.
    belongs_to_run: whether that state belongs to the run.
    start: that state as a start state of the run; None once it was advanced.
    means: the rounds in which it takes part.
    needs: why it needs a snapshot; "" if it needs none.
    fingerprints: says which states get a fingerprint.
  """

  def __init__(
    self,
    start: Start,
    fingerprint_every: int,
    wants_inner: bool,
    submissions: Submissions,
    out: list[Effect],
    send: SendMessage,
  ):
    """Starts with a state.

    Args:
      start: the state.
      fingerprint_every: steps between fingerprints; 0 for none.
      wants_inner: whether a replica that joins later needs a snapshot even if the
        log has all means: only a snapshot has the state of a replica's own optimizer.
      submissions: notified of each published step.
      out: the list to which effects are appended.
      send: sends a message to the coordinator; returns whether it could.
    """
    self._submissions, self._out, self._send = submissions, out, send
    self.fingerprints = Fingerprints(fingerprint_every)
    self.step = start.step
    self.belongs_to_run = False
    self.needs = ""
    self.start: Start | None = start
    self._todo: collections.deque[Committed] = collections.deque()
    self.means = Means(out, send)
    # Requests of the coordinator that wait for a step: to serve snapshots, and to
    # report that the step is reached.
    self._serves: list[Serve] = []
    self._report = -1
    # Whether it has requested a snapshot, and the snapshot that it fetches.
    self._has_requested = False
    self._fetch: Fetch | None = None
    # Whether it wants the state of another replica's own optimizer, and lacks it.
    self._lacks_inner = wants_inner

  # Membership of the run.

  @property
  def current(self) -> bool:
    """Whether the state is the run's, and all known commits are applied."""
    return self.is_usable and not self._todo

  @property
  def is_usable(self) -> bool:
    """Whether the state is one of the run's, though perhaps not the latest."""
    return self.belongs_to_run and not self.needs

  @property
  def awaits(self) -> str:
    """What the replica waits for to get the latest state; "" for nothing."""
    if self.needs:
      source = (
        self._fetch.source if self._fetch is not None else "no replica yet"
      )
      return f"a snapshot ({self.needs}; served by {source})"
    if self._todo:
      commit = self._todo[0]
      members = ", ".join(str(part.replica) for part in commit.parts)
      return (
        f"the mean of step {commit.round.step}, of the gradients of replicas "
        f"{members}"
      )
    return ""

  @property
  def is_stuck_without_snapshot(self) -> bool:
    """Whether nothing is in progress that could advance the state."""
    if self._fetch is not None:
      return False
    if not self.is_usable or not self._todo:
      return True
    runs = self.means.status(self._todo[0].round) == "runs"
    return not runs and self._todo[0].mean is None

  def begin(self, origin: Start, step: int, alone: bool) -> None:
    """Takes part from the run's current step on, or needs a snapshot.

    Args:
      origin: the state that the run began from.
      step: the step that the run is at; commits before it were queued, unless some
        were skipped.
      alone: whether there is no other member, which could serve a snapshot.
    """
    if not self.belongs_to_run and self.start is not None:
      self.belongs_to_run = self.start.is_same(origin)
    if not self.belongs_to_run:
      self.mark_stale("its state is not the run's")
    elif not self._todo and self.step != step:
      self.mark_stale(f"it is at step {self.step} of {step}")
    elif self._lacks_inner and not alone and step != origin.step:
      self.mark_stale("it has no state of its own optimizer yet")
    else:
      self._lacks_inner = False
    self.apply_ready_commits()

  def begin_anew(self) -> None:
    """Notes that its state is not, or no longer, a state of this run."""
    self.belongs_to_run = False
    self.fingerprints.forget()

  def skip(self) -> None:
    """Handles a gap: some commits will never reach this replica."""
    self.end()
    self._todo.clear()

  def end(self) -> None:
    """The replica is no longer a member, or will join again."""
    self.means.end()
    self.disconnected()
    self.needs = ""

  # Rounds.

  def begin_early(self, me: Incarnation, sequence: int) -> RoundId | None:
    """Begins the early round of this step with a gradient; see `Means`."""
    if self.current:
      return self.means.begin_early(me, sequence, self.step)
    self.means.forget_early()
    return None

  def aggregated(self, done: Done) -> None:
    """Handles a mean that has arrived."""
    if not self.means.aggregated(done):
      return
    if self.current and done.round.step == self.step:
      self._apply(done.round)
    self.apply_ready_commits()

  def aggregate_failed(self, failed: Failed) -> None:
    """Handles a failed aggregation, whose mean will not arrive."""
    self.means.failed(failed)
    self.apply_ready_commits()

  # Commits.

  def committed(self, commit: Committed) -> None:
    """Queues a commit, to be applied in order."""
    self.means.committed(commit.round)
    self._todo.append(commit)
    self.apply_ready_commits()

  def apply_ready_commits(self) -> None:
    """Applies all commits that can be applied."""
    while self._todo:
      commit = self._todo[0]
      step = commit.round.step
      if step < self.step and self.belongs_to_run:
        # A snapshot already included this commit.
        self._todo.popleft()
        self._out += self._submissions.published(self.step)
        continue
      if not (self.is_usable and self._apply_commit(commit)):
        return
      self._todo.popleft()
      self._publish(commit)

  def _apply_commit(self, commit: Committed) -> bool:
    """Computes the state after a commit; returns whether it could.

    If it never can, it requires a snapshot.
    """
    step = commit.round.step
    if step > self.step:
      self._require_snapshot(f"it is at step {self.step} of {step}")
      return False
    hyperparams = commit.hyperparams if commit.changes else ()
    if commit.mean is not None:
      self._out.append(fx.Apply(commit.mean, hyperparams))
      return True
    status = self.means.status(commit.round)
    if status is None or status == "failed":
      self._require_snapshot(f"it could not have the mean of step {step}")
      return False
    if status == "runs":
      return False
    # A mean that was applied ahead of the commit was applied without the commit's
    # hyperparameters, so it has to be applied again.
    if self.means.ahead != commit.round or hyperparams:
      self._apply(commit.round, hyperparams)
    return True

  def _apply(self, round_: RoundId, hyperparams: Hyperparams = ()) -> None:
    self.means.ahead = round_
    self._out.append(fx.Apply(round_, hyperparams))

  def _publish(self, commit: Committed) -> None:
    self.means.ahead = None
    self.start = None
    self.step += 1
    self._out.append(fx.Publish(self.step, commit.save))
    fingerprints = self.fingerprints
    if fingerprints.every and fingerprints.is_due(self.step):
      self._out.append(fx.TakeFingerprint(self.step))
    self._arrived_at_step()

  def _arrived_at_step(self) -> None:
    self._out += self._submissions.published(self.step)
    self.means.arrived_at(self.step)
    self._answer_requests()

  def _answer_requests(self) -> None:
    """Answers the coordinator's requests that waited for this step."""
    if not self.is_usable:
      return
    if self._serves:
      due = [serve for serve in self._serves if serve.at_least <= self.step]
      self._serves = [serve for serve in self._serves if serve not in due]
      self._out += due
    if 0 <= self._report <= self.step:
      self._report = -1
      self._send(Applied(self.step))

  # Snapshots.

  def _require_snapshot(self, why: str) -> None:
    if not self.needs:
      self.mark_stale(why)
      self.request_snapshot()

  def mark_stale(self, why: str) -> None:
    """Notes why it needs a snapshot, unless a reason was noted before."""
    if not self.needs:
      self.means.ahead = None
      self.needs = why

  def report_state(self) -> None:
    """Reports its step to the coordinator: it may have advanced since `Hello`."""
    if self.is_usable:
      self._send(Applied(self.step))
    self.request_snapshot()

  def request_snapshot(self) -> None:
    """Asks for a snapshot, if one is needed."""
    if self.needs and self._fetch is None and not self._has_requested:
      self._has_requested = self._send(NeedsSnapshot(self.step))

  def disconnected(self) -> None:
    """Drops the requests of a coordinator that is not connected any more."""
    self.means.forget_early()
    self.means.go_on()
    self._serves, self._report = [], -1
    self._has_requested, self._fetch = False, None

  def report(self, message: Report) -> None:
    """Reports once it has the requested step."""
    self._report = message.step
    self._answer_requests()

  def serve(self, message: Serve) -> None:
    """Serves a snapshot, as soon as it can."""
    self._serves.append(message)
    self._answer_requests()

  def fetch(self, message: Fetch) -> None:
    """Fetches a snapshot, if it still needs one."""
    if not self.needs:
      self._send(Applied(self.step))
      return
    self._fetch, self._has_requested = message, False
    self._todo.clear()  # The snapshot will include these steps.
    self.means.snapshot_first()
    self._out.append(message)

  def fetched(self, snapshot: SnapshotFetched) -> None:
    """Handles a snapshot that has arrived."""
    fetch = self._fetch
    if fetch is None or snapshot.transfer != fetch.transfer or not self.needs:
      return
    self._fetch = self.start = self.means.ahead = None
    self.needs, self.belongs_to_run = "", True
    self._lacks_inner = False
    self.step = snapshot.step
    self._out.append(fx.Restore(snapshot.step, snapshot.transfer))
    self._arrived_at_step()
    self.means.go_on()
    self.apply_ready_commits()
    if not self.needs:
      self._send(Applied(self.step))

  def fetch_failed(self, failed: SnapshotFailed) -> None:
    """Handles a failed snapshot: asks for another one."""
    if self._fetch is not None and failed.transfer == self._fetch.transfer:
      self._fetch = None
      self.means.go_on()
      self.needs = f"the snapshot failed: {failed.reason}"
      self.request_snapshot()
