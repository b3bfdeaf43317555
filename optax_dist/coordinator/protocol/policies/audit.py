"""Finds members with wrong gradients: some slots are computed twice and compared.

In a deterministic run all members get the same gradient of a slot, bit by bit. A
part of all slots (`Batches.audit`) is computed by two members before the step is
committed, each of which sends a digest. If two digests differ, further members
compute the slot, until two agree; members that sent a different digest are wrong.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from optax_dist.coordinator.protocol.entries import Incarnation
from optax_dist.ledger import Batches, Spans, tree

# A digest in `SubmitGradient.work`: the first position of the slot, and the digest.
ENTRY = struct.Struct("<q16s")
# Sent in place of the digest, for each slot that counts as zeros because its gradient
# is not finite, also without an audit.
NOT_FINITE = bytes(16)


def pack(position: int, digest: bytes) -> bytes:
  """A slot's digest, as it is sent in `SubmitGradient.work`.

  Args:
    position: the first position of the slot.
    digest: digest of the gradient's bytes, 16 bytes.
  """
  return ENTRY.pack(position, digest)


def unpack(work: bytes) -> dict[int, bytes]:
  """The digests in `SubmitGradient.work`, by the first position of the slot.

  Raises:
    ValueError: it has another size.
  """
  if len(work) % ENTRY.size:
    raise ValueError(f"{len(work)} bytes of digests")
  return dict(ENTRY.iter_unpack(work))


class Verdict(NamedTuple):
  """The result of an audit of one slot whose digests differ.

  Attributes:
    slot: its number in the step.
    digests: the digest that each member has sent, in hexadecimal digits.
    wrong: members whose digest differs from that of two that agree; empty if that
      can't be decided, because no other member is left.
  """

  slot: int
  digests: dict[Incarnation, str]
  wrong: tuple[Incarnation, ...]


class Audit:
  """The audited slots of the current step, and the digests that were sent."""

  def __init__(self, data: Batches, step: int):
    """Starts without digests.

    Args:
      data: its `audit` says which part of the slots is compared.
      step: the next step.
    """
    self._data = data
    self._votes: dict[int, dict[Incarnation, bytes]] = {}
    self.begin(step)

  def begin(self, step: int) -> None:
    """Begins the audit of another step."""
    start = step * self._data.global_batch
    window = ((start, start + self._data.global_batch),)
    self._votes = {p: {} for p in self._data.audited(window)}

  def removed(self, incarnation: Incarnation) -> None:
    """A member is gone, and its digests don't count."""
    for votes in self._votes.values():
      votes.pop(incarnation, None)

  def arrived(
    self, incarnation: Incarnation, data: Spans, sent: dict[int, bytes]
  ) -> str:
    """Takes a member's digests; returns what is wrong with them, or "".

    Args:
      incarnation: the member.
      data: the samples of its slots.
      sent: digests, by the first position of the slot.
    """
    if any(p not in sent and _is_in(p, data) for p in self._votes):
      return "a gradient without the digests of its slots"
    for position, digest in sent.items():
      if position in self._votes:
        self._votes[position].setdefault(incarnation, digest)
    return ""

  def next(
    self,
    idle: Iterable[Incarnation],
    blocked: set[Incarnation],
    leases: Sequence[Spans],
  ) -> tuple[Incarnation, Spans] | None:
    """The next slot to compute again, and the idle member that computes it.

    Args:
      idle: members without a lease.
      blocked: members whose gradients are not finite. They are asked only to
        decide between digests that differ.
      leases: the leases of all other members.
    """
    at_work = collections.Counter(
      p for p in self._votes for lease in leases if _is_in(p, lease)
    )
    for incarnation in idle:
      for position, votes in self._votes.items():
        lacks = 0 if self._is_settled(votes) else self._lacks(votes)
        if incarnation in blocked and not self._differ(votes):
          continue
        if incarnation not in votes and at_work[position] < lacks:
          return incarnation, self._slot(position)
    return None

  def wants(self, slot: Spans, incarnation: Incarnation) -> bool:
    """Whether a member has not yet sent its digest of an audited slot."""
    return incarnation not in self._votes[slot[0][0]]

  def is_settled(self, members: set[Incarnation]) -> bool:
    """Whether no slot of the step has to be computed again.

    Args:
      members: the members that can compute a slot, since their gradients are finite.
    """
    return all(
      self._is_settled(votes)
      or (len(set(_finite(votes).values())) == 1 and members <= votes.keys())
      for votes in self._votes.values()
    )

  def verdict(self, members: set[Incarnation]) -> Verdict | None:
    """The verdict on a slot whose digests differ; None if there is none yet.

    Args:
      members: all members; a slot stays undecided only if each has computed it.
    """
    for position, every in self._votes.items():
      if not self._differ(every):
        continue
      votes = _finite(every)
      times = collections.Counter(votes.values())
      ((right, most),) = times.most_common(1)
      if most < 2 and not members <= every.keys():
        continue  # Another member can still decide.
      wrong = [i for i, digest in votes.items() if digest != right]
      return Verdict(
        tree.slots(self._data, self._slot(position))[0][0],
        {i: digest.hex() for i, digest in votes.items()},
        tuple(wrong) if most > 1 else (),
      )
    return None

  def _slot(self, position: int) -> Spans:
    size = self._data.unit(self._data.slots)
    return ((position, position + size),)

  def _lacks(self, votes: dict[Incarnation, bytes]) -> int:
    """How many more digests a slot needs."""
    return 1 if self._differ(votes) else 2 - len(_finite(votes))

  def _differ(self, votes: dict[Incarnation, bytes]) -> bool:
    return len(set(_finite(votes).values())) > 1

  def _is_settled(self, votes: dict[Incarnation, bytes]) -> bool:
    votes = _finite(votes)
    return len(votes) > 1 and len(set(votes.values())) == 1


def _finite(votes: dict[Incarnation, bytes]) -> dict[Incarnation, bytes]:
  """The digests to compare: those of finite gradients, if there are any.

  Gradients that are not finite can't be compared; `ledger.not_finite` handles them.
  """
  return {i: d for i, d in votes.items() if d != NOT_FINITE} or votes


def _is_in(position: int, spans: Spans) -> bool:
  return any(start <= position < stop for start, stop in spans)
