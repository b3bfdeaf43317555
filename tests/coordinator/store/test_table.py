"""A table of keys and values: what is put once, and quotas."""

from optax_dist.coordinator.store import interface, table


def put(values, client, key, value=b""):
  return values.answer(client, interface.Put(7, key, value))


def put_if_absent(values, client, key, value=b""):
  return values.answer(client, interface.PutIfAbsent(7, key, value))


def delete(values, *keys):
  return values.answer("anyone", interface.Delete(7, keys))


DONE = interface.Done(7)


def test_a_full_store_still_reads_and_deletes():
  values = table.Table(8 * table.OVERHEAD + 130)
  for client in ("a", "b"):
    for key in range(4):
      put_if_absent(values, client, f"{client}/{key}", b"x" * 10)
  refused = put_if_absent(values, "c", "c/0")
  assert isinstance(refused, interface.Unknown)
  assert "'c/0' needs 1,027 bytes" in refused.reason
  assert isinstance(put_if_absent(values, "c", "a/0", b"y"), interface.Conflict)
  assert put(values, "a", "a/0", b"y" * 20) == DONE
  assert delete(values, "a/0", "a/0", "none") == DONE
  assert put_if_absent(values, "c", "c/0") == DONE


def test_one_client_fills_half_of_it_at_most():
  values = table.Table(4 * table.OVERHEAD)
  put(values, "flood", "log/0", b"x" * 500)
  refused = put(values, "flood", "log/1")
  assert isinstance(refused, interface.Unknown)
  assert "half of it of one client" in refused.reason
  assert "1,529 of flood" in refused.reason
  assert put_if_absent(values, "leader", "log/1", b"x" * 400) == DONE
  # Removing a value makes room for the client that put it.
  delete(values, "log/0")
  assert put(values, "flood", "log/0", b"x" * 500) == DONE
  # What is put anew makes room for itself.
  assert put(values, "flood", "log/0", b"x" * 1000) == DONE


def test_a_value_that_does_not_fit_changes_nothing():
  values = table.Table(2 * table.OVERHEAD + 100)
  put(values, "a", "log/0", b"x")
  refused = put(values, "a", "log/0", b"x" * 90)
  assert isinstance(refused, interface.Unknown)
  assert values.answer("a", interface.Get(7, "log/0")) == interface.Value(
    7, b"x"
  )
