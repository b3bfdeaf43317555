"""Tests of a coordinator in a separate process: its start and its end."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import jax.numpy as jnp
import left_over
import optax
import pytest
import waiting

from optax_dist import coordinator
from optax_dist.coordinator.server import process

SECRET = b"0123456789abcdef"


def join(place, **options):
  return coordinator.join(
    optax.sgd(0.1),
    jnp.zeros(2),
    **{
      "coordinator_address": place.address,
      "secret": SECRET,
      "total_num_replicas": 1,
      "replica": 0,
      "start_coordinator": False,
      "timeout": 60.0,
    }
    | options,
  )


def test_coordinator_without_members_exits(tmp_path):
  place = process.start(SECRET, port=0, idle=0.2, log=tmp_path / "log")
  # Waited for, so that it leaves no zombie.
  waiting.until(lambda: place.process.returncode is not None)
  assert place.process.returncode == 0


def test_draining_waits_for_the_last_member(tmp_path):
  with process.start(SECRET, port=0, log=tmp_path / "log") as place:
    with join(place) as replica:
      assert replica.step(jnp.ones(2)).accepted
      place.process.send_signal(signal.SIGUSR1)
      assert replica.step(jnp.ones(2)).accepted
      assert place.process.poll() is None
    assert place.process.wait(60.0) == 0


def test_coordinator_hosts_several_runs_in_succession(tmp_path):
  """It closes the files of a run without members."""
  with process.start(SECRET, port=0, log=tmp_path / "log") as place:
    files = lambda: len(os.listdir(f"/proc/{place.process.pid}/fd"))
    before = files()
    for name in ("one", "two", "one"):
      journal = tmp_path / f"{name}.jsonl"
      with join(place, run=name, journal=str(journal)) as replica:
        assert replica.step(jnp.ones(2)).global_step == 1
        assert files() > before
        replica.finish()
      waiting.until(lambda: files() == before)
      assert "finish" in journal.read_text()
    # An unfinished run is kept, though it has no members.
    with contextlib.suppress(ZeroDivisionError), join(place, run="not over"):
      raise ZeroDivisionError
    assert files() > before


def test_coordinator_may_open_as_many_files_as_its_host_allows(tmp_path):
  """With the usual 1,024 it ended once more than a thousand replicas had joined."""
  settings = process.Settings(port=0, log=str(tmp_path / "log"))
  with process.start(SECRET, port=0, log=settings.log) as place:
    idle = len(os.listdir(f"/proc/{place.process.pid}/fd"))
  limited = subprocess.Popen(
    (
      *("sh", "-c", 'ulimit -Sn $0; exec "$@"', str(idle + 1)),
      *process.command(settings),
    ),
    env=os.environ | process.variables(SECRET, None),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
  )
  with process.CoordinatorProcess(limited) as place, join(place) as replica:
    assert replica.step(jnp.ones(2)).accepted
    assert place.process.poll() is None


def test_the_command_line_shows_the_address_and_no_secret(tmp_path):
  ended = subprocess.run(
    (
      *(sys.executable, "-m", "optax_dist.coordinator.server"),
      json.dumps({"port": 0, "idle": 0.01, "log": str(tmp_path / "log")}),
    ),
    env=os.environ | {process.SECRET_VARIABLE: SECRET.hex()},
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert ended.stdout.startswith(process.READY)
  assert SECRET.decode() not in ended.stdout
  assert ended.stderr == ""
  assert ended.returncode == 0


def test_a_taken_port_is_named(tmp_path):
  with process.start(SECRET, port=0, log=tmp_path / "log") as place:
    port = int(place.address.rpartition(":")[2])
    with pytest.raises(process.PortTaken, match=f"Another program .*:{port}"):
      process.start(SECRET, port=port, log=tmp_path / "other")


def test_error_quotes_what_a_process_printed_before_it_died(
  tmp_path, monkeypatch
):
  python = tmp_path / "python"
  python.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
  python.chmod(0o755)
  monkeypatch.setattr(sys, "executable", str(python))
  with pytest.raises(RuntimeError, match="no such module"):
    process.start(SECRET, port=0)


def test_beyond_loopback_a_secret_is_required():
  with pytest.raises(RuntimeError, match="A secret or certificates are needed"):
    process.start(b"", bind="0.0.0.0", port=0)


def test_coordinator_prints_each_reason_to_wait_once():
  """Several servers of etcd may give different reasons in turn."""
  code = """
from optax_dist.coordinator.extras.etcd import lease
from optax_dist.coordinator.server import __main__, log, process
__main__._POLL_SECONDS = 0.0
troubles = iter(["a", "b", "a", "b", "", "a"])
def acquire(self):
  self.trouble = next(troubles, None)
  if self.trouble is None:
    raise log.LogError("over")
  return False
lease.Lease.acquire = acquire
__main__.run(process.Settings(), b"", "etcd://127.0.0.1")
"""
  ended = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=200
  )
  waits = "It waits for etcd: "
  assert ended.stderr.splitlines() == [
    *(f"{waits}a", f"{waits}b", f"{waits}a"),
    "The coordinator ends: over",
  ]


def test_coordinator_ends_with_its_owner(tmp_path):
  code = (
    "from optax_dist.coordinator.server import process\n"
    "import os, sys\n"
    "made = process.start(b'0123456789abcdef', port=0, log=sys.argv[1])\n"
    "print(made.process.pid, flush=True)\n"
    "os._exit(1)\n"
  )
  ended = subprocess.run(
    [sys.executable, "-c", code, str(tmp_path / "log")],
    capture_output=True,
    text=True,
    timeout=240,
  )
  left_over.wait_for_end(int(ended.stdout))


def test_coordinator_does_not_import_slow_packages():
  """Members wait for it when it starts again."""
  script = (
    "import sys; import optax_dist.coordinator.server.__main__;"
    "sys.exit(str({'jax', 'numpy', 'optax'} & {*sys.modules}))"
  )
  done = subprocess.run(
    [sys.executable, "-c", script],
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert done.stderr.strip() == "set()"
