"""The coordinator's guarantees A1 to A10, checked after every event.

The truth is the log as it was first written, position by position: what stands
there later (a record put where an old one was deleted) is nobody's history.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import notes
from optax_dist.coordinator.protocol.entries import (
  Committed,
  Ended,
  Joined,
  Record,
  Removed,
  Term,
  Trimmed,
)
from optax_dist.ledger import spans as sp
from tests.simulation.world import BLOCK

# Seconds after which a request has been overlooked, not delayed.
FORGOTTEN = 5.0


class Violation(AssertionError):
  """A guarantee does not hold; the message names it."""


@dataclasses.dataclass
class _Submission:
  """A gradient, and the outcomes sent to its training loop."""

  submitted: ins.Submitted
  outcome: fx.Resolved | None = None


class Checker:
  """Follows a world, and raises `Violation`."""

  def __init__(self, world: Any):
    self.world = world
    self.setting = world.setting
    self.log: dict[int, Record] = {}
    self.commits: list[Committed] = []
    # Where they stand; and from where on the log is still there.
    self.positions: list[int] = []
    self.trimmed = 0
    self.terms: list[Term] = []
    self.end: Ended | None = None
    # Who has each membership; and all that ever were.
    self.members: dict[int, str] = {}
    self.processes: dict[int, str] = {}
    self.counted: dict[tuple[str, int], Committed] = {}
    # Versions by step, since the run's start.
    self.versions: dict[int, int] = {}
    self.submissions: dict[tuple[str, int], _Submission] = {}
    # Positions of samples in committed steps; and their number, by step.
    self.samples: set[int] = set()
    self.skipped: set[int] = set()
    self.done: dict[int, int] = {0: 0}
    # Why the run ended with an error; "" where nothing excused that. And all that
    # was excused, for whoever counts it.
    self.why_it_ended = ""
    self.excuses: set[str] = set()
    # Replicas that were let go.
    self.gone: set[int] = set()
    # The latest process that left with the latest state, and with no fault about
    # that could excuse it.
    self.left_in_peace = ""
    self.left = 0
    self.lost = 0
    self.written: list[Committed] = []
    self.holders: dict[int, set[str]] = {}
    # Processes that may leave and serve no one, even if they don't know it yet.
    self.let_go: set[str] = set()

  def fail(self, guarantee: str, text: str) -> None:
    raise Violation(f"{guarantee}: {text}")

  # The log.

  def put(self, process: Any, key: str, value: Any) -> None:
    if isinstance(value, Trimmed):
      self.trimmed = max(self.trimmed, (value.block + 1) * BLOCK)
    if not isinstance(value, Record):
      return
    position = int(key.rsplit("/", 1)[1])
    if position in self.log:
      return  # Where an old one was deleted: see `ghosts`.
    if position != len(self.log):
      self.fail("A3", f"a record at {position}, and none before it")
    self.log[position] = value
    for entry in value.entries:
      self.entry(process, value, entry)

  def entry(self, process: Any, record: Record, entry: Any) -> None:
    if self.end is not None and not isinstance(entry, Term):
      self.fail("A3", f"after the end of the run: {entry}")
    match entry:
      case Term():
        if entry.term != len(self.terms):
          self.fail("A3", f"term {entry.term} after {len(self.terms) - 1}")
        self.terms.append(entry)
        if entry.fresh:
          if self.commits:
            self.fail("A3", "a run that has begun begins again")
          self.lost += len(self.members)
          self.members = {}
          self.versions.clear()
          self.holders.clear()
          self.holders[entry.step] = {entry.leader}
        if entry.incarnation not in self.members:
          if entry.incarnation in self.processes:
            self.fail("A5", f"incarnation {entry.incarnation} is given twice")
          self.members[entry.incarnation] = entry.leader
          self.processes[entry.incarnation] = entry.leader
      case Joined(member):
        if member.incarnation in self.processes:
          self.fail("A5", f"incarnation {member.incarnation} is given twice")
        self.members[member.incarnation] = member.process
        self.processes[member.incarnation] = member.process
      case Removed(incarnation, left):
        name = self.members.pop(incarnation, None)
        if left and name is not None:
          self.let_go.add(name)
          self.gone.add(self.world.by_name[name].index)
        self.left += left
        self.lost += not left
      case Committed():
        self.committed(entry)
      case Ended():
        if not entry.error:
          self.nobody_forgotten(process)
        self.end = entry
        if entry.error:
          self.why_it_ended = self.excuse()
        data, needed = self.setting.data, self.setting.needed
        if entry.reason == "all data is used" and data is not None:
          left = data.total - self.done.get(entry.step, 0)
          if left >= needed * data.unit(needed):
            self.fail("A10", f"it ends with {left} samples left")
        if entry.step != len(self.commits):
          self.fail("A3", f"ended at {entry.step} of {len(self.commits)}")
    if not isinstance(entry, Term) and record.term != len(self.terms) - 1:
      self.fail("A3", f"a leader of old writes: {record}")

  def committed(self, commit: Committed) -> None:
    setting, step = self.setting, commit.attempt.step
    if step != len(self.commits):
      self.fail("A3", f"step {step} is committed after {len(self.commits)}")
    self.commits.append(commit)
    self.positions.append(len(self.log) - 1)
    self.data_of(commit)
    total = sum(part.count for part in commit.parts)
    if setting.exact and total != setting.needed:
      self.fail("A10", f"step {step} has {total} of {setting.needed} shares")
    lowered = (setting.lower_on_leave or setting.lower_on_loss) and self.left
    lowered = lowered or (setting.lower_on_loss and self.lost)
    if total < setting.needed and not (
      lowered and setting.needed <= setting.replicas
    ):
      self.fail("A2", f"step {step} has {total} gradients")
    if setting.alone and len(commit.parts) != 1:
      self.fail("A2", f"step {step} has {len(commit.parts)} replicas' work")
    if not commit.inline:
      self.held_by_all(commit)
    for part in commit.parts:
      # It may have gone since it did its part.
      process = self.processes.get(part.incarnation)
      if process is None:
        self.fail("A1", f"step {step} has a gradient of nobody: {part}")
        return
      if not 0 <= step - part.local_step <= setting.max_staleness:
        self.fail("A2", f"step {step} has an old gradient: {part}")
      key = (process, part.sequence)
      if key in self.counted:
        self.fail("A3", f"{key} counts twice, in step {step}")
      self.counted[key] = commit
      found = self.submissions.get(key)
      if found is None:
        self.fail("A1", f"{key} was never submitted")
        return
      submitted = found.submitted
      if (submitted.local_step, submitted.total) != (
        part.local_step,
        part.count,
      ):
        self.fail("A1", f"{key} was {submitted}, and counts as {part}")
      if not submitted.finite:
        self.fail("A1", f"{key} is not finite")
      # "Lost" says that it isn't known; it was given up, and may count yet.
      if found.outcome is not None and found.outcome.reason != "lost":
        self.fail("A7", f"{key} counts, and was told {found.outcome.reason!r}")

  def data_of(self, commit: Committed) -> None:
    """Each sample is in one step, and no epoch begins too early."""
    data, setting = self.setting.data, self.setting
    if data is None:
      return
    step, unit = commit.attempt.step, data.unit(setting.needed)
    found: set[int] = set()
    for part in commit.parts:
      samples = [p for a, b in part.data for p in range(a, b)]
      found.update(samples)
      if len(samples) != part.count * unit:
        self.fail("A10", f"step {step} has {part} of {unit} samples each")
      submitted = self.submissions[
        self.processes[part.incarnation], part.sequence
      ].submitted
      if sp.union(submitted.data) != sp.union(part.data):
        self.fail("A10", f"{part} was computed on {submitted.data}")
    if len(found) != sum(part.count for part in commit.parts) * unit:
      self.fail("A10", f"a sample is twice in step {step}: {commit.parts}")
    if found & (self.samples | self.skipped):
      self.fail("A10", f"samples of step {step} were committed before")
    if data.total is not None and max(found) >= data.total:
      self.fail("A10", f"step {step} has samples of no epoch")
    size = data.per_epoch
    before = max(found) // size * size
    if data.mode == "exact" and found:
      left = before - sum(p < before for p in self.samples | self.skipped)
      if left >= setting.needed * unit:
        self.fail("A10", f"step {step} begins an epoch with {left} left")
    self.samples |= found
    self.skipped |= {p for a, b in commit.skipped for p in range(a, b)}
    self.done[step + 1] = len(self.samples) + len(self.skipped)

  def progressed(self, process: Any, effect: fx.Progressed) -> None:
    """The checkpoint that a replica would write."""
    done = effect.progress.done
    if effect.step > len(self.commits) or done != self.done[effect.step]:
      self.fail("A10", f"{process.name} counts {done} at step {effect.step}")

  def held_by_all(self, commit: Committed) -> None:
    """Each member that lives has the mean of what is committed."""
    for part in commit.parts:
      process = self.world.by_name.get(self.members.get(part.incarnation))
      if process is not None and process.alive and not process.over:
        aggregation = process.aggregations.get(commit.attempt)
        if aggregation is None or len(aggregation.means) < len(commit.parts):
          self.fail("A1", f"{process.name} has no mean of {commit.attempt}")

  # State.

  def published(self, process: Any) -> None:
    step, version = process.step, process.version
    if step > len(self.commits):
      self.fail("A7", f"{process.name} is at step {step}, not committed")
    if self.began_anew_without(process):
      return
    known = self.versions.setdefault(step, version)
    if known != version:
      self.fail("A4", f"{process.name} differs at step {step}")
    self.holders.setdefault(step, set()).add(process.name)

  def began_anew_without(self, process: Any) -> bool:
    """Whether a process hasn't seen a fresh start with another state."""
    known = process.node.follower.view.term
    return any(term.fresh for term in self.terms[known + 1 :])

  def admitted(self, process: Any, effect: fx.Admitted) -> None:
    # One that stalled while the run began anew without it can't know yet.
    current = self.members.get(effect.incarnation) == process.name
    if effect.step == 0 and current:
      known = self.versions.setdefault(0, process.version)
      if known != process.version:
        self.fail("A4", f"{process.name} starts from another state")
    self.holders.setdefault(effect.step, set()).add(process.name)

  # Outcomes.

  def submitted(self, process: Any, submitted: ins.Submitted) -> None:
    key = (process.name, submitted.sequence)
    self.submissions[key] = _Submission(submitted)

  def resolved(self, process: Any, outcome: fx.Resolved) -> None:
    key = (process.name, outcome.sequence)
    found = self.submissions[key]
    if found.outcome is not None:
      self.fail("A7", f"{key} has two outcomes: {found.outcome}, {outcome}")
    found.outcome = outcome
    commit = self.counted.get(key)
    if not outcome.reason:
      if commit is None:
        self.fail("A7", f"{key} was told it counts, and does not")
        return
      if process.step < commit.attempt.step + 1 and not process.error:
        self.fail("A7", f"{key} is told before its step is applied")
      if outcome.step != commit.attempt.step + 1:
        self.fail("A7", f"{key} was told the wrong step: {outcome}")
    elif commit is not None and outcome.reason not in ("lost", "superseded"):
      self.fail("A7", f"{key} counts, and is told {outcome.reason!r}")

  # Waits.

  def no_deadline(self, process: Any) -> None:
    """A process that has nothing to do later must not be waiting."""
    waits = process.suspended or process.pending is not None
    waits = waits or process.waits_for_newer()
    if waits and process.alive and not process.node.follower.over:
      self.fail("A6", f"{process.name} waits without a deadline")

  def nobody_forgotten(self, leader: Any) -> None:
    """A replica that asks for a snapshot is served one, if it can be had."""
    world = self.world
    ready = [p for p in self.within_reach(leader) if not p.over]
    latest = len(self.commits)
    if not any(p.step == latest and p.needs_since == math.inf for p in ready):
      return
    for process in ready:
      since = process.needs_since
      if not self.fetches(process) and since < world.now - FORGOTTEN:
        self.fail("A9", f"{process.name} has needed a snapshot for a while")

  def fetches(self, process: Any) -> bool:
    """Whether a replica is being served a snapshot."""
    return process.fetching is not None

  def within_reach(self, leader: Any) -> list[Any]:
    """Members that nothing has kept from hearing the leader, and from answering."""
    world, found = self.world, []
    since = world.now - FORGOTTEN
    for name in self.members.values():
      process = world.by_name[name]
      connection = process.connections.get(leader.name)
      connected = process is leader or (
        connection is not None
        and all(connection.open.values())
        and world.blocked_until(process, leader) <= since
        and world.blocked_until(leader, process) <= since
      )
      stopped = max(process.paused_until, leader.paused_until)
      busy = max(process.busy_until, leader.busy_until)
      if process.alive and connected and max(stopped, busy) <= since:
        found.append(process)
    return found

  # Journal.

  def journal_opened(self, effect: fx.OpenJournal) -> None:
    last = self.written[-1].attempt.step if self.written else -1
    for commit in effect.commits:
      if commit.attempt.step > last:
        self.note_commit(commit)

  def noted(self, process: Any, note: notes.Note) -> None:
    if isinstance(note, notes.StepCommitted):
      self.note_commit(note.commit)

  def note_commit(self, commit: Committed) -> None:
    step = commit.attempt.step
    if step >= len(self.commits) or (
      self.commits[step].attempt != commit.attempt
    ):
      self.fail("A8", f"the journal tells of step {step}, which is not")
    if step < len(self.written):
      return  # A leader that stalled; the driver sees that it is there already.
    if step != len(self.written):
      self.fail("A8", f"the journal has step {step} after {len(self.written)}")
    self.written.append(commit)

  # Ends.

  def died(self, process: Any) -> None:
    for names in self.holders.values():
      names.discard(process.name)
    if not process.over:
      self.left_in_peace = ""

  def excuse(self) -> str:
    """Why a run may fail as things are now; "" if it may not.

    These are the ways listed on the page of assumptions. Before the first commit
    any state will do, so the death of all is no excuse.
    """
    setting, latest = self.setting, len(self.commits)
    # With the means in the log, an older state will do if the log goes on from it.
    held = max(
      [s for s, names in self.holders.items() if names - self.let_go],
      default=-1,
    )
    goes_on = self.positions[held - 1] + 1 if held > 0 else 0
    replayed = setting.inline and held >= 0 and goes_on >= self.trimmed
    if latest and held < latest and not replayed:
      return "nobody holds the latest state"
    lowered = setting.lower_on_leave or setting.lower_on_loss
    few = setting.replicas - len(self.gone) < setting.needed
    if few and not lowered and setting.needed <= setting.replicas:
      return "too many have left"
    return ""

  def ended(self, process: Any) -> None:
    if process.over == "finished" and (
      self.end is None or process.step != self.end.step
    ):
      self.fail("A7", f"{process.name} has not the final state")
    # What the core has yet to take is answered by the run's end.
    pending = process.pending not in (None, *process.inbox)
    if pending and process.over == "finished":
      self.fail("A7", f"{process.name} ends with {process.pending} open")
    latest = process.step == len(self.commits)
    quiet = process.leaves_since >= self.world.quiet_at
    if process.over == "left" and latest:
      # With faults, it need not wait for long for who can't reach it.
      self.left_in_peace = process.name if quiet else ""
    if process.over == "failed":
      error, reason = process.error
      if error == "Diverged":
        self.fail("A4", reason)
      if error == "JoinRefused":
        self.fail("A9", f"{process.name} is refused: {reason}")
      if "nobody holds" in reason and self.left_in_peace:
        self.fail("A9", f"{self.left_in_peace} left with what others need")
      if error == "CoordinatorError":
        excuse = self.excuse() or self.why_it_ended
        if not excuse:
          self.fail("A9", f"{process.name} fails: {reason}")
        self.excuses.add(excuse)
    self.died(process)

  def finish(self) -> None:
    """At the end of a world whose faults are over: everyone is done."""
    living = [p for p in self.world.all if p.alive and not p.over]
    if living:
      names = ", ".join(p.name for p in living)
      self.fail("A9", f"still at it after {self.world.now:.0f} s: {names}")
