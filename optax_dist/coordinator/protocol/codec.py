"""Encodes dataclasses as bytes; the checks come from their annotations.

A value is a small JSON list (the class's name and the fields in order), after
it the contents of all `bytes` fields as they are. A tuple of dataclasses is
turned on its side: a list for each field, which has one value where all are
equal. Nothing is ever executed or unpickled, and what isn't exactly a value of
the declared types is refused by one error, `BadMessage`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
import struct
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_INT_LIMIT = 1 << 63
_INT_LEAST = -_INT_LIMIT

_dump = json.JSONEncoder(
  separators=(",", ":"), allow_nan=False, check_circular=False
).encode


def _no_constant(name: str) -> Any:
  raise ValueError(f"{name} is not a number")


_load = json.JSONDecoder(parse_constant=_no_constant).raw_decode

# To JSON: takes a value and the list that its bytes are added to.
_Packer = Callable[[Any, list[bytes]], Any]
# From JSON: takes what was found and what is left of the bytes, from the front.
_Unpacker = Callable[[Any, "_Blobs"], Any]


class BadMessage(ValueError):
  """Bytes are not a value of the declared types."""


@dataclasses.dataclass(frozen=True)
class AtLeast:
  """As `Annotated[int, AtLeast(1)]`: refuses smaller numbers."""

  least: int


@dataclasses.dataclass(frozen=True)
class Apart:
  """As `Annotated[Record, Apart(RECORDS)]`: encoded by itself, by this codec.

  What goes to many, and into several messages, is so encoded once.
  """

  codec: Codec[Any]


class _Blobs:
  """The bytes after the header, read from the front by `_unpack_bytes`."""

  __slots__ = ("data", "start")

  def __init__(self, data: bytes, start: int):
    self.data, self.start = data, start


class Codec(Generic[T]):
  """Encodes and decodes the classes of a union.

  Their fields may be int, float, str, bool, bytes, None, tuples, other
  dataclasses, and unions of those that JSON keeps apart; a union of dataclasses
  is recognized by their names.

  Example:
    >>> @dataclasses.dataclass(frozen=True)
    ... class Piece:
    ...   number: int
    ...   data: bytes
    >>> codec = Codec(Piece)
    >>> codec.decode(codec.encode(Piece(3, b"abc")))
    Piece(number=3, data=b'abc')
    >>> codec.decode(b"nonsense")
    Traceback (most recent call last):
    optax_dist.coordinator.protocol.codec.BadMessage: cut short
  """

  def __init__(self, kind: Any):
    """Creates a codec.

    Raises:
      TypeError: two classes of the union have the same name.
    """
    options = typing.get_args(kind) if _is_union(kind) else (kind,)
    self._pack, self._unpack = _tagged(options)
    self._kept: tuple[Any, bytes] | None = None

  def parts(self, value: T) -> list[bytes]:
    """The encoded value, in pieces to be joined.

    Raises:
      ValueError, TypeError: a field is not what it was declared to be.
    """
    blobs: list[bytes] = []
    header = _dump(self._pack(value, blobs)).encode()
    return [_LENGTH.pack(len(header)), header, *blobs]

  def encode(self, value: T) -> bytes:
    """The encoded value."""
    return b"".join(self.parts(value))

  def encode_once(self, value: T) -> bytes:
    """The encoded value; the last object's is cached."""
    kept = self._kept
    if kept is None or kept[0] is not value:
      kept = self._kept = value, self.encode(value)
    return kept[1]

  def decode(self, data: bytes | bytearray | memoryview) -> T:
    """The value.

    Raises:
      BadMessage: the data is not exactly one value of the declared types.
    """
    data = bytes(data)  # Most often it is, and this copies nothing.
    if len(data) < _LENGTH.size:
      raise BadMessage("cut short")
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    if end > len(data):
      raise BadMessage("cut short")
    text = ""
    try:
      text = data[_LENGTH.size : end].decode()
      header, read = _load(text)
    except (ValueError, RecursionError):
      raise BadMessage("its header is not JSON") from None
    if read != len(text):
      raise BadMessage("its header is not JSON")
    blobs = _Blobs(data, end)
    value = self._unpack(header, blobs)
    if blobs.start != len(data):
      raise BadMessage("more bytes than its header says")
    return value


def _is_union(kind: Any) -> bool:
  return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _bad(what: str, found: Any) -> BadMessage:
  return BadMessage(f"{what} expected, found {found!r:.60}")


def _refuse(what: str, found: Any) -> Any:
  raise _bad(what, found)


def _tagged(classes: tuple[type, ...]) -> tuple[_Packer, _Unpacker]:
  """One of several dataclasses, as its name followed by its fields."""
  fields = {c: _fields(c) for c in classes}
  by_class = {c: (c.__name__, fields[c][0]) for c in classes}
  by_name = {c.__name__: fields[c][1] for c in classes}
  if len(by_name) < len(by_class):
    names = sorted(c.__name__ for c in classes)
    twice = [a for a, b in itertools.pairwise(names) if a == b]
    raise TypeError(
      f"Classes of a union are told apart by their names; two are {twice[0]}."
    )

  def pack(value: Any, blobs: list[bytes]) -> Any:
    try:
      name, pack_fields = by_class[type(value)]
    except KeyError:
      raise TypeError(f"not one of {sorted(by_name)}: {value!r:.80}") from None
    return [name, *pack_fields(value, blobs)]

  def unpack(found: Any, blobs: _Blobs) -> Any:
    if type(found) is not list or not found or type(found[0]) is not str:
      raise _bad("a named value", found)
    unpack_fields = by_name.get(found[0])
    if unpack_fields is None:
      raise _bad("a known name", found[0])
    return unpack_fields(found[1:], blobs)

  return pack, unpack


def _fields(cls: type) -> tuple[_Packer, _Unpacker]:
  """A dataclass, as the list of its fields.

  Its functions are written as text and compiled, as `dataclasses` does it: one
  expression for each field, which is three times as fast as a call.
  """
  hints = typing.get_type_hints(cls, include_extras=True)
  names = [field.name for field in dataclasses.fields(cls)]
  known: dict[str, Any] = {"cls": cls, "bad": _bad, "refuse": _refuse}
  packed, unpacked = [], []
  for index, name in enumerate(names):
    kind = hints[name]
    x = f"x{index}"
    fits = _condition(kind, x)
    if fits:
      known[f"w{index}"] = _expected(kind)
      text = f"({x} if {fits} else refuse({{what}}({x}), {x}))"
      text = text.format(what=f"w{index}")
      packed.append(text)
      unpacked.append(text)
    else:
      known[f"p{index}"], known[f"u{index}"] = _field(kind)
      # Most often there is nothing in it, and no need for a call.
      empty = _nothing(kind)
      packed.append(empty[0].format(x=x, call=f"p{index}({x}, blobs)"))
      unpacked.append(empty[1].format(x=x, call=f"u{index}({x}, blobs)"))
  row = "".join(f"x{index}, " for index in range(len(names)))
  read = "".join(f"value.{name}, " for name in names)
  lines = [
    "def pack(value, blobs):",
    f"  ({row}) = ({read})",
    f"  return [{', '.join(packed)}]",
    "def unpack(found, blobs):",
    f"  if type(found) is not list or len(found) != {len(names)}:",
    f"    raise bad('{cls.__name__} of {len(names)} fields', found)",
    f"  ({row}) = found",
    f"  return cls({', '.join(unpacked)})",
  ]
  if not names:
    lines = [line for line in lines if not line.startswith("  ()")]
  exec("\n".join(lines), known)
  return known["pack"], known["unpack"]


def _nothing(kind: Any) -> tuple[str, str]:
  """Source code for packing and unpacking; `call` unless it is empty."""
  if _is_union(kind) and types.NoneType in typing.get_args(kind):
    text = "(None if {x} is None else {call})"
    return text, text
  if typing.get_origin(kind) is tuple and typing.get_args(kind)[-1] is Ellipsis:
    return "([] if {x} == () else {call})", "(() if {x} == [] else {call})"
  return "{call}", "{call}"


def _field(kind: Any) -> tuple[_Packer, _Unpacker]:
  if _condition(kind, "x"):
    return _plain(kind)
  if kind is bytes:
    return _pack_bytes, _unpack_bytes
  if kind == tuple[tuple[int, int], ...]:
    return _pack_ranges, _unpack_ranges
  if typing.get_origin(kind) is tuple:
    return _tuple(typing.get_args(kind))
  if typing.get_origin(kind) is typing.Annotated:
    return _apart(*typing.get_args(kind))
  if _is_union(kind):
    return _union(typing.get_args(kind))
  if dataclasses.is_dataclass(kind):
    assert isinstance(kind, type)
    pack, unpack = _fields(kind)
    return _checked(kind, pack), unpack
  raise TypeError(f"a message can't have a field of type {kind!r}")


_PLAIN: dict[Any, str] = {
  int: "a whole number",
  float: "a number",
  str: "a text",
  bool: "true or false",
  types.NoneType: "null",
}
# A bool is an int to Python, and not to us.
_CONDITIONS: dict[Any, str] = {
  int: f"type({{x}}) is int and {-_INT_LIMIT} <= {{x}} < {_INT_LIMIT}",
  float: (
    # Finite; and whole numbers that a float can't have are refused, too.
    f"type({{x}}) in (float, int) and {-sys.float_info.max!r} <= {{x}}"
    f" <= {sys.float_info.max!r}"
  ),
  str: "type({x}) is str",
  bool: "type({x}) is bool",
  types.NoneType: "{x} is None",
}


def _base(kind: Any) -> tuple[Any, int | None]:
  """A type without its bound, and the bound."""
  if typing.get_origin(kind) is not typing.Annotated:
    return kind, None
  base, *limits = typing.get_args(kind)
  least = [m.least for m in limits if isinstance(m, AtLeast)]
  return base, least[0] if least else None


def _condition(kind: Any, x: str) -> str:
  """Source code that tests `x` for a plain type; "" for other types."""
  base, least = _base(kind)
  if base not in _PLAIN:
    return ""
  text = _CONDITIONS[base].format(x=x)
  return text if least is None else f"{text} and {x} >= {least}"


def _expected(kind: Any) -> Callable[[Any], str]:
  """Describes the expected value, for errors."""
  base, least = _base(kind)
  fits = eval(f"lambda x: {_CONDITIONS[base].format(x='x')}")

  def expected(found: Any) -> str:
    if least is not None and fits(found):
      return f"a number of at least {least}"
    return _PLAIN[base]

  return expected


def _plain(
  kind: Any,
) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
  text = f"x if {_condition(kind, 'x')} else refuse(what(x), x)"
  known = {"refuse": _refuse, "what": _expected(kind)}
  check = eval(f"lambda x, blobs: {text}", known)
  return check, check


_whole, _ = _plain(int)


def _pack_bytes(value: Any, blobs: list[bytes]) -> int:
  if not isinstance(value, (bytes, bytearray, memoryview)):
    raise _bad("bytes", value)
  blobs.append(value)  # type: ignore[arg-type]
  return len(value)


def _unpack_bytes(found: Any, blobs: _Blobs) -> bytes:
  if type(found) is not int:
    raise _bad("a length", found)
  start, data = blobs.start, blobs.data
  blobs.start = end = start + found
  if not start <= end <= len(data):
    raise BadMessage("cut short")
  return data[start:end]


def _pack_ranges(value: Any, blobs: list[bytes]) -> list[int]:
  """Pairs of whole numbers as one list: leases are in every message of a step."""
  if type(value) is not tuple:
    raise _bad("a tuple", value)
  if len(value) == 1 and type(value[0]) is tuple and len(value[0]) == 2:
    # Most often there is one.
    start, stop = value[0]
    if (
      type(start) is type(stop) is int
      and _INT_LEAST <= start < _INT_LIMIT
      and _INT_LEAST <= stop < _INT_LIMIT
    ):
      return [start, stop]
  found: list[int] = []
  for pair in value:
    if type(pair) is not tuple or len(pair) != 2:
      raise _bad("2 values", pair)
    found += pair
  return [_whole(number, blobs) for number in found]


def _unpack_ranges(found: Any, blobs: _Blobs) -> tuple[tuple[int, int], ...]:
  if type(found) is not list or len(found) % 2:
    raise _bad("pairs of numbers", found)
  if len(found) == 2:
    start, stop = found
    if (
      type(start) is type(stop) is int
      and _INT_LEAST <= start < _INT_LIMIT
      and _INT_LEAST <= stop < _INT_LIMIT
    ):
      return ((start, stop),)
  whole = [_whole(number, blobs) for number in found]
  return tuple(zip(whole[::2], whole[1::2], strict=True))


def _is_apart(kind: Any) -> bool:
  extra = getattr(kind, "__metadata__", ())
  return any(isinstance(one, Apart) for one in extra)


def _apart(kind: Any, how: Apart) -> tuple[_Packer, _Unpacker]:
  def pack(value: Any, blobs: list[bytes]) -> int:
    if type(value) is not kind:
      raise _bad(kind.__name__, value)
    blobs.append(how.codec.encode_once(value))
    return len(blobs[-1])

  def unpack(found: Any, blobs: _Blobs) -> Any:
    value = how.codec.decode(_unpack_bytes(found, blobs))
    if type(value) is not kind:
      raise _bad(kind.__name__, value)
    return value

  return pack, unpack


def _columns(cls: type) -> tuple[_Packer, _Unpacker]:
  """Many values of one dataclass, as a list per field."""
  hints = typing.get_type_hints(cls, include_extras=True)
  names = [field.name for field in dataclasses.fields(cls)]
  read = operator.attrgetter(*names)
  # The first list tells how many there are, so it has all.
  fields = [_column(hints[name], bool(i)) for i, name in enumerate(names)]

  def pack(value: Any, blobs: list[bytes]) -> Any:
    if type(value) is not tuple:
      raise _bad("a tuple", value)
    if not value:
      return []
    for one in value:
      if type(one) is not cls:
        raise _bad(cls.__name__, one)
    rows = map(read, value)
    columns = zip(*rows, strict=True) if len(names) > 1 else [tuple(rows)]
    return [
      pack_column(column, blobs)
      for (pack_column, _), column in zip(fields, columns, strict=True)
    ]

  def unpack(found: Any, blobs: _Blobs) -> Any:
    if type(found) is not list:
      raise _bad("a list", found)
    if not found:
      return ()
    if len(found) != len(names):
      raise _bad(f"{cls.__name__} of {len(names)} fields", found)
    columns: list[list[Any]] = []
    many = 0
    for (_, unpack_column), column in zip(fields, found, strict=True):
      if type(column) is not list or not column:
        raise _bad("a list of values", column)
      many = many or len(column)
      if len(column) not in (1, many):
        raise _bad(f"{many} values", column)
      values = unpack_column(column, blobs)
      columns.append(values if len(values) == many else values * many)
    return tuple(map(cls, *columns))

  return pack, unpack


def _column(
  kind: Any, may_be_one: bool
) -> tuple[
  Callable[[tuple[Any, ...], list[bytes]], list[Any]],
  Callable[[list[Any], _Blobs], list[Any]],
]:
  """The values of one field: all, or only one if all are equal."""
  pack_one, unpack_one = _field(kind)
  base, least = _base(kind)
  whole = base is int
  lowest = -_INT_LIMIT if least is None else least

  def is_fine(found: Sequence[Any]) -> bool:
    """Whether these are all valid numbers, the usual case."""
    return (
      set(map(type, found)) == {int}
      and min(found) >= lowest
      and max(found) < _INT_LIMIT
    )

  def pack(values: tuple[Any, ...], blobs: list[bytes]) -> list[Any]:
    first = values[0]
    if (
      may_be_one
      and values.count(first) == len(values)
      and len(set(map(type, values))) == 1
      and (type(first) is not float or first)  # 0.0 is equal to -0.0.
    ):
      return [pack_one(first, blobs)]
    if whole and is_fine(values):
      return list(values)
    return [pack_one(value, blobs) for value in values]

  def unpack(found: list[Any], blobs: _Blobs) -> list[Any]:
    if whole and is_fine(found):
      return found
    return [unpack_one(value, blobs) for value in found]

  return pack, unpack


def _tuple(kinds: tuple[Any, ...]) -> tuple[_Packer, _Unpacker]:
  many = len(kinds) == 2 and kinds[1] is Ellipsis
  if many and dataclasses.is_dataclass(kinds[0]):
    assert isinstance(kinds[0], type)
    return _columns(kinds[0])
  if many:
    pack_one, unpack_one = _field(kinds[0])

    def pack_all(value: Any, blobs: list[bytes]) -> Any:
      if type(value) is not tuple:
        raise _bad("a tuple", value)
      return [pack_one(x, blobs) for x in value]

    def unpack_all(found: Any, blobs: _Blobs) -> Any:
      if type(found) is not list:
        raise _bad("a list", found)
      return tuple([unpack_one(x, blobs) for x in found])

    return pack_all, unpack_all

  pairs = [_field(kind) for kind in kinds]

  def pack(value: Any, blobs: list[bytes]) -> Any:
    if type(value) is not tuple or len(value) != len(pairs):
      raise _bad(f"{len(pairs)} values", value)
    return [p(x, blobs) for (p, _), x in zip(pairs, value, strict=True)]

  def unpack(found: Any, blobs: _Blobs) -> Any:
    if type(found) is not list or len(found) != len(pairs):
      raise _bad(f"{len(pairs)} values", found)
    return tuple([u(x, blobs) for (_, u), x in zip(pairs, found, strict=True)])

  return pack, unpack


def _union(kinds: tuple[Any, ...]) -> tuple[_Packer, _Unpacker]:
  """Plain types as they are, and dataclasses by name."""
  if len(kinds) == 2 and kinds[1] is types.NoneType and _is_apart(kinds[0]):
    pack_one, unpack_one = _field(kinds[0])
    return (
      lambda value, blobs: None if value is None else pack_one(value, blobs),
      lambda found, blobs: None if found is None else unpack_one(found, blobs),
    )
  classes = tuple(k for k in kinds if dataclasses.is_dataclass(k))
  plain: dict[type, Callable[[Any, Any], Any]] = {}
  for kind in kinds:
    base, _ = _base(kind)
    if base in _PLAIN:
      plain[base] = _plain(kind)[0]
    elif kind not in classes:
      raise TypeError(f"a message can't have a union with {kind!r}")
  names = " or ".join(_PLAIN[base] for base in plain)
  if float in plain:
    plain.setdefault(int, plain[float])
  pack_class, unpack_class = _tagged(typing.cast(tuple[type, ...], classes))

  def pack(value: Any, blobs: list[bytes]) -> Any:
    check = plain.get(type(value))
    if check is not None:
      return check(value, blobs)
    if not classes:
      raise _bad(names, value)
    return pack_class(value, blobs)

  def unpack(found: Any, blobs: _Blobs) -> Any:
    check = plain.get(type(found))
    if check is not None:
      return check(found, blobs)
    if not classes:
      raise _bad(names, found)
    return unpack_class(found, blobs)

  return pack, unpack


def _checked(cls: type, pack: _Packer) -> _Packer:
  def checked(value: Any, blobs: list[bytes]) -> Any:
    if type(value) is not cls:
      raise _bad(cls.__name__, value)
    return pack(value, blobs)

  return checked
