"""Persistent map and queue behave as dict and deque, and old ones stay."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_dist.quorum import persistent


class _Clash:
  """Keys that all have one hash."""

  def __init__(self, name):
    self.name = name

  def __hash__(self):
    return 7

  def __eq__(self, other):
    return self.name == other.name


_keys = st.one_of(
  st.integers(-3, 300),
  st.text(max_size=2),
  st.integers().map(lambda i: i << 59),
)


@given(st.lists(st.tuples(_keys, st.one_of(st.none(), st.integers()))))
def test_a_map_is_a_dict(changes):
  new, expected, old = persistent.persistent_map(), {}, []
  for key, value in changes:
    old.append((new, dict(expected)))
    if value is None:
      new, _ = new.delete(key), expected.pop(key, None)
    else:
      new = new.set(key, value)
      expected[key] = value
    assert new.get(key, "absent") == expected.get(key, "absent")
    assert len(new) == len(expected)
    assert (key in new) == (key in expected)
  for then, snapshot in [*old, (new, expected)]:
    assert dict(then.items()) == snapshot
    assert set(then) == set(snapshot)
    assert then == persistent.persistent_map(snapshot.items())


@given(
  st.lists(
    st.dictionaries(_keys, st.integers(), max_size=80), min_size=1, max_size=3
  )
)
def test_many_pairs_at_once_are_as_one_after_the_other(changes):
  new, one_by_one = persistent.persistent_map(), persistent.persistent_map()
  for pairs in changes:
    before, snapshot = new, dict(new.items())
    new = new.update(pairs)
    for key, value in pairs.items():
      one_by_one = one_by_one.set(key, value)
    assert new == one_by_one
    assert len(new) == len(one_by_one)
    assert all(new.get(key) == value for key, value in pairs.items())
    assert dict(before.items()) == snapshot


def test_keys_of_one_hash_do_not_get_lost():
  keys = [_Clash(i) for i in range(100)]
  new = persistent.persistent_map((key, key.name) for key in keys)
  assert [new.get(key) for key in keys] == list(range(100))
  assert len(new.delete(_Clash(3))) == 99


@given(st.lists(st.one_of(st.none(), st.integers())))
def test_a_queue_is_first_in_first_out(changes):
  queue, expected = persistent.fifo(), []
  for item in changes:
    before, snapshot = queue, list(expected)
    if item is not None:
      queue = queue.push(item)
      expected.append(item)
    elif expected:
      first, queue = queue.pop()
      assert first == expected.pop(0)
    assert list(queue) == expected
    assert len(queue) == len(expected)
    assert list(before) == snapshot
    assert queue == persistent.fifo(expected)
  assert list(queue.without(0)) == [item for item in expected if item != 0]


def test_an_empty_queue_has_nothing_to_pop():
  with pytest.raises(IndexError, match="empty"):
    persistent.fifo().pop()


def test_large_ones_can_be_pickled_and_shown():
  queue = persistent.fifo(range(5000))
  many = persistent.persistent_map((i, i) for i in range(5000))
  assert pickle.loads(pickle.dumps(queue)) == queue
  assert pickle.loads(pickle.dumps(many)) == many
  assert repr(queue).startswith("fifo([0, 1,")
  assert hash(many) == hash(
    persistent.persistent_map(reversed([*many.items()]))
  )
