"""The messages between the processes of one replica, if it has several.

Process 0 speaks for the replica: only it has the protocol's core. An *order* is an
effect of that core which every process executes. A *report* is an input that occurs in
another process, and which process 0 needs. So most messages are the core's effects and
inputs, unchanged.
"""

from __future__ import annotations

import hashlib
import json
import typing
from collections.abc import Sequence
from typing import Any, TypeAlias

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.codec import (
  Codec,
  Natural,
  Struct,
)
from optax_dist.coordinator.protocol.entries import (
  Process,
)


class Advance(Struct):
  """The training loops see the events up to here, and no more.

  Events continue while the training loops compute. So that all loops make the same
  decisions, process 0's loop says how many events it has seen, and the other loops
  apply as many. Process 0's training loop gives this message to `RankZero.step` as an
  input, which sends it to the other processes, in the order of the calls.

  Attributes:
    call: number of the call, from 0; it differs if the loops are not at the
      same point of the program.
    events: number of events for training loops since the start.
    flag: process 0's decision, for example that a wait timed out.
  """

  call: Natural
  events: Natural
  flag: bool = False


class Ready(Struct):
  """Process 0 asks whether another process is connected, which sends it back.

  Only when all have answered does process 0 call the coordinator: a refusal has to
  reach all processes.
  """


class Signalled(Struct):
  """A process has got a signal to end, like perhaps all of them; also an effect.

  Attributes:
    number: the signal's number.
  """

  number: Natural


class EndGroup(Struct):
  """A process of the replica is lost, and the replica with it; also an effect.

  All waits raise the error, connections are closed, and the process ends after
  a while even if its program hangs in a collective with the lost process.
  """

  reason: str


# Events that all processes have to report before they are an input of the core.
Answer: TypeAlias = (
  msg.SubmitGradient
  | msg.Done
  | msg.Failed
  | msg.Fingerprint
  | ins.SnapshotFetched
  | ins.SnapshotFailed
)
Report: TypeAlias = Answer | msg.Leave | Ready | Signalled

ANSWERS = typing.get_args(Answer)

# Inputs and effects of `RankZero` and `WorkerRank`: those of the core, and some more.
Input: TypeAlias = ins.Input | Advance | Signalled
Effect: TypeAlias = fx.Effect | Advance | Ready | Signalled | EndGroup

# Everything that is sent on a connection.
WIRE: Codec[Any] = Codec(msg.Message | Input | Effect)


def send(peer: Process, message: Effect | Report) -> fx.Send:
  """Sends an order or a report to another process of the replica."""
  return fx.Send((peer,), message)  # type: ignore[arg-type]


# Addresses of a replica, which are one text to the core.


def join_addresses(addresses: Sequence[tuple[Process, str]]) -> str:
  """Names and addresses of a replica's processes, as one address.

  Example:
    >>> text = join_addresses([("a0", "unix:x"), ("a1", "unix:y")])
    >>> address_of("a0", text, 1)
    ('a1', 'unix:y')
  """
  return json.dumps([list(address) for address in addresses])


def address_of(
  process: Process, address: str, rank: int
) -> tuple[Process, str]:
  """Name and address of the process of this rank.

  An address that can't be parsed is returned unchanged, with the name of
  process 0: a connection to it fails.
  """
  try:
    name, own = json.loads(address)[rank]
  except (ValueError, TypeError, LookupError):
    return process, address
  return str(name), str(own)


def combined(digests: Sequence[str]) -> str:
  """Combines the digests of all processes, part by part.

  Example:
    >>> combined(["a-b", "c-d"]) == combined(["a-b", "c-e"])
    False
  """
  columns = zip(*(digest.split("-") for digest in digests), strict=True)
  return "-".join(
    hashlib.blake2b(",".join(column).encode(), digest_size=8).hexdigest()
    for column in columns
  )
