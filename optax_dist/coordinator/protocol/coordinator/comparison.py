"""Which job a run has, if those of its replicas differ.

The first one to come may be the one that is wrong. Before the first step nothing is
lost, so a replica whose job differs waits until then. The run has the job of more
than half of its replicas, as soon as that is known. If all have called and there is no
such job, nobody can say which one is right: the run ends, unless those that have come
first are enough for a step. These wait with it until all have called, or had time to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.protocol.entries import Job, Process, ReplicaId
from optax_dist.coordinator.protocol.messages import Hello


class Verdict(NamedTuple):
  """Which job a run has.

  Attributes:
    other: a call with that job, if it is not the one that the run has begun with.
    tie: why no job is; "" if one is.
  """

  other: Hello | None = None
  tie: str = ""


class _Group(NamedTuple):
  """Replicas that agree."""

  job: Job
  replicas: set[ReplicaId]
  first: Hello | None = None


class Comparison:
  """Calls of replicas whose job is not the one that the run has begun with.

  Attributes:
    calls: those that wait for a verdict, by process.
    until: how long those that are enough for a step wait for it.
  """

  def __init__(self) -> None:
    """Starts without any."""
    self.calls: dict[Process, Hello] = {}
    self.until = math.inf

  def add(self, peer: Process, hello: Hello, until: float) -> None:
    """A replica with another job has called, and waits.

    Args:
      peer: its process.
      hello: what it says.
      until: how long others wait, if none does yet.
    """
    if not self.calls:
      self.until = until
    self.calls[peer] = hello

  def verdict(
    self, job: Job, members: Iterable[ReplicaId], absent: int, now: float
  ) -> Verdict | None:
    """Which job the run has; None as long as more replicas have to call.

    Args:
      job: the one that it has begun with.
      members: the replicas that have it.
      absent: how many replicas are known not to come.
      now: the time.
    """
    groups = [_Group(job, set(members))]
    for hello in self.calls.values():
      for group in groups:
        if not difference(group.job, hello.job):
          group.replicas.add(hello.replica)
          break
      else:
        groups.append(_Group(hello.job, {hello.replica}, hello))
    size = lambda group: len(group.replicas)
    most = max(map(size, groups))
    largest = [group for group in groups if size(group) == most]
    total = max(group.job.rules.total_num_replicas for group in largest)
    called = sum(map(size, groups))
    first_is_enough = size(groups[0]) >= job.rules.replicas_to_aggregate
    all_called = called + absent >= total or (
      first_is_enough and now >= self.until
    )
    decides = 2 * most > total or (all_called and 2 * most > called)
    if len(largest) == 1 and decides:
      return Verdict(largest[0].first)
    if not all_called:
      return None
    if first_is_enough:
      return Verdict()
    return Verdict(tie=_tie([group for group in groups if group.replicas]))


def _tie(groups: list[_Group]) -> str:
  """Names all that differ."""
  first, *others = groups
  names = lambda group: ", ".join(sorted(map(repr, group.replicas)))
  texts = [
    f"replica {names(group)}: {difference(first.job, group.job, 'the first has')}"
    for group in others
  ]
  return (
    "Before the first step the replicas don't agree, and no job is that of more"
    f" than half of them. Beside replica {names(first)}, which came first,"
    f" {'; '.join(texts)}. Start all of them with the same program and options."
  )


# What each replica may choose for itself.
_TIMES = ("timeout", "transfer_timeout", "silence_timeout", "stall_warning")


def difference(ours: Job, theirs: Job, whose: str = "the job") -> str:
  """Names the difference between two jobs; "" if there is none.

  Args:
    ours: one job.
    theirs: another.
    whose: what has the first one, for the text.
  """
  other = dict(theirs.agreement)
  for name, text in ours.agreement:
    value = other.get(name, "")
    if name not in other or _compared(value) != _compared(text):
      return _differs(name, _shown(value), _shown(text), whose)
  for name in ("rules", "leaves", "wire", "data", "fragments"):
    value, text = getattr(theirs, name), getattr(ours, name)
    if name == "rules":  # Those of the first to come are the coordinator's.
      value = codec.replace(value, **{x: getattr(text, x) for x in _TIMES})
    if value != text:
      return _differs(name, repr(value), repr(text), whose)
  return ""


def _differs(name: str, theirs: str, ours: str, whose: str) -> str:
  return f"it differs in its {name}: it has {theirs:.300}, {whose} {ours:.300}"


def _compared(text: str) -> str:
  """The first line of a text that replicas must agree on."""
  return text.partition("\n")[0]


def _shown(text: str) -> str:
  """All lines of it, human-readable."""
  first, _, about = text.partition("\n")
  return f"{first!r:.300}" + (f" ({about:.300})" if about else "")
