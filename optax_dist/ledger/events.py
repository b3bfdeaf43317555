"""What happens to a ledger, and what it decides."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from optax_dist.ledger.spans import Spans

# Who holds a lease: a replica's id, or the number of its membership.
Holder: TypeAlias = int | str


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
  """A replica gets a token, and asks for the samples of so many gradients.

  What it was leased before and has not submitted returns to the pool.
  """

  holder: Holder
  count: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
  """A new leader learns which samples a replica computes on.

  They stay leased to it if nobody else holds them; otherwise it asks anew.
  """

  holder: Holder
  spans: Spans
  count: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Accept:
  """A gradient on these samples of its lease is in; see `fits`."""

  holder: Holder
  spans: Spans


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
  """A gradient doesn't count, and its samples return to the pool.

  Attributes:
    holder: whose.
    spans: its samples, whether it was accepted before or not.
    finite: whether all its numbers were finite; samples with which they were not,
      three times, are given up.
  """

  holder: Holder
  spans: Spans
  finite: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Gone:
  """A replica takes part no more, and what it holds returns to the pool.

  Attributes:
    holder: which one.
    keep: samples of a gradient that may be committed all the same, for it is in
      an attempt that goes on; `Commit` or `Drop` follows.
  """

  holder: Holder
  keep: Spans = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
  """A step with these gradients is committed.

  Attributes:
    parts: whose gradients, and on which samples.
    skipped: samples that are given up with it (`State.giving_up`).
  """

  parts: tuple[tuple[Holder, Spans], ...]
  skipped: Spans = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
  """From now on a step takes so many gradients."""

  gradients: int


Event: TypeAlias = Ask | Claim | Accept | Drop | Gone | Commit | Need


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
  """A replica computes on these samples next, in this order.

  It replaces what it was leased before, if it has not submitted that.
  """

  holder: Holder
  spans: Spans
