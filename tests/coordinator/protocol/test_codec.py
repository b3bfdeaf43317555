"""Messages and records of the log: what is encoded comes back, all else is refused."""

import contextlib
import types
import typing
from typing import Annotated, Any

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from optax_dist import ledger
from optax_dist.coordinator.protocol import codec, entries, messages


def _values(kind: Any) -> st.SearchStrategy[Any]:
  """All values of an annotation, as the codec reads it."""
  if typing.get_origin(kind) is Annotated:
    (limit,) = kind.__metadata__
    if kind.__origin__ is int:
      return st.integers(limit.ge, limit.le)
    if typing.get_origin(kind.__origin__) is tuple:
      return _values(kind.__origin__).filter(
        lambda found: len(found) >= limit.min_length
      )
    return st.floats(limit.ge, limit.le)
  if kind is int:
    return st.integers(-(2**63), 2**63 - 1)
  if kind is str:
    return st.text(max_size=8)
  if kind is bytes:
    return st.binary(max_size=8)
  if kind is bool:
    return st.booleans()
  if kind is ledger.Batches:  # Which not all numbers make.
    return st.builds(kind, st.integers(8, 99), st.integers(1, 8))
  if kind is types.NoneType:
    return st.none()
  arguments = typing.get_args(kind)
  if typing.get_origin(kind) is typing.Literal:
    return st.sampled_from(arguments)
  if typing.get_origin(kind) is tuple and arguments[-1] is Ellipsis:
    return st.lists(_values(arguments[0]), max_size=2).map(tuple)
  if typing.get_origin(kind) is list:
    return st.lists(_values(arguments[0]), max_size=2)
  if typing.get_origin(kind) is dict:
    return st.dictionaries(*map(_values, arguments), max_size=2)
  if typing.get_origin(kind) is tuple:
    return st.tuples(*map(_values, arguments))
  if arguments:
    return st.one_of(*map(_values, arguments))
  hints = typing.get_type_hints(kind, include_extras=True)
  fields = {name: _values(hints[name]) for name in kind.__match_args__}
  return st.builds(kind, **fields)


ALL = [
  (messages.MESSAGES, kind) for kind in typing.get_args(messages.Message)
] + [(entries.RECORDS, kind) for kind in typing.get_args(entries.Entry)]


def test_two_structs_of_one_name_in_a_union_are_refused():
  other = msgspec.defstruct("Call", [("step", int)], bases=(codec.Struct,))
  with pytest.raises(TypeError, match="tag"):
    codec.Codec(messages.Call | other)


@pytest.mark.parametrize(
  ("codec_", "kind"), ALL, ids=[kind.__name__ for _, kind in ALL]
)
def test_every_struct_survives_encoding(codec_, kind):
  @hypothesis.settings(max_examples=25)
  @hypothesis.given(_values(kind))
  def check(value):
    if codec_ is entries.RECORDS:
      value = entries.Record((value,))
    result = codec_.decode(codec_.encode(value))
    assert result == value
    assert type(result) is type(value)

  check()


ARRIVE = messages.SubmitGradient(
  *(3, 1, 7, 2, True, b"\0\xff" * 8, "", 0.5),
  applied=7,
  early=entries.RoundId(0, 7, 3, True),
)


@hypothesis.given(st.binary(max_size=64))
def test_any_bytes_decode_or_raise_bad_message(data):
  for codec_ in (messages.MESSAGES, entries.RECORDS):
    with contextlib.suppress(codec.BadMessage):
      codec_.decode(data)


@hypothesis.given(st.data())
def test_changed_message_decodes_or_raises_bad_message(data):
  good = bytearray(messages.MESSAGES.encode(ARRIVE))
  for _ in range(data.draw(st.integers(1, 4))):
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] = data.draw(st.integers(0, 255))
  with contextlib.suppress(codec.BadMessage):
    messages.MESSAGES.decode(good)


def _raw(value: Any) -> bytes:
  return msgspec.msgpack.encode(value)


@pytest.mark.parametrize(
  ("data", "reason"),
  [
    (b"", "truncated"),
    (b"\xdd\xff\xff\xff\xff", "truncated"),
    (_raw(["Applied"])[:3], "truncated"),
    (_raw(["Nonsense"]), "Invalid value 'Nonsense'"),
    (_raw([["Done"]]), "Expected `str`"),
    (_raw({"kind": "Done"}), "Expected `array`"),
    (_raw(["Applied"]), "at least length 2"),
    (_raw(["Applied", 1, 2]), "at most length 1"),
    (_raw(["Applied", -3]), ">= 0"),
    (_raw(["Applied", 2**63]), "<= 9223372036854775807"),
    (_raw(["Applied", True]), "got `bool`"),
    (_raw(["Applied", 1.0]), "got `float`"),
    (_raw(["Applied", None]), "got `None`"),
    (_raw(["Stalled", 1, float("nan"), ""]), "Expected `float`"),
    (_raw(["Stalled", 1, float("inf"), ""]), "Expected `float`"),
    (_raw(["Stalled", 1, "2", ""]), "got `str`"),
    (_raw(["Leave", 1, "left", ""]), "Expected `bool`"),
    (_raw(["RequestGradients", 1, 1, [4]]), "Expected `array`"),
    (_raw(["RequestGradients", 1, 1, [[4]]]), "length 2"),
    (_raw(["RequestGradients", 1, 1, [[4, 5.0]]]), "got `float`"),
    (_raw(["RequestGradients", 1, 1, {"4": 5}]), "got `object`"),
    (_raw(["Applied", 1]) + b"more", "trailing characters"),
    (_raw(["Done", ["RoundId", 0, 0]]), "at least length 4"),
    (b"\x91" * 200_000, "Expected `str`"),
  ],
)
def test_bytes_of_another_format_are_refused_with_the_reason(data, reason):
  with pytest.raises(codec.BadMessage, match=reason):
    messages.MESSAGES.decode(data)
