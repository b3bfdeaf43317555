"""What the clients of a store process and that process send each other."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.store import interface

# The name of a store process to the transport; clients have other names.
STORE = "store"


@dataclasses.dataclass(frozen=True, slots=True)
class Welcome:
  """The first message to a client.

  Attributes:
    store: names this process and what it knows. After a restart it is another
      one, for the keys are gone.
  """

  store: str


Reply: TypeAlias = (
  Welcome
  | interface.Done
  | interface.Conflict
  | interface.Value
  | interface.Absent
  | interface.Refused
)

REQUESTS: codec.Codec[interface.Request] = codec.Codec(interface.Request)
REPLIES: codec.Codec[Reply] = codec.Codec(Reply)
