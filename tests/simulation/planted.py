"""Faults that are planted into the core: each shows that a rule finds what it says.

A fault is another expression or statement in a function, as in a mutant of its
syntax tree. It is there while schedules run, and taken back afterwards. What isn't
there any more is an error, so the list can't rot unnoticed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from tests.mutants import making, running
from tests.simulation import bad, faults, fragments, leases, slots

_CORE = "optax_dist.coordinator.protocol"
_COORDINATOR, _CLIENT = f"{_CORE}.coordinator", f"{_CORE}.client"


@dataclasses.dataclass(frozen=True)
class Planted:
  """A fault.

  Attributes:
    rule: the rule that finds it.
    name: in a few words.
    module: where it is.
    where: in which function.
    old: what is there.
    new: what stands there instead.
    kind: the schedules that find it.
    also: what else is changed, a second line of defence: where, old and new; with
      its module in front if that is another one.
  """

  rule: str
  name: str
  module: str
  where: str
  old: str
  new: str
  kind: Any = faults
  also: tuple[tuple[str, ...], ...] = ()


class Outage:
  """Schedules with faults of one kind of `outages`."""

  run = staticmethod(faults.run)

  def __init__(self, kind: str):
    self._kind = kind

  def schedule(self, seed: int) -> faults.Schedule:
    """The schedule of a seed."""
    return faults.schedule(seed, outage=self._kind)


FAULTS = (
  Planted(
    "A1",
    "a step is committed before all have its mean",
    f"{_COORDINATOR}.steps.rounds",
    "Round.completed",
    "not self._awaited <= self.holders",
    "not self.holders",
  ),
  Planted(
    "A2",
    "a gradient that is too old by one step counts",
    "optax_dist.quorum.arguments",
    "accepts",
    "local_step >= global_step - max_staleness",
    "local_step >= global_step - max_staleness - 1",
  ),
  Planted(
    "A3",
    "a gradient in a commit is submitted again",
    f"{_CLIENT}.submissions",
    "Submissions.committed",
    "last, self.pending, self.taken = (self.pending, None, None)",
    "last, self.taken = (None, None)",
  ),
  Planted(
    "A4",
    "fingerprints are not compared",
    f"{_COORDINATOR}.fingerprints",
    "Fingerprints.compare",
    "known != digest",
    "False",
    Outage("damage"),
  ),
  Planted(
    "A5",
    "two memberships get one number",
    f"{_CORE}.history",
    "History._admit",
    "max(self.next_incarnation, member.incarnation + 1)",
    "self.next_incarnation",
  ),
  Planted(
    "A6",
    "a replica waits without a deadline",
    f"{_CLIENT}.client",
    "Client.deadline",
    "self._waiting.deadline",
    "math.inf",
  ),
  Planted(
    "A7",
    "an outcome is told before its step is applied",
    f"{_CLIENT}.submissions",
    "Submissions.published",
    "self._counted[0][0] <= step",
    "self._counted[0][0] <= step + 1",
  ),
  Planted(
    "A8",
    "the journal does not tell of a step",
    f"{_COORDINATOR}.steps.steps",
    "Steps._commit",
    "self._out.note(journal_events.committed(entry, timings))",
    "pass",
  ),
  Planted(
    "A9",
    "a dropped gradient is not told",
    f"{_COORDINATOR}.steps.steps",
    "Steps._drop",
    "self._out.notify(state, msg.Dropped(sequence, reason, count, lease, whole))",
    "pass",
  ),
  Planted(
    "A9",
    "a replica leaves while others lack the state",
    f"{_COORDINATOR}.run",
    "Run._complete_departures",
    "bool(late) or last",
    "last",
  ),
  Planted(
    "A10",
    "the samples of a lost replica are lost",
    "optax_dist.ledger.rules",
    "_holder_lost",
    "_give_back(draft, event.holder, returned, held.copied)",
    "pass",
    leases,
  ),
  Planted(
    "A11",
    "contributions count alike, whatever is in them",
    "optax_dist.coordinator.extras.decoupled_diloco.rounds",
    "Rounds.weigh",
    "share * len(parts)",
    "1.0",
    fragments,
  ),
  Planted(
    "A12",
    "a removed replica is told that it left",
    f"{_COORDINATOR}.run",
    "Run._remove",
    "Removed(incarnation, left, reason)",
    "Removed(incarnation, True, reason)",
  ),
  Planted(
    "A13",
    "a gradient of the right size is taken for one of another size",
    f"{_COORDINATOR}.steps.intake",
    "Intake._arrive",
    "finite and size != expected",
    "finite and size == expected",
  ),
  Planted(
    "A14",
    "an inline mean takes the first gradient for all",
    f"{_COORDINATOR}.steps.gradients",
    "Gradients.commit",
    "a.message.payload",
    "arrivals[0].message.payload",
  ),
  Planted(
    "A15",
    "nobody else has the mean of a single gradient",
    f"{_COORDINATOR}.steps.rounds",
    "Rounds._announce",
    "None if best is None else best.member.incarnation",
    "None",
  ),
  Planted(
    "A18",
    "a slot counts as compared once it is computed",
    f"{_CORE}.policies.audit",
    "Audit._is_settled",
    "len(votes) > 1",
    "votes",
    slots,
  ),
  Planted(
    "A19",
    "slots are added in the order in which they come",
    "optax_dist.ledger.tree",
    "additions.make",
    "start + (1 << (stop - start - 1).bit_length() - 1)",
    "min(s for s in starts if s > start)",
    slots,
  ),
  Planted(
    "A20",
    "a member calls too late after the coordinator has started again",
    f"{_CLIENT}.connection",
    "CoordinatorConnection.lost",
    "min(reconnect / 8, _LONGEST_PAUSE)",
    "4 * reconnect",
  ),
  Planted(
    "A20",
    "steps begin before all members have called again",
    f"{_COORDINATOR}.steps.intake",
    "Intake._all_connected",
    "all(state.is_connected for state in self._members.waiting())",
    "True",
  ),
  Planted(
    "A15",
    "a step may have no part of who has the state before it",
    f"{_COORDINATOR}.steps.rounds",
    "Rounds._witness_lost",
    "not any(s is not None and s.has(step) for s in states)",
    "False",
    Outage("cut members"),
  ),
  Planted(
    "A15",
    "a witness counts that is lost",
    f"{_COORDINATOR}.steps.rounds",
    "Rounds.lost",
    "self._witness_lost(current)",
    "current.go_without(incarnation)",
    Outage("cut members"),
  ),
  Planted(
    "A14",
    "the mean of an abandoned round is kept",
    f"{_CLIENT}.applier",
    "Applier._apply_commit",
    "self.means.ahead != commit.round or hyperparams",
    "self.means.ahead is None or hyperparams",
    Outage("half a mean"),
    ((f"{_CLIENT}.means", "Means._drop", "self.ahead == round_", "False"),),
  ),
  Planted(
    "A21",
    "a step that takes no gradient is no stall",
    f"{_COORDINATOR}.steps.steps",
    "Steps._delivered",
    "self._stall.waits()",
    "pass",
    bad.plain,
  ),
  Planted(
    "A22",
    "samples are given up whoever's gradients are not finite",
    "optax_dist.ledger.not_finite",
    "strike",
    "len(by) >= _STRIKES and len(set(by)) >= needed",
    "len(by) >= _STRIKES",
    bad.leased,
    also=(
      ("trusted", "good or live", "live"),
      (
        "trusted",
        "good if len(good) > 1 else good & state.finite_holders",
        "live",
      ),
      ("avoided", "not (state.strikes or state.streaks)", "True"),
    ),
  ),
)


@contextlib.contextmanager
def plant(fault: Planted) -> Iterator[None]:
  """Has the fault in the core for as long as the context lasts."""
  changes = ((fault.where, fault.old, fault.new), *fault.also)
  sources: dict[Any, str] = {}
  changed: dict[Any, str] = {}
  for *names, where, old, new in changes:
    module = importlib.import_module(names[0] if names else fault.module)
    source = sources.setdefault(module, inspect.getsource(module))
    tree = making.changed(changed.get(module, source), where, old, new).tree
    changed[module] = ast.unparse(tree)
  try:
    for module, source in changed.items():
      running.replace(module, ast.parse(source))
    yield
  finally:
    for module, source in sources.items():
      running.replace(module, ast.parse(source))


def find(fault: Planted, most: int) -> faults.Result | None:
  """A schedule whose violation is that of the fault's rule, of so many."""
  with plant(fault):
    for seed in range(most):
      result = fault.kind.run(fault.kind.schedule(seed))
      if result.violation.startswith(f"{fault.rule}:"):
        return result
  return None
