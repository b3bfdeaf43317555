"""The coordinator's guarantees A1 to A22, checked after every event.

In a deterministic run each slot of a step counts once (A18), and the mean is the
same whoever has computed what (A19, where others have A14).

A17, that a silence that ended in a loss does not lengthen the next deadline, is
a rule of the transport, which `World.lose` follows and which
tests/coordinator/transport/test_sockets.py checks.

The truth is the log, as it was appended. What it has lost with its host's power was
nobody's decision, unless a member knows it.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import json
import math
import struct
from typing import Any, NamedTuple

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import journal_events
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.entries import (
  Began,
  Committed,
  Ended,
  Epoch,
  Joined,
  Record,
  Removed,
  RoundId,
)
from optax_dist.coordinator.protocol.history import RECENT
from optax_dist.coordinator.protocol.policies import audit
from optax_dist.ledger import spans as sp
from tests.simulation import inside, journal, sums, transcript
from tests.simulation.world import (
  FASTEST,
  SILENCE_TIMEOUT,
  TIMEOUT,
  TRANSFER_TIMEOUT,
  digest,
)

# Seconds after which a request has been overlooked, not delayed.
FORGOTTEN = 5.0
# Of so many seconds, a member that is given up was not heard for at least so many
# while its coordinator was awake; the loss of its connection counts for as long.
_RECENT, _UNHEARD = 60.0, 1.0
# Seconds after which a coordinator knows of a member's state, and as many times a
# message's latency: some take that long.
_SETTLED, _LATE = 0.5, 20.0
# Two processes with one number take each other's place at most so often.
_PLACES = 2
# Seconds that a step takes at most beside its gradients, if nothing goes wrong.
_STALL = TRANSFER_TIMEOUT
# Seconds after which a process learns that another one has its place, about.
_PLACE_TAKEN = SILENCE_TIMEOUT / FASTEST + FORGOTTEN
# A wish to save is granted before so many steps have been committed.
_SOON = 6
# Steps in which a gradient that is there has an outcome.
_OVERLOOKED = 4
# How often samples give a gradient that is not finite before they are given up.
_STRIKES = 3
# The reason of an end after which samples are missing.
_SKIPPED = "All data is used, but"
# Seconds that a message takes at most, behind others of its connection.
_ON_ITS_WAY = 1.0
# Seconds for which one is away whom the fastest clock says that a run has waited for:
# it may have gone soon after a step, or have come with it and computed its first
# gradient.
_LONGEST = TIMEOUT / FASTEST - 3 * _ON_ITS_WAY


def _members(commit: Committed) -> list[int]:
  return list(dict.fromkeys(part.incarnation for part in commit.parts))


class Violation(AssertionError):
  """A guarantee does not hold; the message names it."""


@dataclasses.dataclass
class _Submission:
  """A gradient, its number, and the outcomes sent to its training loop."""

  submitted: msg.SubmitGradient
  gradient: int
  was_alone: bool
  at: float
  changes: int
  outcome: fx.Resolved | None = None


class _Print(NamedTuple):
  """A fingerprint, when it was taken, and by which process."""

  digest: str
  at: float
  process: str


class Checker:
  """Follows a world, and raises `Violation`."""

  def __init__(self, world: Any):
    self.world = world
    self.setting = world.setting
    self.commits: list[Committed] = []
    # The last request of each process to set hyperparameters.
    self.changes: dict[str, int] = {}
    # When each was appended.
    self.times: list[float] = []
    self.epochs: list[int] = []
    # How often it has begun, and from which step.
    self.beginnings, self.origin = 0, 0
    # When the run began last, and how many steps there were by then.
    self.began_from = 0.0, 0
    # When the last coordinator started, and whether it has lost records.
    self.epoch_at = -math.inf
    self.end: Ended | None = None
    # Who has each membership; and all that ever were.
    self.members: dict[int, str] = {}
    self.processes: dict[int, str] = {}
    # The step at which each began.
    self.joined_at: dict[int, int] = {}
    # When each process was removed last.
    self.away_since: dict[str, float] = {}
    self.counted: dict[tuple[str, int], Committed] = {}
    # Versions by step, since the run's start.
    self.versions: dict[int, int] = {}
    self.submissions: dict[tuple[str, int], _Submission] = {}
    # The same by what they say of their data, and by the replica's number.
    self.by_batches: dict[tuple[str, str], list[msg.SubmitGradient]]
    self.by_batches = collections.defaultdict(list)
    self.by_sequence: dict[tuple[str, int], list[msg.SubmitGradient]]
    self.by_sequence = collections.defaultdict(list)
    # Positions of samples in committed steps; and their number, by step.
    self.samples: set[int] = set()
    self.skipped: set[int] = set()
    # Those of gradients that were not finite while no good replica was there.
    self.unopposed: set[int] = set()
    # Who has computed each slot; and the epoch in which each member had a gradient
    # in a commit last.
    self.computed: dict[int, set[str]] = collections.defaultdict(set)
    self.took_part: dict[int, int] = {}
    self.done: dict[int, int] = {0: 0}
    # Processes whose gradients have been in a step.
    self.took_a_step: set[str] = set()
    # Whether a stranger was the first, and has taken a step alone.
    self.is_strangers = False
    # Why the run ended with an error; "" where nothing excused that.
    self.why_it_ended = ""
    # Replicas that were let go.
    self.gone: set[int] = set()
    # The latest process that left with the latest state, and with no fault about
    # that could excuse it.
    self.left_in_peace = ""
    self.left = 0
    self.lost = 0
    # Whether a step has waited long enough for replicas that have never joined.
    self.without_absent = False
    # How often a process took the place of another one that lives, by replica.
    self.replaced: collections.Counter[int] = collections.Counter()
    # Since when each process is replaced by another one of its number.
    self.usurped: dict[str, float] = {}
    self.written: list[journal_events.Commit] = []
    self.holders: dict[int, set[str]] = {}
    # When a member or process was lost last.
    self.changed_at = self.committed_at = -math.inf
    # How many gradients were computed for nothing since the last commit.
    self.not_finite = 0
    # Since when members deliver what is not finite, and no step is taken; and the
    # replicas that do so always.
    self.fruitless_since = math.inf
    self.bad = {i for i, way in self.setting.bad if way == "always"}
    # Processes of which something was not finite.
    self.suspects: set[str] = set()
    self.ended_at = math.inf
    # Whether a state was damaged; the fingerprints that were taken, by step; and
    # who was removed since its gradients are wrong, and in which term.
    self.corrupt = False
    self.prints: dict[int, list[_Print]] = collections.defaultdict(list)
    self.found_wrong: dict[str, int] = {}
    self.taken: set[tuple[int, int, str]] = set()
    # The processes that have had the mean of each round.
    self.means: set[tuple[str, Any]] = set()
    # The attempts whose mean each process has had, if only to read it.
    self.collected: dict[str, set[Any]] = collections.defaultdict(set)
    # Gradients that the journal says were dropped, by reason.
    self.drops: collections.Counter[str] = collections.Counter()
    # How each membership has ended.
    self.departures: dict[int, tuple[bool, str]] = {}
    # Who wants all to save, and how many steps were committed since.
    self.wishes: list[list[Any]] = []
    # From which step on the log has lost some, which a member may have; and these.
    self.unsure: int | None = None
    self.recovered = False
    self.cut_off: list[Committed] = []

  def fail(self, guarantee: str, text: str) -> None:
    raise Violation(f"{guarantee}: {text}")

  # The log.

  def appended(self, record: Record) -> None:
    chief = self.world.chief
    if any(isinstance(entry, Joined | Removed) for entry in record.entries):
      self.changed_at, self.fruitless_since = self.world.now, math.inf
    for entry in record.entries:
      if self.world.transcript is not None:
        self.world.tell(transcript.line(self, entry))
      self.entry(chief, entry)

  def log_lost(self, records: int) -> int:
    """How many of the last records the log may lose with its host's power.

    Memberships are given before their members know, so these are kept here.
    """
    lost = 0
    for record in reversed(self.world.log[-records:]):
      if not all(isinstance(e, Committed) for e in record.entries):
        break
      lost += 1
    if lost:
      there = len(self.commits) if self.unsure is None else self.unsure
      self.cut_off += self.commits[there - lost : there]
      # Known to a member, they come back; otherwise they never were.
      self.unsure = there - lost
    return lost

  def entry(self, chief: Any, entry: Any) -> None:
    if self.end is not None and not isinstance(entry, Epoch):
      self.fail("A3", f"after the end of the run: {entry}")
    match entry:
      case Epoch(number):
        if self.epochs and number <= self.epochs[-1]:
          self.fail("A20", f"epoch {number} after {self.epochs[-1]}")
        self.epochs.append(number)
        self.epoch_at, self.fruitless_since = self.world.now, math.inf
      case Began(start):
        self.began(start.step)
      case Joined(member):
        if member.incarnation in self.processes:
          self.fail("A5", f"incarnation {member.incarnation} is given twice")
        new = self.world.by_name[member.process]
        self.joined(new)
        self.members[member.incarnation] = member.process
        self.processes[member.incarnation] = member.process
        self.joined_at[member.incarnation] = len(self.commits)
      case Removed(incarnation, left, reason):
        self.departures[incarnation] = left, reason
        name = self.members.pop(incarnation, None)
        if name is not None:
          self.away_since[name] = self.world.now
          self.removed(chief, self.world.by_name[name], left, reason)
        if left and name is not None:
          self.gone.add(self.world.by_name[name].index)
        self.left += left
        self.lost += not left
      case Committed():
        if self.unsure is not None:
          self.forget_steps(self.unsure)
          self.unsure = None
        self.committed(chief, entry)
      case Ended():
        if not entry.error:
          self.check_snapshots_are_served(chief)
          self.all_have_the_state("the run ends", entry.step, self.committed_at)
        self.end, self.ended_at = entry, self.world.now
        self.world.strike_at_the_end()
        self.how_it_ended(entry)
        if entry.error:
          self.why_it_ended = self.excuse(entry)
        self.end_of_data(entry)
        data, needed = self.setting.data, self.setting.needed
        if entry.reason == "all data is used" and data is not None:
          left = data.total - self.done.get(entry.step, 0)
          left -= self.given_up()
          if left >= needed * data.unit(needed):
            self.fail("A10", f"it ends with {left} samples left")
        there = len(self.commits)
        if entry.error and self.unsure is not None:
          there = self.unsure  # Who has the others has not called.
        if entry.step != there:
          self.fail("A3", f"ended at {entry.step} of {there}")

  def began(self, step: int) -> None:
    """The run begins, or begins again since nobody has its state."""
    has_steps = len(self.commits) > self.origin
    if not has_steps and not self.world.had_fault(self.world.now):
      self.check_newest_start(step)
    self.beginnings, self.origin = self.beginnings + 1, step
    self.began_from = self.world.now, len(self.commits)
    self.recovered = self.recovered or self.beginnings > 1
    known = len(self.commits) if self.unsure is None else self.unsure
    self.unsure = None
    if has_steps and step < known:
      holders = self.holders.get(len(self.commits), set())
      here = set(self.members.values()) & holders
      if here:
        self.fail("A20", f"it begins again, and {here} have its state")
      for name in holders:
        away = self.world.now - self.away_since.get(name, math.inf)
        # A replica that left while others had the state does not return.
        process = self.world.by_name[name]
        lives = process.alive and process.index not in self.gone
        if lives and away < TIMEOUT / FASTEST:
          self.fail("A20", f"it begins again, and {name} lives with its state")
    self.lost += len(self.members)
    self.members = {}
    self.forget_steps(step)
    for missing in range(len(self.commits), step):
      # It was lost with the log, and its replica has it; or it is of another run.
      known = [Committed(RoundId(0, missing, 0), (), b"", False, (), ())]
      known += [c for c in self.cut_off if c.round.step == missing]
      self.commits.append(known[-1])
      spans = [span for part in known[-1].parts for span in part.data]
      self.samples |= {p for a, b in spans for p in range(a, b)}
      self.skipped |= {p for a, b in known[-1].skipped for p in range(a, b)}
      self.times.append(self.world.now)
    # Whoever has committed them had no time to note them, and nobody can now.
    self.written += [None] * (step - len(self.written))
    self.versions.clear()
    self.holders.clear()

  def check_newest_start(self, step: int) -> None:
    """The first step waits for a replica that has just brought a newer state."""
    since = self.world.now - _ON_ITS_WAY
    for process in self.world.all:
      if process.alive and process.called_at > since and process.offered > step:
        what = f"step {step}, and {process.name} brought {process.offered}"
        self.fail("A20", f"it begins from {what}")

  def forget_steps(self, step: int) -> None:
    """Steps from this one on have not been: nobody has them, or a power loss."""
    self.cut_off += self.commits[step:]
    for commit in self.commits[step:]:
      for part in commit.parts:
        name = self.processes.get(part.incarnation)
        self.counted.pop((name, part.sequence), None)
        for start, stop in part.data:
          self.samples -= {*range(start, stop)}
      for start, stop in commit.skipped:
        self.skipped -= {*range(start, stop)}
    del self.commits[step:], self.times[step:], self.written[step:]
    for known in (self.versions, self.holders):
      for old in [s for s in known if s > step]:
        del known[old]

  def check_absent_count_as_lost(self) -> None:
    """Replicas that have never joined count as lost after half of `timeout`.

    At once if it is known that they have ended.
    """
    joined = {self.world.by_name[p].index for p in self.processes.values()}
    since = max(self.committed_at, 0.0)
    if self.world.now - since < TIMEOUT / 2 / FASTEST:
      return
    absent = {*range(self.setting.replicas)} - joined
    self.without_absent = self.without_absent or bool(absent)
    told = absent and absent <= {*self.world.absent}
    calm = not self.world.had_fault(self.world.now - TIMEOUT / 10)
    if told and calm and self.setting.lower_on_loss:
      self.fail("A22", f"steps have waited for {absent}, which have ended")

  def committed(self, process: Any, commit: Committed) -> None:
    """A step is in the log, where this process has put it."""
    setting, step = self.setting, commit.round.step
    if step != len(self.commits):
      self.fail("A3", f"step {step} is committed after {len(self.commits)}")
    self.check_members_had_time_to_call(process, step)
    self.on_newest_start(step)
    self.of_one_job(commit)
    self.commits.append(commit)
    for change in commit.changes:
      if change.number <= self.changes.get(change.process, 0):
        self.fail("A3", f"a request counts twice: {change}")
      self.changes[change.process] = change.number
    for part in commit.parts:
      self.set_before(self.processes[part.incarnation], part.sequence)
    self.check_no_stall(step)
    self.check_newcomers_do_not_block(commit)
    self.check_gradients_get_outcomes(step)
    self.check_absent_count_as_lost()
    self.committed_at = self.world.now
    self.not_finite, self.fruitless_since = 0, math.inf
    self.times.append(self.world.now)
    self.data_of(commit)
    total = sum(part.count for part in commit.parts)
    if setting.window and total != setting.needed:
      self.fail("A10", f"step {step} has {total} of {setting.needed} shares")
    lowered = (setting.lower_on_leave or setting.lower_on_loss) and self.left
    lost = self.lost or self.world.absent or self.without_absent
    lowered = lowered or (setting.lower_on_loss and lost)
    if total < setting.needed and not (
      lowered and setting.needed <= setting.replicas and not setting.window
    ):
      self.fail("A2", f"step {step} has {total} gradients")
    if setting.alone and len(commit.parts) != 1:
      self.fail("A2", f"step {step} has {len(commit.parts)} replicas' work")
    if commit.mean is None:
      self.check_members_have_the_mean(commit)
      self.copied(process, commit)
      self.followed(commit)
    elif commit.mean != struct.pack("<q", self.mean(commit)):
      what = "its slots" if setting.window else "its parts"
      guarantee = "A19" if setting.window else "A14"
      self.fail(guarantee, f"step {step} has not the mean of {what}")
    if setting.policy is None and any(p.weight != 1.0 for p in commit.parts):
      self.fail("A14", f"step {step} has other weights: {commit.parts}")
    self.saves(process, commit)
    self.check_replaced_is_notified(process)
    for part in commit.parts:
      # It may have gone since it did its part.
      name = self.processes.get(part.incarnation)
      if name is None:
        self.fail("A1", f"step {step} has a gradient of nobody: {part}")
        return
      if not 0 <= step - part.local_step <= setting.max_staleness:
        self.fail("A2", f"step {step} has an old gradient: {part}")
      key = (name, part.sequence)
      if key in self.counted:
        self.fail("A3", f"{key} counts twice, in step {step}")
      self.counted[key] = commit
      result = self.submissions.get(key)
      if result is None:
        self.fail("A1", f"{key} was never submitted")
        return
      submitted = result.submitted
      if (submitted.local_step, submitted.count) != (
        part.local_step,
        part.count,
      ):
        self.fail("A1", f"{key} was {submitted}, and counts as {part}")
      if not submitted.finite:
        self.fail("A1", f"{key} is not finite")
      size = 0 if commit.mean is None else 8
      if len(submitted.payload) != size and not setting.window:
        self.fail("A1", f"{key} has another size")
      # "Lost" says that it isn't known; it was given up, and may count yet.
      if result.outcome is not None and result.outcome.reason != "lost":
        self.fail("A7", f"{key} counts, and was told {result.outcome.reason!r}")

  def check_members_had_time_to_call(self, chief: Any, step: int) -> None:
    """No step is taken before all members that may have later ones had time to call."""
    if self.world.now >= self.epoch_at + SILENCE_TIMEOUT / FASTEST:
      return
    for name in self.members.values():
      process = self.world.by_name[name]
      there = name in chief.connections or name in chief.losing
      if process.alive and not process.over and not there:
        self.fail("A20", f"step {step} is committed before {name} has called")

  def on_newest_start(self, step: int) -> None:
    """The first step is on the newest state that a replica has brought."""
    for name in self.members.values() if step == self.origin else ():
      offered = self.world.by_name[name].offered
      if offered > step:
        text = f"the first step is {step}, and {name} brought step {offered}"
        self.fail("A20", text)

  def of_one_job(self, commit: Committed) -> None:
    """A replica with another job takes a step only if most callers have that job."""
    names = map(self.processes.get, _members(commit))
    if any(self.world.by_name[name].stranger for name in names):
      now = self.world.begun.get(commit.round, self.world.now)
      there = self.callers_of_the_majority_job(
        now, now - SILENCE_TIMEOUT / FASTEST
      )
      if there and not self.is_strangers:
        self.fail("A22", f"{there} had called, and a stranger takes a step")
      self.is_strangers = True

  def callers_of_the_majority_job(
    self, now: float, since: float = -math.inf
  ) -> list[str]:
    """The callers with the right job; none if callers with another are as many.

    Then nothing shows which job is right: a step is taken with the job of the first
    callers, if they are enough for it, or the run ends with an error.
    """
    there = [p for p in self.world.all if p.alive and p.called_at < now]
    strangers = sum(process.stranger for process in there)
    others = [
      process.name
      for process in there
      if not process.stranger and process.called_at > since
    ]
    return others if len(others) > strangers else []

  def note_nonfinite(self, process: Any, submitted: msg.SubmitGradient) -> None:
    """Notes a nonfinite gradient: it excuses only runs that need its replica (A21)."""
    self.suspects.add(process.name)
    if not self.good():
      self.unopposed |= {p for a, b in submitted.data for p in range(a, b)}
    needed = self.setting.least > self.setting.replicas - len(self.bad)
    if needed or process.index not in self.bad:
      self.not_finite += submitted.count
    now = self.world.now
    member = process.name in self.members.values()
    if not member or process.step != len(self.commits):
      return
    if self.world.had_fault(now):
      self.fruitless_since = math.inf
      return
    self.fruitless_since = min(self.fruitless_since, now)
    # A learner's round may begin late.
    most = TIMEOUT / min(self.setting.rates)
    most *= 2 if self.setting.policy is not None else 1
    most += self.longest_stall() + max(self.setting.compute)
    waited = now - self.fruitless_since
    if waited > most:
      self.fail("A21", f"no step for {waited:.1f} s, and it goes on")

  def check_no_stall(self, step: int) -> None:
    """Without faults, no step waits for a deadline."""
    setting, world = self.setting, self.world
    most = self.longest_stall()
    gradients = 3 * max(1, setting.needed) + self.not_finite
    most += gradients * max(setting.compute)
    if self.found_wrong:
      most += TIMEOUT / 2 / FASTEST  # It was waited for.
    since = max(self.committed_at, 0.0)
    if world.had_no_fault(since) and world.now - since > most:
      self.fail("A9", f"step {step} took {world.now - since:.1f} s")

  def check_newcomers_do_not_block(self, commit: Committed) -> None:
    """A replica that has joined again does not block others while it compiles (A22)."""
    setting = self.setting
    at, first = {}, set()
    for part in commit.parts:
      name = self.processes[part.incarnation]
      at[name] = self.submissions[name, part.sequence].at
      if not part.sequence:
        first.add(name)
    known = at.keys() & self.took_a_step
    self.took_a_step |= at.keys()
    # It gets samples only once it counts.
    if not setting.compiling or not known or setting.data is not None:
      return
    by_name = self.world.by_name
    joined = {by_name[name].index for name in self.processes.values()}
    # Launchers tell each coordinator who never joins: one that has just started again
    # has counted a newcomer in its place by then.
    absent = self.world.absent if self.epoch_at < self.committed_at else ()
    away = {*range(setting.replicas)} - joined - {*absent}
    bad = {i for i, way in setting.bad if way in ("always", "at times")}
    others = [by_name[name] for name in self.members.values() if name not in at]
    is_behind = any(p.step < commit.round.step for p in others)
    if away or bad & joined or is_behind:
      return  # The step needs somebody in its place.
    # While there is no coordinator, it is that which all wait for; and so is one that
    # has stopped until it goes on or is given up, or whose first gradient was dropped.
    given_up = [
      since
      for name, since in self.away_since.items()
      if name in self.took_a_step
    ]
    # Of a replica of several processes any may have stopped.
    back = [
      end
      for who, _, end in self.world.absences
      if known & {process.partition(".")[0] for process in who}
    ]
    ready = max(
      self.epoch_at, *given_up, *back, *(at[name] for name in at.keys() - first)
    )
    most = setting.compiling / 2
    if setting.policy is not None:
      # Learners train on while a round's window is open.
      config, step_seconds = setting.policy.config, max(setting.compute)
      # On the coordinator's clock.
      window = config.safety * config.overlap * step_seconds / setting.rates[7]
      most = max(most, window)
    for name in first - known:
      # It has compiled when it submits for the first time.
      waited = self.submissions[name, 0].at - ready
      if waited > most:
        self.fail("A22", f"{known} have waited {waited:.1f} s for {name}")

  def check_gradients_get_outcomes(self, step: int) -> None:
    """A gradient that a coordinator has gets an outcome while it takes steps."""
    chief = self.world.chief
    # Before the first one it waits for all members of its log.
    first = bisect.bisect_left(self.times, self.epoch_at)
    if first == len(self.times):
      return
    for name in self.members.values():
      process = self.world.by_name[name]
      pending = process.pending
      key = (name, -1 if pending is None else pending.sequence)
      if key not in chief.has or key in self.counted:
        continue
      since = max(chief.has[key], self.times[first])
      waited, taken = (
        self.world.now - since,
        step - bisect.bisect(self.times, since),
      )
      if (
        taken >= _OVERLOOKED
        and waited > FORGOTTEN
        and not self.was_away(chief, process, since)
      ):
        self.fail("A9", f"{name} has waited {waited:.1f} s for an outcome")

  def longest_stall(self) -> float:
    """Seconds that all but computing takes at most, if nothing goes wrong."""
    setting = self.setting
    # The end waits for others.
    return _STALL + 8 * _LATE * setting.latency

  # Means, and where they are.

  def gradients(
    self, commit: Committed, process: Any = None
  ) -> tuple[int, ...]:
    """What the replicas in a step had submitted; -1 for what none of them had."""
    result = []
    for part in commit.parts:
      name = self.named(self.processes.get(part.incarnation, ""), process)
      submission = self.submissions.get((name, part.sequence))
      gradient = -1
      if submission is not None:
        gradient = submission.gradient
      result.append(gradient)
    return tuple(result)

  def named(self, name: str, process: Any) -> str:
    """The process of a replica that holds what this one does of its own."""
    return name

  def mean(self, commit: Committed, process: Any = None) -> int:
    """What must come out of a step, computed here from what was submitted."""
    weights = tuple(part.weight for part in commit.parts)
    total = self.sum(commit, weights, process)
    if commit.mean is not None:
      return total
    return digest(*(digest(j, total) for j in range(len(_members(commit)))))

  def sum(
    self, commit: Committed, weights: tuple[float, ...], process: Any
  ) -> int:
    """The sum of a step, which in a deterministic run is always the same."""
    data, step = self.setting.data, commit.round.step
    faulty = self.corrupt or any(p.is_faulty for p in self.world.all)
    if data is not None and data.deterministic and not faulty:
      if step not in self.versions:
        # These are the first to say what state the run has begun again from.
        first = self.world.by_name[self.processes[commit.parts[0].incarnation]]
        self.versions[step] = process.before if process else first.version
      return sums.right(data, self.versions[step], step)
    return self.world.sum(self.gradients(commit, process), weights)

  def applied(self, process: Any) -> None:
    """A process has applied the mean of the latest step that it knows."""
    if self.corrupt or not 0 < process.step <= len(self.commits):
      return
    if self.missed_a_new_beginning(process):
      return  # What it applies is of earlier steps.
    commit = self.commits[process.step - 1]
    mean = self.mean(commit, process)
    if process.version != digest(
      process.before, mean, *dict(commit.hyperparams).values()
    ):
      guarantee = "A19" if self.setting.window else "A14"
      text = f"{process.name} applied another mean than step {process.step}'s"
      self.fail(guarantee, text)

  def copied(self, coordinator: Any, commit: Committed) -> None:
    """With a single gradient, another replica has the mean too, if one can."""
    world, step = self.world, commit.round.step
    if len(_members(commit)) > 1 or self.setting.policy is not None:
      return
    name = self.processes.get(commit.parts[0].incarnation)
    # Who was there by then, and had been for a moment, could be asked to be one.
    since = world.begun.get(commit.round, -math.inf)
    since -= _SETTLED + _LATE * self.setting.latency
    if name is None or max(self.changed_at, self.epoch_at) > since:
      return  # A witness may have been lost, or have failed.
    others = [p for p in self.reachable_members(coordinator) if p.name != name]
    settled = lambda p: (
      max(p.settled_at, p.welcomed_at) < since
      and not self.silence_of(coordinator, p)
    )
    able = [p for p in others if p.step >= step and settled(p)]
    everyone = [p for p in world.all if p.name != name]
    if able and not any(self.has_mean(p, commit) for p in everyone):
      self.fail("A15", f"step {step} is committed with one copy of its mean")

  def followed(self, commit: Committed) -> None:
    """Some member can reach the state after a commit, as far as anybody knows."""
    for name in self.members.values():
      step = self.world.by_name[name].step
      lacks = {c.round for c in (*self.commits[step:-1], commit)}
      if lacks <= self.collected[name]:
        return
    step = commit.round.step
    self.fail("A15", f"nobody can apply step {step}, which is committed")

  def has_all(self, process: Any, round_: Any) -> None:
    """A process that takes part in a round has the mean of it."""
    self.means.add((process.name, round_))

  def reachable_step(self, process: Any) -> int:
    """The step that a process can reach with the means it has reported; -1 for none."""
    step = process.step
    if process.name not in self.holders.get(step, ()):
      return -1
    for commit in self.commits[step:]:
      if (process.name, commit.round) not in self.means:
        break
      step += 1
    return step

  def has_mean(self, process: Any, commit: Committed) -> bool:
    aggregation = process.aggregations.get(commit.round)
    return process.alive and (
      aggregation is not None
      and len(aggregation.means) >= len(_members(commit))
    )

  def save_wanted(self, process: Any) -> None:
    self.wishes.append([process, 0, self.world.now])

  def saves(self, coordinator: Any, commit: Committed) -> None:
    """A request to save survives the coordinator that received it."""
    if commit.save or not self.wishes:
      self.wishes.clear()
      return
    ready = self.reachable_members(coordinator)
    for wish in self.wishes:
      process, _, since = wish
      # It is told to the coordinator once that has welcomed its replica.
      told_at = max(since, process.welcomed_at, process.settled_at)
      came = process.welcomed_at >= self.epoch_at
      came = came and self.world.now - told_at > _ON_ITS_WAY
      wish[1] = (
        wish[1] + 1 if came and process in ready and not process.over else 0
      )
      if wish[1] > _SOON:
        self.fail("A9", f"{process.name}'s wish to save is forgotten")

  def fingerprint(self, process: Any, taken: msg.Fingerprint) -> None:
    """One that comes shortly before the end may not be compared any more."""
    self.taken.add((taken.step, process.index, taken.digest))
    if self.end is None:
      print_ = _Print(taken.digest, self.world.now, process.name)
      self.prints[taken.step].append(print_)

  def _last_members(self) -> dict[int, int]:
    """The last membership of each replica."""
    return {
      self.world.by_name[name].index: incarnation
      for incarnation, name in sorted(self.processes.items())
    }

  def may_have_failed(self, step: int, number: int) -> bool:
    """Whether a member has failed in a round, or was lost in this step.

    A member may begin a round after its coordinator has already lost another. A
    leader that was replaced may note so after the next one has committed the step.
    """
    failed = {(round_.step, round_.number) for round_ in self.world.failed}
    before = self.times[:step]
    began = before[-1] if before else -math.inf
    return self.changed_at >= began or (step, number) in failed

  # Who is given up.

  def silence_of(self, coordinator: Any, process: Any) -> float:
    """For how long an awake coordinator has recently not heard from a process."""
    world = self.world
    both = {(process.name, coordinator.name), (coordinator.name, process.name)}
    keys = {(process.name,), *both}
    now, since = world.now, world.now - _RECENT
    times = sorted({since, now} | {
      time
      for _, *ends in world.absences
      for time in ends
      if since < time < now
    })  # fmt: skip
    total = 0.0
    for a, b in itertools.pairwise(times):
      absent = {
        who for who, begin, end in world.absences if begin <= a and b <= end
      }
      if absent & keys and (coordinator.name,) not in absent:
        total += b - a
    return total

  def removed(
    self, coordinator: Any, process: Any, left: bool, reason: str
  ) -> None:
    """Only silent members are removed."""
    self.changed_at = self.world.now
    if left:
      if process.leaves_since == math.inf:
        self.fail("A12", f"{process.name} left, and did not ask to")
      # What was committed without it since then is not for it to hand on.
      own = [
        commit.round.step + 1
        for commit in self.commits
        if process.name in map(self.processes.get, _members(commit))
      ]
      step = max([process.leaves_at, *own])
      what = f"{process.name} is let go"
      self.all_have_the_state(what, step, process.leaves_since)
      return
    if not process.alive or process.over or process.aborted:
      return
    if reason == "replaced":
      self.was_replaced(process)
      return
    if "is not what replicas" in reason:
      self.found_wrong[process.name] = len(self.epochs)
      if not process.is_faulty and not self.corrupt:
        self.fail("A13", f"{process.name} computes right gradients: {reason}")
      return
    if process.sent_wrong_size and "it sent a gradient of" in reason:
      return
    lowers = self.setting.lower_on_loss and process.name in self.suspects
    if lowers and "gradients are not finite" in reason:
      self.found_wrong[process.name] = len(self.epochs)
      return
    if "did not reconnect" in reason and not self.was_away(
      coordinator, process
    ):
      self.fail("A20", f"{process.name} is removed as the coordinator restarts")
    # Two members that can't reach each other, and the coordinator reaches both.
    others = self.members.values() if "can't reach" in reason else ()
    ends = [coordinator, *map(self.world.by_name.__getitem__, others)]
    lost = max(
      time
      for end in ends
      for time in (
        process.lost_at.get(end.name, -math.inf),
        end.lost_at.get(process.name, -math.inf),
      )
    )
    if lost > self.world.now - _RECENT:
      return
    silent_for = sum(self.silence_of(end, process) for end in ends)
    if silent_for < _UNHEARD:
      self.fail(
        "A13",
        f"{process.name} is removed, and was silent for {silent_for:.1f} s: "
        f"{reason}",
      )

  def was_away(
    self, coordinator: Any, process: Any, since: float | None = None
  ) -> bool:
    """Whether something kept a process from calling this coordinator."""
    ends = {process.name, coordinator.name}
    since = self.epoch_at if since is None else since
    return any(
      end > since and begin < self.world.now and ends >= {*who}
      for who, begin, end in self.world.absences
    )

  def all_have_the_state(self, what: str, step: int, since: float) -> None:
    """Members that stay have the state of a step, or the leaving one has waited.

    Args:
      what: what happens, for an error.
      step: the step.
      since: since when it was waited for.
    """
    if self.world.now >= since + TRANSFER_TIMEOUT / FASTEST:
      return
    for name in self.members.values():
      process = self.world.by_name[name]
      lacks = [
        commit
        for commit in self.commits[process.step : step]
        if commit.mean is not None or not self.has_mean(process, commit)
      ]
      stays = process.leaves_since == math.inf
      if stays and process.alive and lacks:
        self.fail("A9", f"{what}, and {name} has only step {process.step}")

  def joined(self, process: Any) -> None:
    """One of two processes with one number is removed; a faulty one stays away."""
    if self.found_wrong.get(process.name) == len(self.epochs):
      self.fail("A18", f"{process.name} joins again, with wrong gradients")
    for name in self.members.values():
      if self.world.by_name[name].index == process.index:
        self.fail("A5", f"{name} and {process.name} have one number")

  def was_replaced(self, process: Any) -> None:
    """Another process with its number takes its place."""
    if not self.has_live_duplicate(process):
      self.fail("A13", f"{process.name} is replaced, by nobody")
    self.replaced[process.index] += 1
    self.usurped[process.name] = self.world.now
    if self.replaced[process.index] > _PLACES:
      self.fail("A13", f"{process.name} and another one replace each other")

  def check_replaced_is_notified(self, coordinator: Any) -> None:
    """A process that another of its number has replaced is notified soon."""
    world = self.world
    for name, since in self.usurped.items():
      process = world.by_name[name]
      there = process.alive and not process.over
      if not there or name in self.members.values():
        continue
      late = world.now > since + _PLACE_TAKEN
      if late and self.hears(process, coordinator) and not process.node.over:
        self.fail("A6", f"{name} waits, and another process has its number")

  def how_it_ended(self, end: Ended) -> None:
    """A run ends well after its steps, or because that was asked for."""
    asked = any(p.wants_finish for p in self.world.all)
    used = self.setting.data is not None and end.reason == "all data is used"
    calm = self.commits and self.world.had_no_fault(self.committed_at)
    if calm and not end.error:
      waited = self.world.now - self.committed_at
      if waited > self.longest_stall():
        self.fail("A9", f"the end took {waited:.1f} s")
    if end.error or asked or used:
      return
    for member in self._last_members().values():
      left, _ = self.departures.get(member, (False, ""))
      if not left:
        name = self.processes[member]
        self.fail("A12", f"it ends without {name}, which has not left")

  # Samples.

  def data_of(self, commit: Committed) -> None:
    """Each sample is in one step, and no epoch begins too early."""
    data, setting = self.setting.data, self.setting
    if data is None:
      return
    step, unit = commit.round.step, data.unit(setting.needed)
    result: set[int] = set()
    for part in commit.parts:
      samples = [p for a, b in part.data for p in range(a, b)]
      result.update(samples)
      if len(samples) != part.count * unit:
        self.fail("A10", f"step {step} has {part} of {unit} samples each")
      submitted = self.submissions[
        self.processes[part.incarnation], part.sequence
      ].submitted
      if sp.union(submitted.data) != sp.union(part.data):
        self.fail("A10", f"{part} was computed on {submitted.data}")
    self.compared(commit)
    if setting.window:
      first = step * setting.window
      if result != {*range(first, first + setting.window)}:
        self.fail("A18", f"step {step} has not its slots: {commit.parts}")
      starts = range(first, first + setting.window, unit)
      bad = [p for p in starts if not sums.is_finite(p, setting.not_finite)]
      zeros = sp.union((p, p + unit) for p in bad)
      if zeros != commit.skipped and not self.zeros_may_count(commit):
        self.fail("A18", f"step {step} names {commit.skipped} as zeros: {bad}")
    if len(result) != sum(part.count for part in commit.parts) * unit:
      self.fail("A10", f"a sample is twice in step {step}: {commit.parts}")
    if result & (self.samples | self.skipped):
      self.fail("A10", f"samples of step {step} were committed before")
    if data.total is not None and max(result) >= data.total:
      self.fail("A10", f"step {step} has samples of no epoch")
    self.skipped |= {p for a, b in commit.skipped for p in range(a, b)}
    if not setting.window:
      self.check_skipped_samples(commit)
    size = data.per_epoch
    before = max(result) // size * size
    if data.mode == "exact" and result:
      left = before - sum(p < before for p in self.samples | self.skipped)
      if left >= setting.needed * unit:
        self.fail("A10", f"step {step} begins an epoch with {left} left")
    self.samples |= result
    self.done[step + 1] = len(self.samples | self.skipped)

  def zeros_may_count(self, commit: Committed) -> bool:
    """Whether slots that are nonfinite only on a bad replica count as zeros.

    The replica must have been the only member when it submitted them, or be it now;
    and one that is always bad is trusted only if no other may join again.
    """
    setting = self.setting
    if len(self.bad) == setting.replicas:
      return True
    # A part is a sum, to which each submission has added.
    names = {self.processes[part.incarnation] for part in commit.parts}
    result = [
      one
      for (name, _), one in self.submissions.items()
      if name in names and one.submitted.local_step == commit.round.step
    ]
    alone = len(self.members) < 2 or any(one.was_alone for one in result)
    at_times = "at times" in dict(setting.bad).values()
    return alone and (at_times or setting.replicas - len(self.gone) < 2)

  def compared(self, commit: Committed) -> None:
    """Two members have computed each audited slot, if two had computed before."""
    data, step, epoch = (
      self.setting.data,
      commit.round.step,
      commit.round.epoch,
    )
    if data is None or not data.audit:
      return
    able = [
      name
      for incarnation, name in self.members.items()
      if self.took_part.get(incarnation) == epoch
      and name not in self.suspects
      and self.world.by_name[name].alive
    ]
    window = ((step * data.global_batch, (step + 1) * data.global_batch),)
    for position in data.audited(window):
      names = self.computed[position]
      if len(able) > 1 and len(names) < 2:
        self.fail(
          "A18", f"step {step} has {position}, only computed by {names}"
        )
    for part in commit.parts:
      self.took_part[part.incarnation] = epoch

  def strikes(self) -> dict[int, collections.Counter[int]]:
    """How many gradients of each replica were not finite, by sample."""
    strikes = {
      (name.partition(".")[0], sequence): result.submitted.data
      for (name, sequence), result in self.submissions.items()
      if not result.submitted.finite
    }
    result: dict[int, collections.Counter[int]] = {}
    for (name, _), spans in strikes.items():
      for p in [p for a, b in spans for p in range(a, b)]:
        by = result.setdefault(p, collections.Counter())
        by[self.world.by_name[name].index] += 1
    return result

  def given_up(self) -> int:
    """At most how many samples were given up that no commit came to name."""
    named = self.samples | self.skipped
    return sum(
      self.may_be_skipped(p, by)
      for p, by in self.strikes().items()
      if p not in named
    )

  def may_be_skipped(self, p: int, by: collections.Counter[int]) -> bool:
    """Whether a sample may be skipped for gradients of these replicas.

    Three replicas are believed whoever they are: nothing tells three bad
    replicas from a bad sample before a good replica has tried it.
    """
    is_bad = by.keys() <= self.bad and self.good() and p not in self.unopposed
    is_bad = is_bad and len(by) < _STRIKES
    return by.total() >= _STRIKES and not is_bad

  def good(self) -> list[str]:
    """Members whose gradients are finite."""
    names = self.members.values()
    return [n for n in names if self.world.by_name[n].index not in self.bad]

  def check_skipped_samples(self, commit: Committed) -> None:
    """No sample is skipped for gradients of a bad replica alone (A22)."""
    strikes = self.strikes() if commit.skipped else {}
    for p in [p for a, b in commit.skipped for p in range(a, b)]:
      by = strikes.get(p, collections.Counter())
      if not self.may_be_skipped(p, by):
        self.fail("A22", f"sample {p} is given up for gradients of {dict(by)}")

  def end_of_data(self, end: Ended) -> None:
    """It is an error if too many samples were skipped, or no step was taken."""
    data, most = self.setting.data, self.setting.max_skipped
    if data is None or "ll data is used" not in end.reason:
      return
    most = data.global_batch if most is None else most
    skipped, more = len(self.skipped), self.given_up()
    none = self.samples <= self.skipped
    if not end.error and (skipped > most or (none and skipped)):
      self.fail("A21", f"it ends well, and {skipped} samples were skipped")
    if end.error and skipped + more <= most and not none:
      self.fail("A21", f"{skipped} to {skipped + more} samples were skipped")

  def progressed(self, process: Any, effect: fx.Progressed) -> None:
    """The checkpoint that a replica would write."""
    if self.missed_a_new_beginning(process):
      return
    done = effect.progress.done
    if effect.step > len(self.commits) or done != self.done[effect.step]:
      self.fail("A10", f"{process.name} counts {done} at step {effect.step}")
    given_up = sp.union((p, p + 1) for p in self.skipped)
    if effect.step == len(self.commits) and given_up != effect.progress.skipped:
      skipped = effect.progress.skipped
      self.fail("A10", f"{process.name} has {skipped} as given up: {given_up}")

  def check_members_have_the_mean(self, commit: Committed) -> None:
    """Each live member has the mean of a commit."""
    for part in commit.parts:
      process = self.world.by_name.get(self.members.get(part.incarnation))
      if process is not None and process.alive and not process.over:
        aggregation = process.aggregations.get(commit.round)
        owners = _members(commit)
        if aggregation is None or len(aggregation.means) < len(owners):
          self.fail("A1", f"{process.name} has no mean of {commit.round}")

  # State.

  def published(self, process: Any) -> None:
    if self.missed_a_new_beginning(process):
      return
    step, version = process.step, process.version
    if step > len(self.commits):
      self.fail("A7", f"{process.name} is at step {step}, not committed")
    known = self.versions.setdefault(step, version)
    if known != version and not self.corrupt:
      self.fail("A4", f"{process.name} differs at step {step}")
    self.holders.setdefault(step, set()).add(process.name)

  def missed_a_new_beginning(self, process: Any) -> bool:
    """Whether a process has yet to hear that the run has begun again.

    Or that a power loss has taken steps that were on their way to the process.
    """
    known = process.node._known
    return known.beginnings < self.beginnings or any(
      lost.round.epoch <= known.epoch < self.epochs[-1]
      and lost.round.step < process.step
      for lost in self.cut_off
    )

  def admitted(self, process: Any, effect: fx.Admitted) -> None:
    self.world.tell(f"{process.name} is admitted, with step {process.step}")
    # One that stalled while the run began anew without it can't know yet.
    current = self.members.get(effect.incarnation) == process.name
    if not current or self.missed_a_new_beginning(process):
      return
    if process.stranger and self.commits and not self.is_strangers:
      self.fail("A4", f"{process.name} has another optimizer, and is let in")
    known = self.versions.setdefault(process.step, process.version)
    if known != process.version and not self.corrupt:
      self.fail("A4", f"{process.name} starts from another state")
    self.holders.setdefault(process.step, set()).add(process.name)

  # Outcomes.

  def set_before(self, name: str, sequence: int) -> None:
    """What was set before a gradient is set by the step that it counts in."""
    result = self.submissions.get((name, sequence))
    if result is not None and self.changes.get(name, 0) < result.changes:
      self.fail("A3", f"{name} has set what its gradient {sequence} is without")

  def submitted(self, process: Any, submitted: msg.SubmitGradient) -> None:
    key = (process.name, submitted.sequence)
    gradient = process.gradients.get(submitted.sequence, -1)
    alone = len(self.members) < 2
    self.submissions[key] = _Submission(
      submitted, gradient, alone, self.world.now, process.changes
    )
    self.by_batches[process.name, submitted.batches].append(submitted)
    name = process.name.partition(".")[0]
    self.by_sequence[name, submitted.sequence].append(submitted)
    if not journal.is_finite(self, submitted):
      self.note_nonfinite(process, submitted)
    if submitted.data:
      self.computed_again(process, submitted)
    digests = submitted.work if self.setting.window else b""
    for position in range(0, len(digests), audit.ENTRY.size):
      (slot, _) = audit.ENTRY.unpack_from(digests, position)
      self.computed[slot].add(process.name)
    self.check_requested_sums(process)
    self.world.tell(transcript.submission(process, submitted))

  def computed_again(self, process: Any, submitted: msg.SubmitGradient) -> None:
    """No gradient is on samples that a process knows to be committed as its own."""
    # One that has just been admitted may have an earlier lease for a moment.
    since = bisect.bisect(self.times, process.settled_at)
    own = [
      span
      for commit in self.commits[since : submitted.local_step]
      for part in commit.parts
      if self.processes.get(part.incarnation) == process.name
      for span in part.data
    ]
    if sp.overlap(submitted.data, own):
      self.fail("A10", f"{process.name} computes again on {submitted.data}")

  def check_requested_sums(self, process: Any) -> None:
    """A training loop sums as many gradients as its core was asked for."""
    client = getattr(process.node, "core", process.node)
    asked = client._known.requested
    if process.requested != asked:
      self.fail(
        "A2", f"{process.name} sums {process.requested}, asked for {asked}"
      )

  def resolved(self, process: Any, outcome: fx.Resolved) -> None:
    key = (process.name, outcome.sequence)
    result = self.submissions[key]
    if result.outcome is not None:
      self.fail("A7", f"{key} has two outcomes: {result.outcome}, {outcome}")
    result.outcome = outcome
    if outcome.reason:
      text = f"gradient {outcome.sequence} is {outcome.reason}"
      self.world.tell(f"{process.name} is told that its {text}")
    commit = self.counted.get(key)
    if not outcome.reason:
      if commit is None:
        if not self.was_cut_off(key):
          self.fail("A7", f"{key} was told it counts, and does not")
        return
      if process.step < commit.round.step + 1 and not process.error:
        self.fail("A7", f"{key} is told before its step is applied")
      if outcome.step != commit.round.step + 1:
        self.fail("A7", f"{key} was told the wrong step: {outcome}")
    elif commit is not None and outcome.reason not in ("lost", "superseded"):
      if self.unsure is not None and commit.round.step >= self.unsure:
        return  # The log has lost its step, and nobody has brought it back.
      self.fail("A7", f"{key} counts, and is told {outcome.reason!r}")

  def was_cut_off(self, key: tuple[str, int]) -> bool:
    """Whether a gradient was in a step that is not in the history any more."""
    return any(
      (self.processes.get(part.incarnation), part.sequence) == key
      for commit in self.cut_off
      for part in commit.parts
    )

  def counts(self, process: Any, computed: int, told: Any) -> None:
    """All outcomes of a training loop's gradients."""
    counts = dict(told)
    if sum(counts.values()) != computed:
      self.fail(
        "A7", f"{process.name} is told {counts} of {computed} gradients"
      )
    # What a member knows of a step that its coordinator's host has lost, and that
    # nobody has brought back in time, is wrong.
    sure = self.commits[: self.unsure]
    lost = [
      part
      for commit in self.cut_off
      for part in commit.parts
      if commit not in sure
      and self.processes.get(part.incarnation) == process.name
    ]
    numbers: list[int] = []
    for part in [part for commit in sure for part in commit.parts]:
      if self.processes.get(part.incarnation) == process.name:
        result = self.submissions[process.name, part.sequence].submitted
        numbers += json.loads(result.batches)
    count = len(numbers)
    if len(set(numbers)) < count:
      self.fail(
        "A3", f"{process.name} has gradients that count twice: {numbers}"
      )
    unknown = counts.get("lost", 0) + counts.get("finished", 0)
    excused = sum(part.count for part in lost)
    if not -excused <= count - counts["applied"] <= unknown:
      text = f"{process.name} is told {counts}, and {count} gradients count"
      self.fail("A7", text)

  # Waits.

  def no_deadline(self, process: Any) -> None:
    """A process that has nothing to do later must not be waiting."""
    waits = process.joined.suspended or process.pending is not None
    waits = waits or process.waits_for_newer()
    waits = waits and not process.handed_over
    if waits and process.alive and not process.node.over:
      self.fail("A6", f"{process.name} waits without a deadline")

  def check_snapshots_are_served(self, coordinator: Any) -> None:
    """A replica that asks for a snapshot is served one, if a member has the state."""
    world = self.world
    ready = [p for p in self.reachable_members(coordinator) if not p.over]
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

  def reachable_members(self, coordinator: Any) -> list[Any]:
    """Members that nothing has kept from hearing a coordinator, and from answering."""
    members = map(self.world.by_name.__getitem__, self.members.values())
    return [process for process in members if self.hears(process, coordinator)]

  def hears(self, process: Any, coordinator: Any) -> bool:
    """Whether nothing has kept a process from talking with the coordinator lately."""
    world = self.world
    since = world.now - FORGOTTEN
    connection = process.connections.get(coordinator.name)
    connected = process is coordinator or (
      connection is not None
      and all(connection.open.values())
      and world.blocked_until(process, coordinator) <= since
      and world.blocked_until(coordinator, process) <= since
    )
    stopped = max(process.paused_until, coordinator.paused_until)
    busy = max(process.busy_until, coordinator.busy_until)
    return process.alive and connected and max(stopped, busy) <= since

  # Journal.

  def journal_opened(self, recent: Any) -> None:
    """A coordinator writes first what the last one had no time for."""
    for commit in recent:
      if commit.round.step >= len(self.written):
        self.note_commit(journal_events.committed(commit))

  def noted(self, process: Any, note: journal_events.Record) -> None:
    if isinstance(note, journal_events.Commit):
      self.note_commit(note)
    self.check_coordinator_state(process, note)

  # Inside the core.

  def check_coordinator_state(
    self, process: Any, note: journal_events.Record
  ) -> None:
    """A journal record of a coordinator is right, and so is its state by then."""
    wrong = journal.wrong(self, process, note)
    if wrong:
      self.fail("A8", f"{note}: {wrong}")
    run = process.node._run
    if run is None:
      return
    for result in (inside.gradients(run), inside.samples(run)):
      if result:
        self.fail("A10", f"the coordinator's books are wrong: {result}")

  def nothing_is_due(self, process: Any) -> None:
    result = inside.due_too_early(process)
    if result:
      self.fail("A6", f"{process.name}: {result}")

  def note_commit(self, commit: journal_events.Commit) -> None:
    step = commit.step
    timings = [member.timings for member in commit.members]
    known = [
      journal_events.committed(x, timings) for x in self.commits[step:][:1]
    ]
    if known != [commit]:
      self.fail("A8", f"the journal tells of step {step}, which is not")
    if step != len(self.written):
      self.fail("A8", f"the journal has step {step} after {len(self.written)}")
    self.written.append(commit)

  # Ends.

  def died(self, process: Any) -> None:
    self.changed_at = self.world.now
    for names in self.holders.values():
      names.discard(process.name)
    if not process.over:
      self.left_in_peace = ""

  def excuse(self, end: Ended | None = None) -> str:
    """Why the run may fail now; "" if it may not.

    These are the ways listed on the page of assumptions. Before the first commit
    any state will do, so the death of all is no excuse.
    """
    setting, latest = self.setting, len(self.commits)
    now = self.world.now
    wrong = bool(self.corrupt) + sum(p.is_faulty for p in self.world.all)
    indices = [self.world.by_name[n].index for n in self.members.values()]
    bad = sum(index in dict(setting.bad) for index in indices)
    if wrong and len(self.members) - wrong - bad < 2:
      return "no two replicas compute right gradients"
    if end is not None and end.reason.startswith(_SKIPPED):
      return "samples are missing"  # `end_of_data` checks that.
    # With the means in the log, an older state will do if the log goes on from it.
    # One that was away for so long needs some time to be back.
    away = {
      who[0]
      for who, begin, end in self.world.absences
      if len(who) == 1
      and now < end + FORGOTTEN
      and min(now, end) - begin >= _LONGEST
    }
    living = [p for p in self.world.all if p.alive and not p.over]
    steps = [s for s, names in self.holders.items() if names - away]
    steps += [self.reachable_step(p) for p in living if p.name not in away]
    held = max(steps, default=-1)
    recent = latest - held <= RECENT
    replayed = setting.inline and held >= 0 and recent
    if latest and held < latest and not replayed:
      return "nobody holds the latest state"
    left = setting.replicas - len(self.gone)
    lowered = setting.lower_on_leave or setting.lower_on_loss
    needed = min(setting.least, left) if lowered else setting.least
    # One that was killed for good is waited for, and so is one that found no leader
    # to let it go; unless a loss lowers that.
    unseen = {p.index for p in self.world.all if p.over == "left"} - self.gone
    absent = 0 if setting.lower_on_loss else self.world.spared + len(unseen)
    if not self.commits:  # Nor may a step have the gradient of another job.
      absent += len({*setting.strangers} - self.gone)
    if left - absent < needed and setting.needed <= setting.replicas:
      return "too many have left"
    there = {p.index for p in living if p.name not in away}
    never = any(way == "never joins" for _, way in setting.bad)
    # The run waits for replicas that never joined, unless they are known to have ended.
    lowers = setting.lower_on_loss and (bool(self.world.absent) or not never)
    needs_all = not setting.window and setting.needed >= setting.replicas
    if never and needs_all and not lowers:
      return "a replica that is needed never joins"
    # Steps go on without who has never a finite gradient.
    least = min(needed, len(there - self.bad)) if lowers else needed
    if setting.bad and (
      setting.shared or len(there - self.bad) < max(1, least)
    ):
      return "a replica that is needed is bad"
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
      if error == "Diverged" and not self.corrupt:
        self.fail("A4", reason)
      refused = process.stranger or process.is_faulty or self.corrupt
      first = process.name.partition(".")[0]
      refused = refused or first in self.found_wrong
      refused = refused or self.is_strangers
      if not self.commits and self.setting.strangers:
        # Who had another job may have gone with the run's end.
        refused = refused or self.end is not None
        refused = refused or not self.callers_of_the_majority_job(
          self.world.now
        )
      if error == "JoinRefused" and not refused:
        self.fail("A9", f"{process.name} is refused: {reason}")
      if "nobody holds" in reason and self.left_in_peace:
        self.fail("A9", f"{self.left_in_peace} left with what others need")
      if error == "CoordinatorError":
        excuse = self.excuse() or self.why_it_ended
        if refused and "The job refuses replica" in reason:
          excuse = "its gradients are wrong"
        if process.stranger and not self.commits:
          excuse = excuse or "it has another job than the others"
        if "Another process has joined" in reason and self.has_live_duplicate(
          process
        ):
          excuse = "another process has its number"
        differ = "don't agree" in reason or "has called, but" in reason
        if differ and not self.callers_of_the_majority_job(self.world.now):
          excuse = "no job is that of most"
        if not excuse:
          guarantee = "A22" if self.setting.bad else "A9"
          self.fail(guarantee, f"{process.name} fails: {reason}")
    self.died(process)

  def has_live_duplicate(self, process: Any) -> bool:
    """Whether another start of the same replica lives, or has called twice."""
    start = lambda p: p.name.partition(".")[0]
    return any(
      other.index == process.index
      and start(other) != start(process)
      and (other.alive or other.hellos > 1)
      for other in self.world.all
    )

  def finish(self) -> None:
    """At the end of a world whose faults are over: everyone is done."""
    # The end was decided before its record was in the log.
    setting = self.setting
    known = self.ended_at - _SETTLED
    known -= _LATE * setting.latency
    # A damaged state makes gradients wrong, too, and they may show it before: whoever
    # was removed for these tells nobody of its state any more.
    differ = any(
      len(
        {
          one.digest
          for one in result
          if one.at < known and one.process not in self.found_wrong
        }
      )
      > 1
      for result in self.prints.values()
    )
    if (
      self.corrupt
      and differ
      and (self.end is None or self.end.error != "Diverged")
    ):
      self.fail("A4", "states differ, and so do their fingerprints: no one saw")
    if self.world.chief.alive and len(self.written) < len(self.commits):
      self.fail("A8", f"the journal lacks step {len(self.written)}")
    living = [p for p in self.world.all if p.alive and not p.over]
    if living:
      names = ", ".join(p.name for p in living)
      self.fail("A9", f"still at it after {self.world.now:.0f} s: {names}")
