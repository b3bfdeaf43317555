"""Invariants of the core's state between two events, which no message shows."""

from __future__ import annotations

import copy
import math
from typing import Any

from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol.policies.leases import LeaseManager
from optax_dist.ledger import Spans
from optax_dist.ledger import spans as sp

# Seconds before a deadline, and after a time at which there is no deadline.
_BEFORE, _LONG = 1e-4, 1e4


def gradients(run: Any) -> str:
  """What is wrong with the gradients that a run holds; "" for nothing."""
  steps = run._steps
  state = steps.ruling.state
  held = [*state.accepted.values()]
  if state.round is not None:
    held += state.round.members
  counts = {c.incarnation for c in held}
  accepted = set(steps.gradients.accepted)
  going_on = not state.finished and run._history.ended is None
  if going_on and accepted != counts:
    return f"it holds gradients of {accepted}, {counts} are in"
  return ""


def samples(run: Any) -> str:
  """What is wrong with the leases of a run; "" for nothing.

  Each sample that was ever leased is in exactly one place, and what a removed
  or replaced member computed on is free again.
  """
  policy = run._steps.policy
  if not isinstance(policy, LeaseManager) or run._history.ended is not None:
    return ""
  state = policy.state
  members = {member.member.incarnation for member in run._members}
  out: Spans = ()
  for holder, held in state.held.items():
    if held.out and holder not in members:
      return f"{held.out} are leased to {holder}, which is no member"
    if held.out and sp.overlap(sp.union(held.out), out) and not held.copied:
      return f"{held.out} are leased to {holder}, and to another one"
    out = sp.union(out, held.out)
  inside = [span for held in state.held.values() for span in held.accepted]
  after = ((state.progress.next, state.cursor),)
  open_ = sp.union(state.progress.open, after)
  places = (out, inside, state.pool, state.doubtful, state.abandoned)
  if sum(map(sp.size, places)) != sp.size(open_) or (
    sp.union(*places) != open_
  ):
    return f"{open_} are open, and in {places}"
  return ""


def due_too_early(process: Any) -> str:
  """What a core would do before its deadline if it were asked; "" for nothing."""
  node, now = process.node, process.now()
  due = node.deadline()
  time = now + _LONG if due == math.inf else due - _BEFORE
  if time <= now:
    return ""
  # Its log is long, and changes only where an effect says so.
  log = getattr(node, "history", None)
  later = copy.deepcopy(node, {id(log): log})
  effects = later.step(ins.TimePassed(), time)
  return f"due before {due:.3f}: {effects}" if effects else ""
