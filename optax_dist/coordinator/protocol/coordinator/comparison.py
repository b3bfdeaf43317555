"""Which job a run has, if the jobs of its replicas differ.

The replica that comes first may be the one with the wrong job. Before the first step
the run can still change its job, so until then a replica whose job differs waits. The
run gets the job of more than half of its replicas, as soon as there is one. If all have
called and there is no such job, nothing says which job is right: the run ends, unless
the replicas with the first job are enough for a step. In that case their first step
waits until all replicas have called, or had time to.
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
    other: a call with the run's new job; None if the run keeps the job it began with.
    tie: why no job can be chosen; "" if one is.
  """

  other: Hello | None = None
  tie: str = ""


class _Group(NamedTuple):
  """Replicas with the same job."""

  job: Job
  replicas: set[ReplicaId]
  first: Hello | None = None


class Comparison:
  """Calls of replicas whose job is not the one that the run has begun with.

  Attributes:
    calls: the calls that wait for a verdict, by process.
    until: until when the members wait for a verdict, if they are enough for a step.
  """

  def __init__(self) -> None:
    """Starts without any."""
    self.calls: dict[Process, Hello] = {}
    self.until = math.inf

  def add(self, peer: Process, hello: Hello, until: float) -> None:
    """A replica with another job has called, and waits.

    Args:
      peer: the replica's process.
      hello: its call.
      until: the new `until`, if no other call waits yet.
    """
    if not self.calls:
      self.until = until
    self.calls[peer] = hello

  def verdict(
    self,
    job: Job,
    members: Iterable[ReplicaId],
    needed: int,
    absent: int,
    now: float,
  ) -> Verdict | None:
    """Which job the run has; None as long as more replicas have to call.

    Args:
      job: the job that the run has begun with.
      members: the replicas that have this job.
      needed: how many replicas can take a step.
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
    has_waited = now >= self.until
    all_called = called + absent >= total
    # A step with k > N needs one replica, which is too few to decide a tie.
    first_is_enough = size(groups[0]) >= job.rules.replicas_to_aggregate
    is_due = all_called or (has_waited and size(groups[0]) >= needed)
    decides = 2 * most > (called if is_due else total)
    if len(largest) == 1 and decides:
      return Verdict(largest[0].first)
    if not (all_called or (has_waited and first_is_enough)):
      return None
    if first_is_enough:
      return Verdict()
    return Verdict(tie=_tie([group for group in groups if group.replicas]))


def _tie(groups: list[_Group]) -> str:
  """The error text of a tie: how the jobs differ, and which replicas have which."""
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


# Options that each replica may choose for itself.
_TIMES = ("timeout", "transfer_timeout", "silence_timeout", "stall_warning")


def difference(ours: Job, theirs: Job, whose: str = "the job") -> str:
  """Names the difference between two jobs; "" if there is none.

  Args:
    ours: one job.
    theirs: another.
    whose: the owner of the first job, for the text.
  """
  other = dict(theirs.agreement)
  for name, text in ours.agreement:
    value = other.get(name, "")
    if name not in other or _compared(value) != _compared(text):
      return _differs(name, _shown(value), _shown(text), whose)
  for name in ("rules", "leaves", "wire", "data", "fragments"):
    value, text = getattr(theirs, name), getattr(ours, name)
    if name == "rules":  # Times may differ: the first replica's are used.
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
  """All lines of such a text, human-readable."""
  first, _, about = text.partition("\n")
  return f"{first!r:.300}" + (f" ({about:.300})" if about else "")
