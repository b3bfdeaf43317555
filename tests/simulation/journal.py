"""A8: what the journal says is what has happened."""

from __future__ import annotations

import math
from typing import Any

from optax_dist.coordinator.protocol import journal_events
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.policies import audit
from tests.simulation.world import FASTEST, SILENCE_TIMEOUT


def wrong(checker: Any, process: Any, note: journal_events.Record) -> str:
  """What is wrong with a coordinator's note; "" for nothing."""
  steps, world = len(checker.commits), checker.world
  began_at, before = checker.began_from
  if began_at == world.now:  # What came before it is noted after it.
    steps = max(steps, before)
  step = getattr(note, "step", 0)
  # A coordinator may note steps before they are in the log; one that was replaced
  # may lack some.
  if not isinstance(note, journal_events.Run) and not 0 <= step <= steps + 1:
    return f"there are {steps} steps"
  match note:
    case journal_events.Run():
      if not checker.beginnings:
        return "no run has begun"
    case journal_events.Coordinator(_, epoch):
      if checker.epochs[-1] != epoch:
        return "another one has started"
    case journal_events.Join(replica, _, incarnation, address):
      member = _member(checker, incarnation)
      if member is None or replica != member.index:
        return "it is not that replica's"
      if address != member.me.address:
        return f"its address is {member.me.address}"
    case journal_events.Leave(replica, _, incarnation):
      return _removed(checker, replica, incarnation, True, "left")
    case journal_events.Lost(replica, _, incarnation, reason):
      return _removed(checker, replica, incarnation, False, reason)
    case journal_events.Commit(_, _, members):
      if any(not 0 <= one.age <= FASTEST * world.now for one in members):
        return "an age that can't be"
    case journal_events.Drop():
      checker.drops[note.reason] += note.count
      return _dropped(checker, note)
    case journal_events.Abandon(step, number, replica):
      if replica not in _replicas(checker):
        return "there is no such replica"
      if not checker.may_have_failed(step, number):
        return "nobody has failed"
    case journal_events.Stall(_, waited, missing):
      # The coordinator has decided on that step before it stood in the log.
      since = max(checker.committed_at, 0.0) - SILENCE_TIMEOUT
      if waited > FASTEST * (world.now - since):
        return f"a step was committed at {checker.committed_at:.1f} s"
      who = {r for some in missing.values() for r in some}
      if waited <= 0 or not who <= _replicas(checker):
        return "nobody is waited for"
    case journal_events.NotFinite(replica, _, gradients, incarnation):
      member = _member(checker, incarnation)
      if member is None or replica != member.index:
        return "it is not that replica's"
      # Each process of the replica has a part of the gradient.
      bad = {
        sequence: result.submitted.count
        for (name, sequence), result in checker.submissions.items()
        if name.partition(".")[0] == member.name
        and not is_finite(checker, result.submitted)
      }
      if not 1 <= gradients <= sum(bad.values()):
        return f"it has delivered {bad} that are not finite"
    case journal_events.CannotProceed(_, have, needed, missing):
      if not 0 <= have < needed <= checker.setting.needed:
        return "there are enough"
      if not {*missing} <= {*range(checker.setting.replicas)}:
        return "there are no such replicas"
    case journal_events.Fingerprint(step, replica, params, state):
      digest = f"{params}-{state}" if state else params
      if checker.taken and (step, replica, digest) not in checker.taken:
        return "nobody has taken that"
    case journal_events.Finish(step, reason, ledger):
      end = checker.end
      if end is None or (step, reason) != (end.step, end.reason):
        return f"the log says {end}"
      parts = [part for commit in checker.commits for part in commit.parts]
      applied = sum(part.count for part in parts)
      known = {"applied": applied, "dropped": dict(end.dropped)}
      if checker.recovered:
        return ""  # How many gradients were in lost steps, nobody knows.
      if ledger != (None if end.error else known):
        return f"it is {known}, with {end.error!r}"
      if len(checker.epochs) == 1 and dict(end.dropped) != checker.drops:
        return f"it has told of {checker.drops} dropped"
  return ""


def _removed(
  checker: Any, replica: Any, incarnation: Any, left: bool, reason: Any
) -> str:
  member = _member(checker, incarnation)
  if member is None or replica != member.index:
    return "it is not that replica's"
  known = checker.departures.get(incarnation)
  return "" if (left, reason) == known else f"the log says {known}"


def _replicas(checker: Any) -> set[int]:
  """Records that the run knows of: one more may follow."""
  others = {process.index for process in checker.world.all}
  return {*range(checker.setting.replicas)} | others


def _member(checker: Any, incarnation: int) -> Any:
  name = checker.processes.get(incarnation)
  return None if name is None else checker.world.by_name[name]


def _dropped(checker: Any, note: journal_events.Drop) -> str:
  """A gradient that was dropped is one that its replica submitted."""
  member = _member(checker, note.incarnation)
  if member is None:
    return "" if note.incarnation == -1 else "there is no such member"
  if member.index != note.replica:
    return "it is not that replica's"
  if (note.age is not None and note.age < 0) or note.count < 1:
    return "it can't be"
  if not note.batches:
    return ""
  result = checker.by_batches.get((member.name, note.batches), [])
  # Each process of the replica has a part of the gradient.
  name = member.name.partition(".")[0]
  finite = all(
    is_finite(checker, part)
    for submitted in result
    for part in checker.by_sequence[name, submitted.sequence]
  )
  # A second sum on the parameters of one that counts comes twice for the rules.
  sums = [
    submitted
    for (of, _), parts in checker.by_sequence.items()
    for submitted in parts
    if of == name and submitted.local_step == note.local_step
  ]
  if note.reason == "duplicate" and len({s.sequence for s in sums}) < 2:
    return "nobody has sent such a one"
  wrong = _reason(checker, note, finite)
  if wrong:
    return wrong
  steps = {submitted.local_step for submitted in result}
  counts = [submitted.count for submitted in result]
  if note.local_step not in steps or note.count not in counts:
    return f"it was submitted as {result}"
  return ""


def is_finite(checker: Any, submitted: msg.SubmitGradient) -> bool:
  """Whether all of a submission is finite, slot by slot if it is of slots."""
  sent = audit.unpack(submitted.work) if checker.setting.window else {}
  return submitted.finite and audit.NOT_FINITE not in sent.values()


def _reason(checker: Any, note: journal_events.Drop, finite: bool) -> str:
  """Whether a gradient was dropped for the reason that is named."""
  late = note.step - note.local_step
  match note.reason:
    case "stale" if 0 <= late <= checker.setting.max_staleness:
      return f"it is {late} steps late"
    case "non_finite" if finite:
      return "it is finite"
    case "future" | "unknown_replica":
      return "nobody has sent such a one"
    case "other_incarnation" if (
      note.local_step > checker.joined_at.get(note.incarnation, math.inf) + 1
    ):
      return "it is of this membership"
  return ""
