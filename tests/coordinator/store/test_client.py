"""A client whose connection is cut, slow, silent or to another process."""

import contextlib
import pathlib
import re
import threading
import time

import proxies
import pytest
import served
import waiting

from optax_dist.coordinator.store import client, interface, wire
from optax_dist.coordinator.transport import addresses, sockets
from optax_dist.coordinator.transport import interface as transports


@pytest.fixture
def store():
  made = served.Served()
  yield made
  made.close()


@pytest.fixture
def quick():
  """A store that leaves those that are silent."""
  made = served.Served(limits=served.QUICK)
  yield made
  made.close()


@pytest.fixture
def way(store):
  with proxies.threaded(store.address) as made:
    yield made


def test_a_cut_connection_is_reopened_and_nothing_is_lost(store, way):
  one, two = store.owner(way.address), store.owner()
  numbers = []
  for key in range(60):
    numbers.append(one.begin("put_if_absent", f"log/{key}", b"%d" % key))
    if key % 20 == 10:
      way.cut()
      time.sleep(0.2)
    if key % 20 == 15:
      way.mend()
      one.answer(numbers[-1])
  for number in numbers:
    assert one.answer(number) == interface.Done(number)
  assert [e.request for e in one.events] == numbers
  for key in range(60):
    assert two.get(f"log/{key}") == b"%d" % key
  assert way.made >= 3


def test_a_lost_answer_is_read_back(store, way):
  one, two = store.owner(way.address), store.owner()
  assert one.get("log/0") is None
  way.back.swallows = True
  number = one.begin("put_if_absent", "log/0", b"mine")
  two.wait_for_value("log/0", b"mine")
  way.cut()
  way.back.swallows = False
  way.mend()
  assert one.answer(number) == interface.Done(number)
  number = one.begin("put_if_absent", "log/0", b"another")
  assert one.answer(number) == interface.Conflict(number, b"mine")
  assert two.get("log/0") == b"mine"


def test_the_first_put_during_a_cut_wins(store, way):
  one, two = store.owner(way.address), store.owner()
  assert one.get("log/0") is None
  way.cut()
  number = one.begin("put_if_absent", "log/0", b"mine")
  two.ask("put_if_absent", "log/0", b"yours")
  way.mend()
  assert one.answer(number) == interface.Conflict(number, b"yours")


def test_after_its_deadline_the_fate_of_a_put_is_unknown(store, way):
  one = store.owner(way.address)
  assert one.get("log/0") is None
  way.cut()
  began = time.monotonic()
  asked = {
    one.begin("put_if_absent", "log/7", b"x", timeout=0.5): "put of 'log/7'",
    one.begin("get", "log/8", timeout=0.4): "get of 'log/8'",
    one.begin("delete", ["a", "b"], timeout=0.3): "delete of 'a', 'b'",
  }
  for number, what in asked.items():
    answer = one.answer(number)
    assert isinstance(answer, interface.Unknown)
    assert what in answer.reason
    assert f"tcp://{way.address}" in answer.reason
    assert re.search(r"no answer in \d+\.\d+ s", answer.reason)
    assert "not connected" in answer.reason
  assert time.monotonic() - began > 0.45


def test_a_silent_connection_is_left_for_another(quick):
  with proxies.threaded(quick.address) as way:
    one = quick.owner(way.address)
    assert one.get("log/0") is None
    made = way.made
    way.back.swallows = True
    number = one.begin("put_if_absent", "log/0", b"x")
    waiting.until(lambda: way.made > made)
    way.back.swallows = False
    assert one.answer(number) == interface.Done(number)


def test_requests_to_a_slow_store_are_pipelined(store, way):
  one, two = store.owner(way.address), store.owner()
  assert one.get("log/0") is None
  way.back.held = True
  before = len(one.events)
  numbers = [one.begin("put_if_absent", f"log/{k}", b"x") for k in range(150)]
  # The last one has come before any is answered.
  two.wait_for_value("log/149", b"x", 60.0)
  assert one.wait_long(0.05) == one.events[before:] == []
  way.back.held = False
  for number in numbers:
    assert one.answer(number) == interface.Done(number)


def test_a_restarted_store_is_lost():
  store = served.Served(port=addresses.free_ports()[0])
  one = store.owner()
  assert isinstance(one.ask("put", "log/0", b"x"), interface.Done)
  number = one.begin("get", "log/1")
  one.answer(number)
  port = store.stop(rudely=True)
  one.begin("put_if_absent", "log/1", b"x")
  time.sleep(0.2)
  again = served.Served(port=port)
  assert "it was restarted" in one.lost()
  # Nothing of the old run has come into the new store.
  assert again.owner().get("log/1") is None
  one.begin("get", "log/0")
  assert one.wait_long(0.3) == []
  again.close()
  store.close()


def test_a_store_that_ends_says_so(store):
  one = store.owner()
  assert isinstance(one.ask("put", "log/0", b"x"), interface.Done)
  store.stop()
  assert "the store has ended" in one.lost()


def test_a_store_of_another_version_is_lost():
  transport = sockets.Transport("one", secret=served.SECRET)
  with contextlib.closing(transport):
    one = client.StoreClient(transport, "127.0.0.1:9")
    one.ask(interface.Get(1, "log/0"), 200.0)
    assert one.handle(transports.Message(wire.STORE, b"another version"))
    [lost] = one.poll()
  assert isinstance(lost, interface.StoreLost)
  assert "tcp://127.0.0.1:9: it sent what this version can't" in lost.reason


def test_a_client_waits_for_a_store_that_starts_later():
  limits = served.QUICK
  first = served.Served(port=addresses.free_ports()[0], limits=limits)
  port = first.stop()
  one = first.owner(f"127.0.0.1:{port}")
  number = one.begin("put", "log/0", b"x")
  time.sleep(1.2)
  again = served.Served(port=port, limits=limits)
  assert one.answer(number) == interface.Done(number)
  first.close()
  again.close()


def test_many_cuts_leave_nothing_behind(store, way):
  one = store.owner(way.address)

  def count():
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))

  assert one.get("log/0") is None
  fds, threads = count(), threading.active_count()
  for key in range(25):
    way.cut()
    way.mend()
    answer = one.ask("put", f"log/{key}", b"x")
    assert isinstance(answer, interface.Done)
  waiting.until(
    lambda: (
      count() <= fds
      and threading.active_count() <= threads
      and store.server.clients == 1
    ),
    lambda: (count(), fds, threading.enumerate(), store.server.clients),
  )
