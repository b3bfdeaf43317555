"""From commits to the replica's state: attempts, means, updates, snapshots.

The log has the decisions, this applies them: in order, each commit once, as
soon as its mean is here. If possible, a mean is applied to a speculative state
before its commit is known. A replica that can't get a mean any more needs a
snapshot, and continues from there.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import (
  AttemptId,
  Committed,
  Hyperparams,
  Incarnation,
  Member,
  Part,
)
from optax_dist.coordinator.protocol.follower.session import Session
from optax_dist.coordinator.protocol.inputs import (
  Aggregated,
  AggregateFailed,
  SnapshotFailed,
  SnapshotFetched,
)
from optax_dist.coordinator.protocol.membership import Start, View
from optax_dist.coordinator.protocol.messages import (
  Applied,
  Attempt,
  Done,
  Failed,
  Fetch,
  Message,
  NeedsSnapshot,
  Report,
  Serve,
)

# Number of means kept for readers that are slightly behind.
KEPT = 2

Tell: TypeAlias = Callable[[Message], None]


@dataclasses.dataclass(slots=True)
class _Work:
  """An aggregation in which this replica takes part."""

  parts: tuple[Part, ...]
  answers: bool
  lag: int = 0
  status: Literal["runs", "done", "failed"] = "runs"
  committed: bool = False


class Applier:
  """The core's view of the replica's state.

  Attributes:
    step: the step of the published state.
    sound: whether that state belongs to the run.
    start: the start state that it is; None once it is a later one.
    needs: whether it needs a snapshot, and why; "" if it doesn't.
  """

  def __init__(
    self, config: Config, session: Session, out: list[Effect], tell: Tell
  ):
    """Starts with a state.

    Args:
      config: configuration of the replica.
      session: told which steps are published.
      out: the list to which effects are appended.
      tell: sends a message to the leader, if there is one.
    """
    self._config, self._session, self._out = config, session, out
    self._tell = tell
    self.step = config.step
    self.sound = False
    self.needs = ""
    self.start: Start | None = Start(
      config.step, config.digest, config.progress, config.lineage
    )
    # The run's start state, until there is a step.
    self._origin: Start | None = None
    self._todo: collections.deque[Committed] = collections.deque()
    # The attempt whose mean is applied to a speculative state.
    self._ahead: AttemptId | None = None
    self._work: dict[AttemptId, _Work] = {}
    self._fetch: Fetch | None = None
    self._serves: list[Serve] = []
    self._report = -1
    # Whether it has never had the run's state, and whether a snapshot is needed for
    # the state of the replica's own optimizer alone.
    self._is_new, self._needs_inner = True, False

  # Membership of the run.

  @property
  def current(self) -> bool:
    """Whether the state is the run's, with everything applied that was read."""
    return self.sound and not self.needs and not self._todo

  @property
  def awaits(self) -> str:
    """What it waits for to have the latest state; "" for nothing."""
    if self.needs:
      source = (
        self._fetch.source if self._fetch is not None else "no replica yet"
      )
      return f"a snapshot ({self.needs}; served by {source})"
    if self._todo:
      commit = self._todo[0]
      members = ", ".join(str(part.replica) for part in commit.parts)
      return (
        f"the mean of step {commit.attempt.step}, of the gradients of replicas "
        f"{members}"
      )
    return ""

  @property
  def hopeless(self) -> bool:
    """Whether nothing is in progress that could advance the state."""
    if self._fetch is not None:
      return False
    if self.needs or not self._todo or not self.sound:
      return True
    work = self._work.get(self._todo[0].attempt)
    runs = work is not None and work.status == "runs"
    return not runs and self._todo[0].mean is None

  def begin(self, view: View, step: int) -> None:
    """Joins at a step of the run, or needs a snapshot.

    Args:
      view: what the log has decided.
      step: where the run was as the membership began: commits of the same record
        may follow, and are told one by one.
    """
    self._origin = view.origin if view.untouched else None
    if self.start is not None:
      self.sound = self.start == view.origin
    if not self.sound:
      self._need("its state is not the run's")
    elif not self._todo and self.step != step:
      self._need(f"it is at step {self.step} of {step}")
    elif (
      self._is_new
      and self._config.wants_inner_state
      and not view.untouched
      and len(view.members) > 1
    ):
      self._needs_inner = True
      self._need("it has no state of its own optimizer yet")
    else:
      self._is_new = False
    self.pump()
    if self.sound and not self.needs:
      self._tell(Applied(self.step))

  def start_anew(self) -> None:
    """The run has restarted from another state, before its first step."""
    self.end()
    self._todo.clear()
    self.sound = False

  def skip(self) -> None:
    """Handles a gap: part of the log was not read."""
    self.end()
    self._todo.clear()

  def end(self) -> None:
    """The replica is no longer a member, or will rejoin.

    Reported means are kept, since they may still be committed.
    """
    for attempt, work in list(self._work.items()):
      if not work.committed and not (work.answers and work.status == "done"):
        self._drop(attempt)
    self.new_leader()
    self.needs = ""

  # Attempts.

  def attempt(
    self,
    message: Attempt,
    me: Incarnation,
    members: Mapping[Incarnation, Member],
  ) -> None:
    """Takes part in an attempt, as a member or a reader."""
    attempt = message.attempt
    for other in list(self._work):
      if other.step == attempt.step and not self._work[other].committed:
        self._drop(other)
    incarnations = [part.incarnation for part in message.parts]
    reads = me in message.readers
    if me not in incarnations and not reads:
      return
    involved = {*incarnations, *message.readers}
    if not involved <= members.keys():
      self._tell(Failed(attempt, None, "it knows of other members"))
      return
    index = None if reads else incarnations.index(me)
    if index is not None:
      sequence = message.parts[index].sequence
      if self._session.find(sequence) is None:
        self._tell(Failed(attempt, None, "it has no such gradient"))
        return
    answers = index is not None or me == message.witness
    self._work[attempt] = _Work(message.parts, answers, message.lag)
    peers, readers = (
      tuple(members[i] for i in some)
      for some in (incarnations, () if reads else message.readers)
    )
    self._out.append(
      fx.Aggregate(attempt, message.parts, peers, readers, index)
    )

  def optimistic(
    self,
    attempt: AttemptId,
    parts: tuple[Part, ...],
    me: Incarnation,
    members: Mapping[Incarnation, Member],
  ) -> None:
    """Aggregates with all members before the leader has announced it."""
    self.attempt(Attempt(attempt, parts, (), None, 0), me, members)

  def aggregated(self, done: Aggregated) -> None:
    """Handles a mean that is here."""
    work = self._work.get(done.attempt)
    if work is None or work.status == "failed":
      # It was released while its mean came.
      self._out.append(fx.Release(done.attempt))
      return
    work.status = "done"
    if work.answers:
      self._tell(Done(done.attempt))
    if self.current and done.attempt.step == self.step:
      self._apply(done.attempt)
    self.pump()

  def aggregate_failed(self, failed: AggregateFailed) -> None:
    """Handles a mean that will not come."""
    work = self._work.get(failed.attempt)
    if work is None:
      return
    work.status = "failed"
    if work.answers and not work.committed:
      self._tell(Failed(failed.attempt, failed.failed_replica, failed.reason))
    self.pump()

  def removed(self, incarnation: Incarnation) -> None:
    """Handles the loss of a member, whose bytes will not come."""
    for attempt, work in list(self._work.items()):
      if work.status == "runs" and any(
        part.incarnation == incarnation for part in work.parts
      ):
        self._out.append(fx.Release(attempt))
        reason = "it is a member no more"
        self.aggregate_failed(AggregateFailed(attempt, incarnation, reason))

  def left_alone(self) -> None:
    """No other member is there: none can serve what the log does not have."""
    if self._needs_inner and self.needs:
      self._is_new = self._needs_inner = False
      self.needs, self._fetch = "", None
      self.pump()
      if not self.needs:
        self._tell(Applied(self.step))

  def _drop(self, attempt: AttemptId) -> None:
    del self._work[attempt]
    self._out.append(fx.Release(attempt))
    if self._ahead == attempt:
      self._ahead = None

  # Commits.

  def committed(self, commit: Committed) -> None:
    """Queues a commit, to be applied in order."""
    work = self._work.get(commit.attempt)
    if work is not None:
      work.committed = True
    self._todo.append(commit)
    self.pump()

  def pump(self) -> None:
    """Applies all commits that can be applied."""
    while self._todo:
      commit = self._todo[0]
      step = commit.attempt.step
      if step < self.step and self.sound:
        # A snapshot already included it.
        self._todo.popleft()
        self._out += self._session.published(self.step)
        continue
      if not self.sound or self.needs or not self._take(commit):
        return
      self._todo.popleft()
      self._publish(commit)

  def _take(self, commit: Committed) -> bool:
    """Computes the state after a commit, or sets why it can't."""
    step = commit.attempt.step
    if step > self.step:
      self._need(f"it is at step {self.step} of {step}")
      return False
    hyperparams = commit.hyperparams
    if commit.mean is not None:
      self._out.append(fx.Apply(commit.mean, hyperparams))
      return True
    work = self._work.get(commit.attempt)
    if work is None or work.status == "failed":
      self._need(f"it could not have the mean of step {step}")
      return False
    if work.status == "runs":
      return False
    # What was applied ahead of the commit could not know of these.
    if self._ahead != commit.attempt or hyperparams:
      self._apply(commit.attempt, hyperparams)
    return True

  def _apply(self, attempt: AttemptId, hyperparams: Hyperparams = ()) -> None:
    self._ahead = attempt
    self._out.append(fx.Apply(attempt, hyperparams))

  def _publish(self, commit: Committed) -> None:
    self._ahead = None
    self.start = None
    self.step += 1
    self._out.append(fx.Publish(self.step, commit.save))
    every = self._config.fingerprint_every
    if every and self.step % every == 0:
      self._out.append(fx.TakeFingerprint(self.step))
    self._arrived_at_step()

  def _arrived_at_step(self) -> None:
    self._out += self._session.published(self.step)
    for attempt, work in list(self._work.items()):
      kept = attempt.step + KEPT + work.lag if work.committed else attempt.step
      if kept < self.step:
        self._drop(attempt)
    for serve in self._serves[:]:
      self._serve(serve)
    if 0 <= self._report <= self.step:
      self._report = -1
      self._tell(Applied(self.step))

  # Snapshots.

  def _need(self, why: str) -> None:
    if not self.needs:
      self.lack(why)
      self.ask()

  def lack(self, why: str) -> None:
    """Notes that it needs a snapshot, if it wasn't noted before."""
    if not self.needs:
      self._ahead = None
      self.needs = why

  def tell_state(self) -> None:
    """Tells the leader which state is here: it may have come since the call."""
    if self.sound and not self.needs:
      self._tell(Applied(self.step))
    self.ask()

  def ask(self) -> None:
    """Asks the leader for a snapshot, if one is needed."""
    if self.needs and self._fetch is None:
      self._tell(NeedsSnapshot(self.step))

  def new_leader(self) -> None:
    """Drops the requests of the old leader."""
    self._fetch, self._serves, self._report = None, [], -1

  def report(self, message: Report) -> None:
    """Reports once it has the requested step."""
    if self.sound and not self.needs and self.step >= message.step:
      self._tell(Applied(self.step))
    else:
      self._report = message.step

  def serve(self, message: Serve) -> None:
    """Serves a snapshot, as soon as it can."""
    self._serves.append(message)
    self._serve(message)

  def _serve(self, serve: Serve) -> None:
    if self.sound and not self.needs and self.step >= serve.at_least:
      self._serves.remove(serve)
      self._out.append(
        fx.ServeSnapshot(serve.transfer, serve.to, serve.address, self.step)
      )

  def fetch(self, message: Fetch) -> None:
    """Fetches a snapshot, if it still needs one."""
    if not self.needs:
      self._tell(Applied(self.step))
      return
    self._fetch = message
    self._out.append(
      fx.FetchSnapshot(message.transfer, message.source, message.address)
    )

  def fetched(self, found: SnapshotFetched) -> None:
    """Handles a snapshot that is here."""
    fetch = self._fetch
    if fetch is None or found.transfer != fetch.transfer or not self.needs:
      return
    self._fetch = None
    self.needs, self.sound = "", True
    self._is_new = self._needs_inner = False
    origin = self._origin
    began = origin is not None and origin.step == found.step
    self.start = origin if began else None
    self._ahead = None
    self.step = found.step
    self._out.append(fx.Restore(found.step, found.transfer))
    self._arrived_at_step()
    self.pump()
    if not self.needs:
      self._tell(Applied(self.step))

  def fetch_failed(self, failed: SnapshotFailed) -> None:
    """Handles a failed snapshot: asks for another one."""
    if self._fetch is not None and failed.transfer == self._fetch.transfer:
      self._fetch = None
      self.needs = f"the snapshot failed: {failed.reason}"
      self.ask()
