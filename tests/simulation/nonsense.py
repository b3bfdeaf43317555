"""Messages that no process should send: they are refused or ignored."""

from __future__ import annotations

import random
from typing import Any

from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.entries import Removed, RoundId, Start
from optax_dist.ledger import NOTHING_DONE

# A sequence, a step and a round that no run comes to.
_NEVER = 1_000_000


def _to_coordinator(r: random.Random) -> tuple[msg.Message, ...]:
  round_ = RoundId(0, _NEVER, 1, r.choice((False, True)))
  gradient = msg.SubmitGradient(_NEVER, 0, _NEVER, 1, True)
  return (
    gradient,
    msg.Done(round_),
    msg.Failed(round_, None, "nonsense"),
    msg.Stalled(0, 1.0, "nonsense"),
  )


def _to_members() -> tuple[msg.Message, ...]:
  """Messages that only a coordinator may send; from others they are refused."""
  return (
    msg.Dropped(0, "stale", 1),
    msg.RequestGradients(-1, 7, ()),
    msg.Serve(1, "a0", "at a0", 0),
    msg.Fetch(1, "a0", "at a0"),
    msg.Cancel(RoundId(0, 0, 1)),
    msg.Call(0),
    msg.Refused("nonsense"),
    msg.Welcome(0, "", 1, Start(), 0, 0, NOTHING_DONE, False, False),
    Removed(0, True, "nonsense"),
  )


def send(world: Any, process: Any, others: list[Any], r: random.Random) -> None:
  """A replica's process sends some of it to others."""
  for other in others:
    some = _to_coordinator(r) if other is world.chief else _to_members()
    for message in r.sample(some, 3):
      world.tell(f"{process.name} sends {other.name} {type(message).__name__}")
      world.send(process, other.name, message)
