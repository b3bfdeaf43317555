"""Tests of a store in a separate process: its start, its end, its death."""

import os
import signal
import subprocess
import sys

import left_over
import owners
import pytest
import served
import waiting

from optax_dist.coordinator.store import interface, process
from optax_dist.coordinator.transport import sockets
from tests.coordinator.transport import worlds

SECRET = b"0123456789abcdef"


def connect(address, certificates=None):
  transport = sockets.Transport(
    "client", secret=SECRET, certificates=certificates
  )
  return owners.Owner(lambda wake: served.Driven(transport, address, wake))


def test_clients_survive_a_killed_store():
  with process.start(SECRET, port=0) as store:
    one = connect(store.address)
    assert isinstance(one.ask("put", "log/0", b"x"), interface.Done)
    os.kill(store.process.pid, signal.SIGKILL)
    store.process.wait(60.0)
    answer = one.ask("put", "log/1", b"x", timeout=1.0)
    assert isinstance(answer, interface.Unknown)
    assert "put of 'log/1' at tcp://" in answer.reason
    one.store.close()


def test_a_store_that_outlives_its_owner_leaves_nothing_open():
  store = process.start(SECRET, port=0, idle=0.2)
  assert store.process.stdout.closed
  # It exits by itself, and was waited for by then.
  waiting.until(lambda: store.process.returncode is not None)
  assert store.process.returncode == 0


def test_draining_waits_for_the_last_client():
  with process.start(SECRET, port=0) as store:
    one = connect(store.address)
    assert isinstance(one.ask("put", "log/0", b"x"), interface.Done)
    assert not store.drain(0.2)
    assert isinstance(one.ask("put", "log/1", b"x"), interface.Done)
    one.store.close()
    assert store.drain(60.0)
    assert store.process.returncode == 0


def test_the_command_line_shows_the_address_and_no_secret():
  ended = subprocess.run(
    (
      *(sys.executable, "-m", "optax_dist.coordinator.store"),
      *("--port", "0", "--idle", "0.01"),
    ),
    env=os.environ | {process.SECRET_VARIABLE: SECRET.decode()},
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert ended.stdout.startswith(process.READY)
  assert ended.stderr == ""
  assert ended.returncode == 0


def test_the_end_of_the_store_is_reported():
  with process.start(SECRET, port=0) as store:
    one = connect(store.address)
    assert isinstance(one.ask("put", "log/0", b"x"), interface.Done)
    store.stop()
    found = one.wait_for(lambda events: events[1:])
    assert "the store has ended" in found[0].reason
    one.store.close()


def test_it_encrypts_where_certificates_are_given(tmp_path):
  files = worlds.certificates(tmp_path)
  with process.start(SECRET, port=0, certificates=files) as store:
    tcp = next(w for w in store.address.split(",") if not w.startswith("unix"))
    one, plain = connect(tcp, files), connect(tcp)
    assert isinstance(one.ask("put", "log/0", b"x"), interface.Done)
    answer = plain.ask("get", "log/0", timeout=1.0)
    assert isinstance(answer, interface.Unknown)
    for each in (one, plain):
      each.store.close()


def test_a_taken_port_is_named():
  with process.start(SECRET, port=0) as store:
    tcp = next(w for w in store.address.split(",") if not w.startswith("unix"))
    port = int(tcp.rpartition(":")[2])
    with pytest.raises(RuntimeError, match=f"No free port.*{port}"):
      process.start(SECRET, port=port)


def test_what_a_process_says_before_it_dies_is_the_error(tmp_path, monkeypatch):
  python = tmp_path / "python"
  python.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
  python.chmod(0o755)
  monkeypatch.setattr(sys, "executable", str(python))
  with pytest.raises(RuntimeError, match="no such module"):
    process.start(SECRET, port=0)


def test_beyond_loopback_a_secret_is_required():
  with pytest.raises(RuntimeError, match="A secret or certificates are needed"):
    process.start(b"", bind="0.0.0.0", port=0)


def test_the_process_ends_with_its_owner_and_without_clients():
  with process.start(SECRET, port=0, idle=0.5) as store:
    assert store.process.wait(60.0) == 0
  code = (
    "from optax_dist.coordinator.store import process\n"
    "import os\n"
    "made = process.start(b'0123456789abcdef', port=0)\n"
    "print(made.process.pid, flush=True)\n"
    "os._exit(1)\n"
  )
  ended = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=240
  )
  left_over.wait_for_end(int(ended.stdout))
