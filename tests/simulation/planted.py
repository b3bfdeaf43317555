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
from tests.simulation import bad, faults, fragments, groups, leases, slots
from tests.simulation.world import SILENCE, Setting

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
    first: the seed from which one is looked for, as the earlier ones don't find it.
  """

  rule: str
  name: str
  module: str
  where: str
  old: str
  new: str
  kind: Any = faults
  also: tuple[tuple[str, ...], ...] = ()
  first: int = 0


class Outage:
  """Schedules with faults of one kind of `outages`."""

  run = staticmethod(faults.run)

  def __init__(self, kind: str):
    self._kind = kind

  def schedule(self, seed: int) -> faults.Schedule:
    """The schedule of a seed."""
    return faults.schedule(seed, outage=self._kind)


class OnlyHolder:
  """Schedules in which the replica with the only state is away for a while."""

  run = staticmethod(faults.run)

  @staticmethod
  def schedule(seed: int) -> faults.Schedule:
    """The schedule of a seed."""
    setting = Setting(replicas=2, needed=1, inline=False)
    time = 0.2 + 0.01 * (seed % 50)
    away = (time + 0.001, "stop", (0, SILENCE + 7.0))
    return faults.Schedule(seed, setting, ((time, "restart", (1, 0.0)), away))


class NeverJoins:
  """Schedules in which a replica ends before it joins, and its launcher says so."""

  run = staticmethod(faults.run)

  @staticmethod
  def schedule(seed: int) -> faults.Schedule:
    """The schedule of a seed."""
    bad = ((2, "never joins"),)
    setting = Setting(replicas=3, needed=3, lower_on_loss=True, bad=bad)
    told = 0.01 * (1 + seed % 50), "never joins", (2,)
    return faults.Schedule(seed, setting, (told,))


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
    "A2",
    "a lost replica lowers the quorum",
    f"{_COORDINATOR}.steps.ruling",
    "Ruling._departure",
    "left or self._lower_on_loss",
    "True",
  ),
  Planted(
    "A3",
    "a gradient in a commit is submitted again",
    f"{_CLIENT}.submissions",
    "Submissions.committed",
    "part.incarnation == incarnation and self._forget(part.sequence)",
    "part.incarnation == incarnation",
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
    "A4",
    "a replica of another optimizer is let in",
    f"{_COORDINATOR}.comparison",
    "difference",
    "name not in other or _compared(value) != _compared(text)",
    "False",
    Outage("stranger"),
  ),
  Planted(
    "A5",
    "two memberships get one number",
    f"{_CORE}.history",
    "History.add",
    "self.next_incarnation = member.incarnation + 1",
    "pass",
  ),
  Planted(
    "A6",
    "a replica waits without a deadline",
    f"{_CLIENT}.client",
    "Client.deadline",
    "self._wait_by",
    "math.inf",
  ),
  Planted(
    "A7",
    "an outcome is told before its step is applied",
    f"{_CLIENT}.submissions",
    "Submissions.published",
    "self._counted[0][0] <= step",
    "self._counted[0][0] <= step + 1",
    first=190,
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
    "self._out.notify(notified, dropped)",
    "pass",
  ),
  Planted(
    "A9",
    "a replica leaves while others lack the state",
    f"{_COORDINATOR}.run",
    "Run._complete_departures",
    "bool(late) or (last and self._ending.some_may_come(self._now))",
    "last and self._ending.some_may_come(self._now)",
  ),
  Planted(
    "A9",
    "a wish to save is not told again",
    f"{_CLIENT}.requests",
    "Requests.all",
    "kind in self._last",
    "kind in self._last and kind is not msg.Save",
    Outage("save"),
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
    "A20",
    "a run begins again though a lost replica lives that has the state",
    f"{_COORDINATOR}.holders",
    "Holders._may_have",
    "lost.step + 1 > step and lost.member.process not in self._ended",
    "False",
    OnlyHolder,
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
    "self._witness_lost(current, member.replica)",
    "current.go_without(incarnation)",
    Outage("cut members"),
    first=50,
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
    "A21",
    "each gradient that is not finite begins a stall anew",
    f"{_COORDINATOR}.steps.stall",
    "Stall.dropped",
    "min(record.since, now)",
    "now",
    bad.plain,
    also=(
      (
        "Stall.waits",
        "(self.since is None or self._is_queued) and since < math.inf",
        "True",
      ),
    ),
  ),
  Planted(
    "A21",
    "data that was skipped ends a run well",
    f"{_COORDINATOR}.run",
    "Run._end_of_data",
    "policy.lost_samples(self._config.rules.max_skipped)",
    "''",
    leases,
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
  Planted(
    "A18",
    "strikes of a replica that is not trusted count",
    "optax_dist.ledger.not_finite",
    "are_bad",
    "holder in good",
    "True",
    bad.of_slots,
    first=60,
  ),
  Planted(
    "A18",
    "a slot counts as zeros because one replica says so",
    f"{_CORE}.policies.leases",
    "LeaseManager.check_gradient",
    "ledger.are_bad(self.state, incarnation, bad)",
    "message.finite",
    bad.of_slots,
  ),
  Planted(
    "A22",
    "who has only bad samples left waits for ever",
    f"{_CORE}.policies.leases",
    "LeaseManager.swap",
    "ledger.swap(self.state)",
    "None",
    bad.leased,
  ),
  Planted(
    "A22",
    "a replica that has died before it joined is waited for",
    f"{_COORDINATOR}.run",
    "Run._never_joined",
    "self._steps.never_joined(report.replicas)",
    "None",
    NeverJoins(),
  ),
  Planted(
    "A13",
    "who calls last has the place, also if that call is late",
    f"{_COORDINATOR}.run",
    "Run._hello",
    "rival.rival != peer or self._has_alone(rival)",
    "False",
    Outage("comes back"),
    first=70,
  ),
  Planted(
    "A9",
    "of the gradients that wait, the latest one comes first",
    f"{_COORDINATOR}.steps.intake",
    "Intake.check",
    "self.queue.pop(0)",
    "self.queue.pop()",
    groups,
  ),
  Planted(
    "A9",
    "an early round is never announced again",
    f"{_COORDINATOR}.steps.rounds",
    "Rounds.deadline",
    "current.id.early",
    "False",
    Outage("stuck"),
  ),
  Planted(
    "A20",
    "a run goes on from the state of the first caller, though another is newer",
    f"{_COORDINATOR}.run",
    "Run._hello",
    "hello.start.step > history.step",
    "False",
  ),
  Planted(
    "A20",
    "who has brought the newest state is not waited for",
    f"{_COORDINATOR}.holders",
    "Holders.wait",
    "step < history.origin.step",
    "False",
    groups,
    first=85,
  ),
  Planted(
    "A22",
    "steps wait for the first gradient of a newcomer",
    f"{_COORDINATOR}.steps.intake",
    "Intake.joined",
    "self._ruling.can_go_without(state.member)",
    "False",
    Outage("comes back"),
    first=20,
  ),
  Planted(
    "A9",
    "a newcomer whose first gradient is late never begins",
    f"{_COORDINATOR}.steps.intake",
    "Intake._begin_newcomers",
    "newcomer.late is not None or (leased and state.has(0))",
    "False",
    Outage("comes back"),
  ),
  Planted(
    "A22",
    "a stranger that came first takes a step, though others are there",
    f"{_COORDINATOR}.steps.intake",
    "Intake._may_process",
    "self.has_job",
    "True",
    Outage("strangers first"),
    first=150,
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
    for seed in range(fault.first, fault.first + most):
      result = fault.kind.run(fault.kind.schedule(seed))
      if result.violation.startswith(f"{fault.rule}:"):
        return result
  return None
