"""What a store process and its clients say: all of it, and nothing else."""

import typing

import pytest

from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.store import interface, wire
from optax_dist.coordinator.transport import interface as transports

_LAST = 2**63 - 1  # A client may count for long.
_KEY = "k" * interface.MAX_KEY
_VALUE = bytes(range(256)) * (interface.MAX_VALUE // 256)
_REQUESTS = (
  interface.PutIfAbsent(_LAST, _KEY, _VALUE),
  interface.Put(_LAST, _KEY, _VALUE),
  interface.Get(_LAST, _KEY),
  interface.Delete(_LAST, (_KEY,) * interface.MAX_KEYS),
  interface.Delete(_LAST, ()),
)
_REPLIES = (
  wire.Welcome("a store"),
  interface.Done(_LAST),
  interface.Conflict(_LAST, _VALUE),
  interface.Value(_LAST, _VALUE),
  interface.Value(_LAST, b""),
  interface.Value(_LAST, None),
  interface.Unknown(_LAST, "é" * 1000),
)


def test_each_request_and_each_answer_of_a_table_is_here():
  assert {*map(type, _REQUESTS)} == {*typing.get_args(interface.Request)}
  replies = {*map(type, _REPLIES)}
  assert replies == {*typing.get_args(interface.Answer)} | {wire.Welcome}


@pytest.mark.parametrize(
  ("mine", "theirs", "message"),
  [(wire.REQUESTS, wire.REPLIES, m) for m in _REQUESTS]
  + [(wire.REPLIES, wire.REQUESTS, m) for m in _REPLIES],
  ids=lambda x: type(x).__name__,
)
def test_the_largest_requests_and_answers_fit(mine, theirs, message):
  raw = mine.encode(message)
  assert len(raw) <= transports.MAX_MESSAGE
  assert mine.decode(raw) == message
  with pytest.raises(codec.BadMessage, match="Invalid value"):
    theirs.decode(raw)
