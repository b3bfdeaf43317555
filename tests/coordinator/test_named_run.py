"""Runs of several names on one board: none reads, writes or ends another's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_dist.coordinator import (
  embedded,
  engine,
  messages,
  named_run,
  options,
)


def _two_boards(one="one", two="two"):
  board = embedded.World().connect("engine").board
  return named_run.NamedBoard(board, one), named_run.NamedBoard(board, two)


@given(st.text(max_size=8), st.text(max_size=8), st.sampled_from("ab"))
def test_runs_of_different_names_do_not_meet(first, second, key):
  one, two = _two_boards(first, second)
  assert one.put(f"log/{key}", b"1")
  if first == second:
    assert two.get(f"log/{key}", 0.0) == b"1"
    assert not two.put(f"log/{key}", b"2")
    return
  assert two.try_get(f"log/{key}") is None
  assert two.items("log") == {}
  assert two.put(f"log/{key}", b"2")
  two.delete("log")
  assert one.items("log") == {f"log/{key}": b"1"}


def test_keys_are_told_without_the_name():
  one, _ = _two_boards("a name / of any kind")
  one.put("in/0/4/1", b"1")
  one.put("in/0/4/2", b"2")
  one.put("index", b"not under in/")
  assert one.items("in/0") == {"in/0/4/1": b"1", "in/0/4/2": b"2"}
  assert one.items("in") == one.items("in/0")
  one.delete("in/0/4")
  assert one.items("in") == {}
  assert one.try_get("index") == b"not under in/"


def test_a_name_does_not_stand_above_a_longer_one():
  board = embedded.World().connect("engine").board
  above = named_run.NamedBoard(board, "a")
  below = named_run.NamedBoard(board, "a/b")
  below.put("c", b"1")
  assert above.items("b") == {}
  above.delete("b")
  assert below.try_get("c") == b"1"


def test_writing_over_is_as_on_any_board():
  one, _ = _two_boards()
  assert one.put("a", b"1")
  assert not one.put("a", b"2")
  assert one.put("a", b"3", overwrite=True)
  assert one.try_get("a") == b"3"


def test_deadlines_and_the_end_are_those_of_the_board():
  one, two = _two_boards()
  with pytest.raises(engine.EngineTimeout):
    one.get("a", 0.01)
  one.close()
  with pytest.raises(engine.BoardLost):
    two.get("a", 1.0)


def test_a_run_without_a_name_has_the_board_as_it_is():
  whole, told = embedded.World().connect("one"), options.Options(secret=b"s")
  assert named_run.named(whole, told) == (whole, told)


@pytest.mark.parametrize("secret", [b"", b"of the job"])
def test_each_run_has_a_secret_of_its_own(secret):
  whole = embedded.World().connect("one")

  def secret_of(run, secret=secret):
    told = options.Options(secret=secret, run=run, timeout=70.0)
    made, changed = named_run.named(whole, told)
    assert made.exchange is whole.exchange
    assert changed.timeout == 70.0
    return changed.secret

  assert secret_of("one") == secret_of("one")
  assert len({secret_of("one"), secret_of("two"), secret}) == 3
  assert secret_of("one", b"another job's") != secret_of("one")
  # So no message of one run can be passed off as another's.
  entry = {"kind": "tick", "ack": True}
  blob = messages.pack(secret_of("one"), "log/0", entry)
  assert messages.unpack(secret_of("one"), "log/0", blob)[0] == entry
  with pytest.raises(messages.BadMessage):
    messages.unpack(secret_of("two"), "log/0", blob)
