"""The events of a ledger, and its decisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from optax_dist.ledger.spans import Spans

# The holder of a lease: a replica's id, or the number of its membership.
Holder: TypeAlias = int | str


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
  """A replica gets a token, and asks for the samples of some gradients.

  Samples leased to it before and not submitted return to the pool.
  """

  holder: Holder
  count: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
  """Tells a coordinator that has started again which samples a replica computes on.

  They stay leased to it if no other replica holds them; otherwise it gets
  others.
  """

  holder: Holder
  spans: Spans
  count: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Accept:
  """A gradient on leased samples was accepted; see `fits`.

  Attributes:
    holder: its holder.
    spans: its samples.
    zeros: those of them that count as zeros in a deterministic step (`are_bad`).
  """

  holder: Holder
  spans: Spans
  zeros: Spans = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
  """A gradient was dropped, and its samples return to the pool.

  Attributes:
    holder: its holder.
    spans: its samples, whether or not it was accepted before.
    finite: whether all its numbers were finite; None if that is not known. What
      follows if they weren't is in `ledger.not_finite`.
  """

  holder: Holder
  spans: Spans
  finite: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class HolderLost:
  """A replica is gone, and its samples return to the pool.

  Attributes:
    holder: the replica.
  """

  holder: Holder


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
  """A replica that waits gets samples that another one computes on.

  The first gradient on them counts.
  """

  holder: Holder
  spans: Spans


@dataclasses.dataclass(frozen=True, slots=True)
class Swap:
  """An accepted gradient is returned: its replica tries other samples (`swap`)."""

  holder: Holder


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
  """A step with these gradients is committed.

  Attributes:
    parts: the gradients' holders and samples.
    skipped: samples that this step abandons (`State.abandoned`).
  """

  parts: tuple[tuple[Holder, Spans], ...]
  skipped: Spans = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Members:
  """The replicas that take part from now on.

  Without this event, each holder is a replica of its own.

  Attributes:
    replicas: the replica of each holder.
    expected: other replicas that may still come.
    need: how many gradients a step takes; None for as many as before.
  """

  replicas: Mapping[Holder, Holder]
  expected: int = 0
  need: int | None = None


Event: TypeAlias = (
  Ask | Claim | Accept | Drop | HolderLost | Copy | Swap | Commit | Members
)


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
  """The samples that a replica computes on next, in order.

  It replaces the previous lease, if that was not submitted.
  """

  holder: Holder
  spans: Spans
