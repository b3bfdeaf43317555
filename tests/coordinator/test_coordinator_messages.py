"""Messages of strangers: garbage, cut, repeated, too large, too deep."""

import json
import struct

import embedded_runs as runs
import hypothesis
import hypothesis.strategies as st
import pytest

from optax_dist.coordinator import board_log, embedded, messages

SECRET = b"of this job"
GOOD = {"kind": "ack", "applied": 3}
blobs = st.binary(max_size=300)
json_values = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-(2**70), 2**70)
  | st.floats(allow_nan=False, allow_infinity=False)
  | st.text(max_size=5),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3)
  ),
  max_leaves=8,
)


def signed(key, text, payload=b"", length=None):
  """What somebody who knows the secret could send."""
  size = len(text) if length is None else length
  body = struct.pack("<I", size) + text + payload
  return b"ODC1" + messages._tag(SECRET, key, body) + body


@hypothesis.given(
  st.sampled_from(sorted(messages.KINDS)), st.data(), st.binary(max_size=99)
)
def test_good_messages_arrive_as_they_were_sent(kind, data, payload):
  of = {int: 7, str: "x", list: [1], bool: True, dict: {"a": None}, float: 0.5}
  header = {"kind": kind}
  for name, types in messages.KINDS[kind].items():
    types = types if isinstance(types, tuple) else (types,)
    choices = [None if t is type(None) else of[t] for t in types]
    header[name] = data.draw(st.sampled_from(choices))
  blob = messages.pack(SECRET, "a/b", header, payload)
  assert messages.unpack(SECRET, "a/b", blob) == (header, payload)


@hypothesis.given(blobs)
def test_garbage_is_refused(blob):
  for start in (b"", b"ODC1", b"ODC1" + bytes(16)):
    with pytest.raises(messages.BadMessage):
      messages.unpack(SECRET, "k", start + blob)


@hypothesis.given(st.data())
def test_a_changed_or_cut_message_is_refused(data):
  blob = messages.pack(SECRET, "k", GOOD, b"payload")
  cut = data.draw(st.integers(0, len(blob) - 1))
  bit = data.draw(st.integers(0, 8 * len(blob) - 1))
  changed = bytearray(blob)
  changed[bit // 8] ^= 1 << bit % 8
  for bad in (blob[:cut], blob + b"\0", bytes(changed)):
    with pytest.raises(messages.BadMessage):
      messages.unpack(SECRET, "k", bad)


def test_a_message_is_good_under_its_key_and_secret_alone():
  blob = messages.pack(SECRET, "in/0/1/0/0", GOOD)
  with pytest.raises(messages.BadMessage, match="another key"):
    messages.unpack(SECRET, "in/0/1/0/1", blob)
  with pytest.raises(messages.BadMessage, match="secret"):
    messages.unpack(b"of another job", "in/0/1/0/0", blob)


@hypothesis.given(json_values)
def test_a_header_that_is_signed_is_checked_nonetheless(value):
  blob = signed("k", json.dumps(value).encode())
  with pytest.raises(messages.BadMessage):
    messages.unpack(SECRET, "k", blob)


@hypothesis.given(st.sampled_from(sorted(messages.KINDS)), st.data())
def test_a_field_of_another_type_is_refused(kind, data):
  fields = messages.KINDS[kind]
  name = data.draw(st.sampled_from(sorted(fields)))
  header = {"kind": kind}
  of = {int: 7, str: "x", list: [1], bool: True, dict: {}}
  for field, types in fields.items():
    first = types[0] if isinstance(types, tuple) else types
    header[field] = of[first]
  messages.check(header)
  wrong = {k: v for k, v in header.items() if k != name}
  with pytest.raises(messages.BadMessage, match=name):
    messages.check(wrong)
  odd = {"nothing": 1} if fields[name] is not dict else [1]
  with pytest.raises(messages.BadMessage, match=name):
    messages.check(wrong | {name: odd})
  if fields[name] is int:
    with pytest.raises(messages.BadMessage, match=name):
      messages.check(wrong | {name: True})


def test_sizes_are_bounded():
  with pytest.raises(ValueError, match="at most 4,194,304"):
    messages.pack(SECRET, "k", GOOD, bytes(messages.MAX_BYTES))
  with pytest.raises(messages.BadMessage, match="at most"):
    messages.unpack(SECRET, "k", bytes(messages.MAX_BYTES + 1))
  deep = b"[" * 200_000 + b"]" * 200_000
  with pytest.raises(messages.BadMessage):
    messages.unpack(SECRET, "k", signed("k", deep))
  with pytest.raises(messages.BadMessage, match="cut short"):
    messages.unpack(SECRET, "k", signed("k", b"{}", length=2**32 - 1))


def test_tickets_depend_on_the_secret_and_every_part():
  seen = {messages.ticket(SECRET, *parts) for parts in ((1, 2), (12,), ("1",))}
  seen.add(messages.ticket(b"other", 1, 2))
  assert len(seen) == 4
  assert all(0 < ticket < 2**62 for ticket in seen)


def strangers(board):
  """Occupies keys that the job is about to use, with what it can't read."""
  junk = [b"", b"junk", bytes(100), messages.pack(b"other", "k", GOOD)]
  for i, blob in enumerate(junk):
    board.put(f"hello/{i}", blob)
    for folder in ("log/0", "in/0/4/0", "in/0/5/0"):
      board.put(f"{folder}/{2 * i}", blob)
  board.put("snapshot/9/5", b"junk")


def test_strangers_do_no_harm(tmp_path):
  world = embedded.World()
  stranger = world.connect("stranger")
  strangers(stranger.board)
  results = runs.run(
    runs.to_step(5), 2, world=world, secret=SECRET, journal=tmp_path / "j"
  )
  assert [r.error for r in results] == [None, None]
  assert all(r.counts["applied"] == 5 for r in results)


def test_a_chair_that_strangers_have_taken_is_passed_by():
  world = embedded.World()
  for term in range(2):
    world.connect("stranger").board.put(f"chief/{term}", b"junk")
  results = runs.run(runs.to_step(3), 2, world=world)
  assert [r.error for r in results] == [None, None]


def test_a_repeated_message_counts_once():
  world = embedded.World()
  listening = world.connect("listening").board
  with runs.Faults({}):
    one = runs.make(world, 0, k=1, n=1).start()
  inbox = f"in/0/{one._follower.incarnation}/0"
  for blob in listening.items(inbox).values():
    for later in range(20, 24):
      listening.put(f"{inbox}/{later}", blob)
  assert one.step(runs.compute(one, 0)[0]).global_step == 1
  assert one.step(runs.compute(one, 1)[0]).global_step == 2
  one.close()


def test_a_log_reads_over_what_is_not_of_this_job():
  board = embedded.World().connect("one").board
  log = board_log.BoardLog(board, SECRET)
  board.put("log/0/0", b"junk")
  assert not log.append(0, GOOD)
  assert log.append(1, GOOD)
  with pytest.raises(messages.BadMessage):
    log.read(0, 1.0)
  assert log.read(1, 1.0)[0] == GOOD
