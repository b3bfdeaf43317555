"""A table of keys and values: what is put once, and quotas."""

import pytest

from optax_dist.coordinator.store import interface, table


def put(values, client, key, value=b""):
  return values.answer(client, interface.Put(7, key, value))


def put_if_absent(values, client, key, value=b""):
  return values.answer(client, interface.PutIfAbsent(7, key, value))


def delete(values, *keys):
  return values.answer("anyone", interface.Delete(7, keys))


DONE = interface.Done(7)


def test_a_full_store_still_reads_and_deletes():
  values = table.Table(table.Quota(keys=8, nbytes=1000))
  for client in ("a", "b"):
    for key in range(4):
      put_if_absent(values, client, f"{client}/{key}", b"x" * 10)
  refused = put_if_absent(values, "c", "c/0")
  assert isinstance(refused, interface.Refused)
  assert "at most 8 keys" in refused.reason
  assert isinstance(put_if_absent(values, "c", "a/0", b"y"), interface.Conflict)
  assert put(values, "a", "a/0", b"y" * 20) == DONE
  assert delete(values, "a/0", "a/0", "none") == DONE
  assert put_if_absent(values, "c", "c/0") == DONE


def test_one_client_fills_half_of_it_at_most():
  values = table.Table(table.Quota(keys=100, nbytes=1000))
  put(values, "flood", "log/0", b"x" * 495)
  refused = put(values, "flood", "log/1")
  assert isinstance(refused, interface.Refused)
  assert "of one client (flood)" in refused.reason
  assert put_if_absent(values, "leader", "log/1", b"x" * 400) == DONE
  # Removing a value makes room for the client that put it.
  delete(values, "log/0")
  assert put(values, "flood", "log/0", b"x" * 495) == DONE
  few = table.Table(table.Quota(keys=4))
  assert [put(few, "flood", key) for key in "ab"] == [DONE] * 2
  assert "at most 2 keys" in put(few, "flood", "c").reason
  assert put(few, "flood", "b", b"again") == DONE


def test_a_value_that_does_not_fit_changes_nothing():
  values = table.Table(table.Quota(nbytes=100))
  put(values, "a", "log/0", b"x")
  refused = put(values, "a", "log/0", b"x" * 90)
  assert isinstance(refused, interface.Refused)
  assert values.answer("a", interface.Get(7, "log/0")) == interface.Value(
    7, b"x"
  )


def test_a_quota_of_zero_is_refused():
  with pytest.raises(ValueError, match=r"Quota.keys must be at least 2, got 0"):
    table.Quota(keys=0)
