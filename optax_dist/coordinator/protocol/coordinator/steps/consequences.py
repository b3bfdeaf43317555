"""What a run has to do because of its steps."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from optax_dist.coordinator.protocol.entries import Incarnation


class Evict(NamedTuple):
  """A member has to go."""

  incarnation: Incarnation
  reason: str
  wrong: bool = False


class Fail(NamedTuple):
  """The run can't go on."""

  reason: str


Consequence: TypeAlias = Evict | Fail
