"""Messages as bytes: typed structs in MessagePack, every field of them checked.

    bytes -> Codec.decode -> a `Struct` of the declared classes, or `BadMessage`

A struct is a list: its class's name, then its fields in order. Nothing is ever
executed or unpickled, and what isn't exactly a value of the declared types is
refused by one error.
"""

from __future__ import annotations

import sys
import typing
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")

_MAX_INT = (1 << 63) - 1

# Whole numbers that fit into 64 bits with a sign, and finite numbers.
Integer: TypeAlias = Annotated[int, msgspec.Meta(ge=-_MAX_INT, le=_MAX_INT)]
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=_MAX_INT)]
# The most replicas or processes that a message may speak of: an error may name each.
MOST_NAMED = 1 << 16
Several: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MOST_NAMED)]
Finite: TypeAlias = Annotated[
  float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)
]
# A duration that a clock can have measured; small enough that sums stay finite.
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]

#: A copy of a struct with other values in some of its fields.
replace = msgspec.structs.replace


class BadMessage(ValueError):
  """Bytes are not a value of the declared types."""


@typing.dataclass_transform(frozen_default=True)
class Struct(
  msgspec.Struct,
  frozen=True,
  tag=True,
  array_like=True,
  forbid_unknown_fields=True,
):
  """The base of messages, and of all that is sent or stored: frozen, in slots.

  Example:
    >>> class Piece(Struct):
    ...   number: Natural
    ...   data: bytes
    >>> codec = Codec(Piece)
    >>> codec.decode(codec.encode(Piece(3, b"abc")))
    Piece(number=3, data=b'abc')
    >>> codec.decode(codec.encode(Piece(-3, b"abc")))
    Traceback (most recent call last):
    optax_dist.coordinator.protocol.codec.BadMessage: Expected `int` >= 0 - at `$[1]`
  """


class Codec(Generic[T]):
  """Encodes and decodes the structs of a union, distinguished by their names."""

  def __init__(self, kind: Any):
    """Creates a codec.

    Raises:
      TypeError: a type can't be distinguished from another one in its union.
    """
    self._encode = msgspec.msgpack.Encoder().encode
    self._decode = msgspec.msgpack.Decoder(kind).decode

  def encode(self, value: T) -> bytes:
    """The encoded value."""
    return self._encode(value)

  def decode(self, data: bytes | bytearray | memoryview) -> T:
    """The value.

    Raises:
      BadMessage: the data is not exactly one value of the declared types.
    """
    try:
      return self._decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
      raise BadMessage(str(error)) from None
