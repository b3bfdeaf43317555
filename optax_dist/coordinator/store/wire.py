"""The messages between a store process and its clients."""

from __future__ import annotations

from typing import TypeAlias

from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.store import interface

# The transport name of a store process; clients have other names.
STORE = "store"


class Welcome(codec.Struct):
  """The first message to a client.

  Attributes:
    store: identifies this process and its data. It changes with a restart,
      since the keys are lost.
  """

  store: str


Reply: TypeAlias = Welcome | interface.Answer

REQUESTS: codec.Codec[interface.Request] = codec.Codec(interface.Request)
REPLIES: codec.Codec[Reply] = codec.Codec(Reply)
