"""Messages and store values: what is encoded comes back, all else is refused."""

import contextlib
import dataclasses
import json
import struct
import types
import typing
from typing import Annotated, Any

import hypothesis
import hypothesis.strategies as st
import pytest

from optax_dist.coordinator.protocol import codec, entries, messages
from optax_dist.coordinator.protocol.group import orders


def _values(kind: Any) -> st.SearchStrategy[Any]:
  """All values of an annotation, as the codec reads it."""
  if typing.get_origin(kind) is Annotated:
    (limit,) = kind.__metadata__
    if isinstance(limit, codec.Apart):
      return _values(typing.get_args(kind)[0])
    return st.integers(limit.least, 2**63 - 1)
  if kind is float:
    return st.floats(allow_nan=False, allow_infinity=False)
  if kind is int:
    return st.integers(-(2**63), 2**63 - 1)
  if kind is str:
    return st.text(max_size=8)
  if kind is bytes:
    return st.binary(max_size=8)
  if kind is bool:
    return st.booleans()
  if kind is types.NoneType:
    return st.none()
  arguments = typing.get_args(kind)
  if typing.get_origin(kind) is tuple and arguments[-1] is Ellipsis:
    return st.lists(_values(arguments[0]), max_size=2).map(tuple)
  if typing.get_origin(kind) is tuple:
    return st.tuples(*map(_values, arguments))
  if arguments:
    return st.one_of(*map(_values, arguments))
  hints = typing.get_type_hints(kind, include_extras=True)
  return st.builds(kind, **{name: _values(h) for name, h in hints.items()})


ALL = [
  (messages.MESSAGES, kind) for kind in typing.get_args(messages.Message)
] + [
  (entries.STORE_VALUES, kind) for kind in typing.get_args(entries.StoreValue)
]


def test_two_classes_of_one_name_are_refused():
  other = dataclasses.make_dataclass("Call", [("step", int)])
  with pytest.raises(TypeError, match="by their names; two are Call"):
    codec.Codec(messages.Call | other)


def test_a_call_is_a_message_among_the_orders_of_a_group():
  """It was read as the effect of one, which has the same fields, and refused."""
  call = messages.Call(3)
  assert orders.WIRE.decode(orders.WIRE.encode(call)) == call


@pytest.mark.parametrize(
  ("codec_", "kind"), ALL, ids=[kind.__name__ for _, kind in ALL]
)
def test_every_class_comes_back(codec_, kind):
  @hypothesis.settings(max_examples=25)
  @hypothesis.given(_values(kind))
  def check(value):
    assert codec_.decode(codec_.encode(value)) == value

  check()


ARRIVE = messages.Arrive(
  3, 7, 2, 1, True, 7, entries.AttemptId(0, 7, 0, 3), b"\0\xff" * 8, "", 0.5
)


@hypothesis.given(st.binary(max_size=64))
def test_no_bytes_raise_anything_but_bad_message(data):
  for codec_ in (messages.MESSAGES, entries.STORE_VALUES):
    with contextlib.suppress(codec.BadMessage):
      codec_.decode(data)


@hypothesis.given(st.data())
def test_no_changed_message_raises_anything_but_bad_message(data):
  good = bytearray(messages.MESSAGES.encode(ARRIVE))
  for _ in range(data.draw(st.integers(1, 4))):
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] = data.draw(st.integers(0, 255))
  with contextlib.suppress(codec.BadMessage):
    messages.MESSAGES.decode(good)


def _raw(header: Any, tail: bytes = b"") -> bytes:
  text = json.dumps(header).encode()
  return struct.pack("<I", len(text)) + text + tail


@pytest.mark.parametrize(
  ("data", "reason"),
  [
    (b"", "cut short"),
    (struct.pack("<I", 2**32 - 1), "cut short"),
    (_raw(["Nonsense"]), "a known name"),
    (_raw([["Done"]]), "a named value"),
    (_raw({"kind": "Done"}), "a named value"),
    (_raw(["Applied"]), "1 fields"),
    (_raw(["Applied", 1, 2]), "1 fields"),
    (_raw(["Applied", -3]), "at least 0"),
    (_raw(["Applied", 2**63]), "a whole number"),
    (_raw(["Applied", True]), "a whole number"),
    (_raw(["Applied", 1.0]), "a whole number"),
    (_raw(["Applied", None]), "a whole number"),
    (_raw(["Stalled", 1, float("nan"), ""]), "not JSON"),
    (_raw(["Stalled", 1, 10**400, ""]), "a number"),
    (_raw(["Stalled", 1, "2", ""]), "a number"),
    (_raw(["Leave", 1, "left", ""]), "true or false"),
    (_raw(["Asked", 1, 1, [4]]), "pairs of numbers"),
    (_raw(["Asked", 1, 1, [4, 5.0]]), "a whole number"),
    (_raw(["Asked", 1, 1, [4, True]]), "a whole number"),
    (_raw(["Asked", 1, 1, [4, 2**63]]), "a whole number"),
    (_raw(["Asked", 1, 1, [4, 5, None, 9]]), "a whole number"),
    (_raw(["Asked", 1, 1, {"4": 5}]), "pairs of numbers"),
    (_raw(["Applied", 1], b"more"), "more bytes"),
    (_raw(["Done", [0, 0, 0]]), "4 fields"),
    (b"\x05\0\0\0[[[[[", "not JSON"),
    (b"\x40\x0d\x03\0" + b"[" * 200_000, "not JSON"),
  ],
)
def test_bad_messages_are_refused(data, reason):
  with pytest.raises(codec.BadMessage, match=reason):
    messages.MESSAGES.decode(data)


def test_a_payload_must_be_as_long_as_it_says():
  whole = messages.MESSAGES.encode(ARRIVE)
  for length in range(len(whole)):
    with pytest.raises(codec.BadMessage):
      messages.MESSAGES.decode(whole[:length])


def test_a_field_of_the_wrong_type_is_not_sent():
  with pytest.raises(codec.BadMessage, match="a whole number"):
    messages.MESSAGES.encode(messages.Applied("3"))  # type: ignore[arg-type]
  with pytest.raises(TypeError, match="not one of"):
    messages.MESSAGES.encode(entries.Trimmed(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
  ("lease", "reason"),
  [
    ([(4, 5)], "a tuple"),
    ((4, 5), "2 values"),
    (((4,),), "2 values"),
    (([4, 5],), "2 values"),
    (((4, 5.0),), "a whole number"),
    (((4, 5), (True, 9)), "a whole number"),
    (((4, 2**63),), "a whole number"),
  ],
)
def test_what_is_no_lease_is_not_sent(lease, reason):
  with pytest.raises(codec.BadMessage, match=reason):
    messages.MESSAGES.encode(messages.Asked(0, 1, lease))


def test_payloads_are_not_copied_into_text():
  large = dataclasses.replace(ARRIVE, payload=bytes(range(256)) * 256)
  encoded = messages.MESSAGES.encode(large)
  assert large.payload in encoded
  assert len(encoded) < len(large.payload) + 200


def test_what_a_message_cannot_have_is_told_at_once():
  @dataclasses.dataclass(frozen=True)
  class Odd:
    value: dict

  with pytest.raises(TypeError, match="can't have a field of type"):
    codec.Codec(Odd)


def _commit(parts):
  return entries.Committed(
    entries.AttemptId(0, 7, 1, 3), parts, (), True, b"mean", False, (), ()
  )


def _part(i, **changes):
  return entries.Part(
    **{
      "incarnation": i,
      "replica": i,
      "sequence": 7,
      "local_step": 7,
      "staleness": 0,
      "count": 1,
      "weight": 1.0,
      **changes,
    }
  )


def test_fields_that_are_alike_are_sent_once():
  few = _commit(tuple(_part(i) for i in range(2)))
  many = _commit(tuple(_part(i) for i in range(200)))
  sizes = []
  for commit in (few, many):
    record = entries.Record(0, (commit,))
    raw = entries.STORE_VALUES.encode(record)
    assert entries.STORE_VALUES.decode(raw) == record
    sizes.append(len(raw))
  assert sizes[1] - sizes[0] < 198 * 9  # Two numbers each.


@pytest.mark.parametrize(
  "changes",
  [
    {"weight": -0.0},
    {"weight": 1},
    {"replica": "one"},
    {"data": ((3, 5),)},
    {"sequence": 8},
  ],
)
def test_one_that_is_not_alike_stays_what_it_is(changes):
  record = entries.Record(0, (_commit((_part(0), _part(1, **changes))),))
  found = entries.STORE_VALUES.decode(entries.STORE_VALUES.encode(record))
  assert repr(found) == repr(record)


@pytest.mark.parametrize(
  ("columns", "reason"),
  [
    ([[1]], "5 fields"),
    ([[0, 1], [0, 1], [1, 1, 1], [1], [1.0]], "2 values"),
    ([[0, 1], [0, 1], [], [1], [1.0]], "a list of values"),
    ([[0, 1], 3, [1], [1], [1.0]], "a list of values"),
    ([[0, 1], [0, -1], [1], [1], [1.0]], "at least 0"),
    ([[0, 1], [0, True], [1], [1], [1.0]], "a whole number"),
    ([[0, 1], [0, 2**63], [1], [1], [1.0]], "a whole number"),
    ([[0, 1], [0, 1], [1], [1], ["1"]], "a number"),
    ({}, "a list"),
  ],
)
def test_bad_columns_are_refused(columns, reason):
  @dataclasses.dataclass(frozen=True)
  class Row:
    first: int
    second: entries.Natural
    third: int
    fourth: int
    fifth: float

  @dataclasses.dataclass(frozen=True)
  class Table:
    rows: tuple[Row, ...]

  codec_ = codec.Codec(Table)
  with pytest.raises(codec.BadMessage, match=reason):
    codec_.decode(_raw(["Table", columns]))


def test_a_record_for_the_store_and_for_all_is_encoded_once():
  record = entries.Record(0, (_commit((_part(0),)),))
  stored = entries.STORE_VALUES.encode_once(record)
  assert entries.STORE_VALUES.encode_once(record) is stored
  told = messages.MESSAGES.parts(messages.Recorded(3, record))
  assert any(part is stored for part in told)
  other = entries.Record(1, (_commit((_part(0),)),))
  assert entries.STORE_VALUES.encode_once(other) != stored


def test_what_is_apart_must_be_what_it_says():
  beat = entries.STORE_VALUES.encode(entries.Beat(0, "p", "a", 0, 0))
  with pytest.raises(codec.BadMessage, match="Record expected"):
    messages.MESSAGES.decode(_raw(["Recorded", 3, len(beat)], beat))
  with pytest.raises(codec.BadMessage, match="cut short"):
    messages.MESSAGES.decode(_raw(["Recorded", 3, 900], beat))
  with pytest.raises(codec.BadMessage, match="a length"):
    messages.MESSAGES.decode(_raw(["Recorded", 3, "x"], beat))
