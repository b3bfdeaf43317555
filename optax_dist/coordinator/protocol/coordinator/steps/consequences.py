"""What a run has to do because of its steps: evict a member, or end with an error."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from optax_dist.coordinator.protocol.entries import Incarnation


class Evict(NamedTuple):
  """A member has to be removed; if its gradients are `wrong`, its process for good."""

  incarnation: Incarnation
  reason: str
  wrong: bool = False


class Fail(NamedTuple):
  """The run can't go on."""

  reason: str


Consequence: TypeAlias = Evict | Fail
