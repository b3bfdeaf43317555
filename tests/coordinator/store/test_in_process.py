"""The store of threads; the rest is in test_interface."""

import pytest

from optax_dist.coordinator.store import in_process, interface, table


def test_the_owner_polls_at_once_when_there_is_an_answer():
  """No thread and no connection would wake it."""
  one = in_process.InProcessStore().connect("one")
  assert one.deadline() is None
  one.ask(interface.Get(7, "log/0"), timeout=5.0)
  assert one.deadline() == 0.0
  assert one.poll() == [interface.Value(7, None)]
  assert (one.poll(), one.deadline()) == ([], None)


def test_a_put_value_is_a_copy():
  """A buffer that is written to again changes no value of the store."""
  store = in_process.InProcessStore()
  one = store.connect("one")
  buffer = bytearray(b"mine")
  one.ask(interface.PutIfAbsent(0, "log/0", buffer), timeout=5.0)
  buffer[:] = b"late"
  one.ask(interface.Get(1, "log/0"), timeout=5.0)
  assert one.poll()[1] == interface.Value(1, b"mine")


def test_only_the_client_that_floods_the_store_is_refused():
  store = in_process.InProcessStore()
  store.table = table.Table(4 * table.OVERHEAD + 100)
  flood, other = store.connect("flood"), store.connect("other")
  for number in range(3):
    flood.ask(interface.Put(number, f"log/{number}", b"x"), timeout=5.0)
  assert [type(e).__name__ for e in flood.poll()] == ["Done", "Done", "Unknown"]
  other.ask(interface.Put(0, "beat", b"x"), timeout=5.0)
  assert other.poll() == [interface.Done(0)]


def test_an_invalid_request_leaves_no_answer():
  one = in_process.InProcessStore().connect("one")
  with pytest.raises(ValueError, match="'log//0'"):
    one.ask(interface.Get(0, "log//0"), timeout=5.0)
  assert one.poll() == []
