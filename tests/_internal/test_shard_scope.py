"""What a transformation inside of `sharded` is told."""

import threading

import pytest

from optax_dist._internal.shard_scope import Scope, current, inside


def _fails(scope):
  with inside(scope):
    raise KeyError(current())


def test_scopes_nest_and_end_with_an_error():
  assert current() == Scope()
  with inside(Scope(("data",))):
    with pytest.raises(KeyError, match=r"'dcn', 'ici'.*is_inspection=True"):
      _fails(Scope(("dcn", "ici"), is_inspection=True))
    assert current() == Scope(("data",))
  assert current() == Scope()


def test_scopes_are_separate_in_each_thread():
  seen = []
  with inside(Scope(("data",), is_inspection=True)):
    thread = threading.Thread(target=lambda: seen.append(current()))
    thread.start()
    thread.join()
  assert seen == [Scope()]
