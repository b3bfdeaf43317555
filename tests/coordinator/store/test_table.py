"""A table of keys and values: quotas, and what came since when."""

import pytest

from optax_dist.coordinator.store import table


def test_what_came_since_when():
  values = table.Table()
  for key in ("log/1", "log/0", "hello/0", "log/2"):
    values.put_if_absent("a", key, b"x")
  assert [key for key, _ in values.since("log", 0)] == [
    "log/1",
    "log/0",
    "log/2",
  ]
  assert [key for key, _ in values.since("log", 2)] == ["log/2"]
  assert values.since("log", values.revision) == []
  values.put("a", "log/1", b"y")
  assert [key for key, _ in values.since("log", 3)] == ["log/2", "log/1"]
  assert values.since("lo", 0) == []


def test_a_full_store_takes_no_more_but_gives_and_removes():
  values = table.Table(table.Quota(keys=8, nbytes=1000))
  for client in ("a", "b"):
    for key in range(4):
      values.put_if_absent(client, f"{client}/{key}", b"x" * 10)
  with pytest.raises(table.QuotaExceeded, match=r"at most 8 keys"):
    values.put_if_absent("c", "c/0", b"")
  assert values.put_if_absent("c", "a/0", b"y") == b"x" * 10
  values.put("a", "a/0", b"y" * 20)
  values.delete(["a/0", "a/0", "none"])
  assert values.put_if_absent("c", "c/0", b"") is None
  assert values.get("c/0") == b""


def test_one_client_fills_half_of_it_at_most():
  values = table.Table(table.Quota(keys=100, nbytes=1000))
  values.put("flood", "log/0", b"x" * 495)
  with pytest.raises(table.QuotaExceeded, match=r"of one client \(flood\)"):
    values.put("flood", "log/1", b"")
  assert values.put_if_absent("leader", "log/1", b"x" * 400) is None
  # What it removes is its own again, whoever removes it.
  values.delete(["log/0"])
  values.put("flood", "log/0", b"x" * 495)
  keys = table.Table(table.Quota(keys=4))
  keys.put("flood", "a", b"")
  keys.put("flood", "b", b"")
  with pytest.raises(table.QuotaExceeded, match="at most 2 keys"):
    keys.put("flood", "c", b"")
  keys.put("flood", "b", b"again")


def test_what_does_not_fit_changes_nothing():
  values = table.Table(table.Quota(nbytes=100))
  values.put("a", "log/0", b"x")
  with pytest.raises(table.QuotaExceeded):
    values.put("a", "log/0", b"x" * 90)
  assert values.since("log", 0) == [("log/0", table.Entry(1, b"x", "a"))]
  assert values.revision == 1


def test_a_quota_of_nothing_is_refused():
  with pytest.raises(ValueError, match=r"Quota.keys must be at least 2, got 0"):
    table.Quota(keys=0)
