"""What no process should send: it is refused or ignored, and changes nothing."""

from __future__ import annotations

import random
from typing import Any

from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.entries import (
  AttemptId,
  Record,
  Removed,
)

# A sequence, a step and an attempt that no run comes to.
_NEVER = 1_000_000


def _to_leader(r: random.Random) -> tuple[msg.Message, ...]:
  attempt = AttemptId(0, _NEVER, r.choice((0, 1)), 0)
  gradient = lambda step, total, count: msg.Arrive(
    _NEVER, step, total, count, True, 0, None, b"", "", None
  )
  return (
    gradient(0, 1, 2),
    gradient(_NEVER, 1, 1),
    msg.Done(attempt),
    msg.Failed(attempt, None, "nonsense"),
    msg.Stalled(0, 1.0, "nonsense"),
  )


def _to_followers() -> tuple[msg.Message, ...]:
  """What only a leader may say; from another process it is ignored."""
  return (
    msg.Dropped(0, "stale", 1, (), True),
    msg.Asked(0, -1, 7, ()),
    msg.Serve(1, "a0", "at a0", 0),
    msg.Fetch(1, "a0", "at a0"),
    msg.AllBegun(AttemptId(0, 0, 1, 0)),
    msg.Call(0),
    msg.NotLeader(),
    msg.Refused("nonsense"),
    msg.Welcome(1, 0, None, 0),
    msg.Recorded(_NEVER, Record(0, (Removed(0, True, "nonsense"),))),
  )


def send(world: Any, process: Any, others: list[Any], r: random.Random) -> None:
  """A process sends some of it to others."""
  leads = process.node.leader is not None
  for other in others:
    both = _to_leader(r) if leads else (*_to_leader(r), *_to_followers())
    for message in r.sample(both, 3):
      world.tell(f"{process.name} sends {other.name} {type(message).__name__}")
      world.send(process, other.name, message)
