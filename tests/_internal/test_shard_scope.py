"""What a transformation inside of `sharded` is told."""

import threading

import pytest

from optax_dist._internal import shard_scope


def _fails(scope, look):
  with scope:
    seen = look()
    raise KeyError(seen)


def test_scopes_nest_and_end_with_an_error():
  assert shard_scope.names() == ()
  with shard_scope.over(("data",)):
    inner = shard_scope.over(("dcn", "ici"))
    with pytest.raises(KeyError, match=r"\('dcn', 'ici'\)"):
      _fails(inner, shard_scope.names)
    assert shard_scope.names() == ("data",)
  assert shard_scope.names() == ()


def test_an_inspection_ends_with_an_error():
  with pytest.raises(KeyError, match="True"):
    _fails(shard_scope.dry_run(), shard_scope.is_dry_run)
  assert not shard_scope.is_dry_run()


def test_scopes_are_separate_in_each_thread():
  seen = []
  with shard_scope.over(("data",)), shard_scope.dry_run():
    thread = threading.Thread(
      target=lambda: seen.append(
        (shard_scope.names(), shard_scope.is_dry_run())
      )
    )
    thread.start()
    thread.join()
  assert seen == [((), False)]
