"""Launchers read each other's notices in the job's store."""

import time

import pytest

from optax_dist.coordinator.extras.hosts import board, notices
from optax_dist.coordinator.runtime import endpoint
from optax_dist.coordinator.store import process, urls
from optax_dist.coordinator.transport import addresses

_SECRET = b"a secret of enough bytes"


@pytest.fixture(autouse=True)
def _short_pause(monkeypatch):
  monkeypatch.setattr(board, "_PAUSE", 0.02)


def _board(address, host):
  place = urls.Tcp(address.partition(",")[0])
  return board.Board(place, _SECRET, "", host, [0, 1])


def _until(ready, *boards, seconds=90.0):
  """Polls until a host's notice is as wanted; returns all that came so far."""
  end = time.monotonic() + seconds
  found = []
  while not any(ready(*x) for x in found):
    assert time.monotonic() < end, (found[-5:], [b.trouble for b in boards])
    for one in boards:
      found += one.poll(0.01)
  return found


def test_what_one_writes_others_read_and_beats_grow():
  with process.start(_SECRET, port=0) as store:
    one, two = (_board(store.address, host) for host in (0, 1))
    found = _until(lambda host, notice: host == 1, one)
    assert (1, None) in found
    two.publish(notices.Notice("second"))
    found = _until(lambda host, n: host == 1 and n and n.beat > 3, one, two)
    beats = [n.beat for host, n in found if host == 1 and n]
    assert beats == sorted(beats)
    # What changes is written at once, and last words are as well.
    part = notices.Part(3, address="h:1", words="the end")
    two.publish(notices.Notice("second", over=True, part=part))
    two.close(60.0)
    found = _until(lambda host, n: host == 1 and n and n.over, one)
    assert any(n and n.part == part for _, n in found)
    one.close(0.0)


def test_close_writes_the_last_notice_once_more():
  with process.start(_SECRET, port=0) as store:
    one, two = (_board(store.address, host) for host in (0, 1))
    two.publish(notices.Notice("second"))
    _until(lambda host, n: host == 1 and n, two)
    found = _until(lambda host, n: host == 1 and n, one)
    first = max(n.beat for host, n in found if host == 1 and n)
    two.close(60.0)
    _until(lambda host, n: host == 1 and n and n.beat > first, one)
    one.close(0.0)


def test_a_store_that_was_started_anew_gets_the_notice_again():
  with process.start(_SECRET, port=addresses.free_ports()[0]) as store:
    address = store.address
    one = _board(address, 0)
    one.publish(notices.Notice("first"))
    _until(lambda host, notice: host == 0 and notice, one)
  _, _, port = address.partition(",")[0].rpartition(":")
  with process.start(_SECRET, port=int(port)):
    two = _board(address, 1)
    _until(lambda host, n: host == 0 and n and n.launcher == "first", two, one)
    one.close(60.0)
    two.close(0.0)


def test_poll_waits_where_the_store_has_refused_this_launcher():
  """A caller polls until its time is over, which kept a core busy."""
  with process.start(b"another secret of enough bytes", port=0) as store:
    one = _board(store.address, 0)
    end = time.monotonic() + 60.0
    while not one.trouble:
      assert time.monotonic() < end
      one.poll(0.01)
    began = time.monotonic()
    assert one.poll(0.2) == []
    assert time.monotonic() - began > 0.15
    one.close(0.0)


def test_a_loss_of_the_store_is_logged_once(caplog, monkeypatch):
  monkeypatch.setattr(board, "_AGAIN", 0.05)
  connected, open_store = [], endpoint.open_store

  def connect(*arguments):
    connected.append(arguments)
    return open_store(*arguments)

  monkeypatch.setattr(endpoint, "open_store", connect)
  with process.start(b"another secret of enough bytes", port=0) as store:
    one = _board(store.address, 0)
    end = time.monotonic() + 60.0
    while len(connected) < 4:
      assert time.monotonic() < end
      one.poll(0.01)
    one.close(0.0)
  assert caplog.text.count("has lost the store") == 1


def test_a_store_that_is_not_there_is_said_and_nothing_waits_for_it():
  began = time.monotonic()
  one = board.Board(urls.Tcp("127.0.0.1:9"), _SECRET, "", 0, [0])
  one.publish(notices.Notice("first"))
  assert one.poll() == []
  one.close(0.2)
  assert time.monotonic() - began < 30.0
