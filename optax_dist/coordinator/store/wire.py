"""What the clients of a store process and that process send each other."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.store import interface

# The name of a store process to the transport; clients have other names.
STORE = "store"


@dataclasses.dataclass(frozen=True, slots=True)
class Watch:
  """See `interface.Store.watch`.

  Attributes:
    watch: its number.
    prefix: of the keys.
    since: the revision up to which the client knows them.
  """

  watch: int
  prefix: str
  since: int


@dataclasses.dataclass(frozen=True, slots=True)
class Unwatch:
  """See `interface.Store.unwatch`."""

  watch: int


@dataclasses.dataclass(frozen=True, slots=True)
class Welcome:
  """The first message to a client.

  Attributes:
    store: names this process and what it knows. After a restart it is another
      one, for the keys are gone.
  """

  store: str


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
  """See `interface.Changed`.

  Attributes:
    watch: its number.
    revision: of the put.
    key: the whole key.
    value: its value.
  """

  watch: int
  revision: int
  key: str
  value: bytes


Request: TypeAlias = interface.Request | Watch | Unwatch
Reply: TypeAlias = (
  Welcome
  | Told
  | interface.Current
  | interface.Done
  | interface.Conflict
  | interface.Value
  | interface.Absent
  | interface.Refused
)

REQUESTS: codec.Codec[Request] = codec.Codec(Request)
REPLIES: codec.Codec[Reply] = codec.Codec(Reply)
