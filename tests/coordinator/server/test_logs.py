"""Logs that a coordinator can't use, or should not: each is named."""

import contextlib
import functools
import os
import pathlib
import subprocess
import sys

import full_disk
import jax.numpy as jnp
import optax
import pytest

from optax_dist import coordinator
from optax_dist.cli import main
from optax_dist.coordinator.server import process
from optax_dist.coordinator.transport import addresses

_SECRET = "a secret of enough bytes"


def _join(address, width=2, opt=None, **options):
  return coordinator.join(
    opt or optax.sgd(0.1),
    jnp.zeros(width),
    **{
      "coordinator_address": address,
      "secret": _SECRET,
      "total_num_replicas": 1,
      "replica": 0,
      "start_coordinator": False,
      "timeout": 60.0,
    }
    | options,
  )


def test_coordinator_at_any_free_port_continues_no_existing_log(
  tmp_path, monkeypatch
):
  """The port may be one at which a job was a moment ago."""
  monkeypatch.setenv("TMPDIR", str(tmp_path))
  (port,) = addresses.free_ports()
  log = process.default_log(port)
  log.parent.mkdir()
  log.write_text("what another program has written just now")
  code = f"""
from optax_dist.coordinator.transport import addresses
addresses.free_ports = lambda *some: [{port}]
from optax_dist.coordinator.server import __main__, process
__main__.run(process.Settings(port=0, idle=0.01), b"", None)
"""
  ended = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert ended.stdout.startswith(f"{process.READY}127.0.0.1:{port}"), ended
  assert ended.stderr == ""


def test_a_folder_for_temporary_files_that_can_not_be_written_is_named(
  tmp_path, monkeypatch, capsys
):
  gone = tmp_path / "file"
  gone.touch()
  monkeypatch.setenv("TMPDIR", str(gone))
  assert main.main(["launch", "--replicas", "1", "--", "true"]) == 1
  said = capsys.readouterr().err
  assert "optax-dist: launch: The log /" in said
  assert str(gone) in said
  odd = tmp_path / os.fsdecode(b"caf\xe9")
  monkeypatch.setenv("TMPDIR", str(odd))
  assert main.main(["launch", "--replicas", "1", "--", "true"]) == 1
  assert "can't be written: Its name is not in UTF-8" in capsys.readouterr().err
  monkeypatch.setenv("TMPDIR", str(gone))
  # A coordinator with an explicit log does not need the folder.
  log = tmp_path / "log"
  with process.start(_SECRET.encode(), port=0, log=log) as place:
    assert place.address


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a file away")
def test_a_folder_for_temporary_files_that_others_own_is_named(
  tmp_path, monkeypatch
):
  """Another user could replace the log, or put a link to a file of this user there."""
  monkeypatch.setenv("TMPDIR", str(tmp_path))
  (port,) = addresses.free_ports()
  log, mine = process.default_log(port), tmp_path / "mine"
  mine.write_text("of this user")
  log.parent.mkdir()
  log.touch()
  pathlib.Path(f"{log}.lock").symlink_to(mine)
  os.chown(log.parent, 12345, 12345)
  with pytest.raises(RuntimeError, match="belongs to another user"):
    process.start(_SECRET.encode(), port=port)
  # A coordinator with an explicit log looks for an old one.
  with process.start(_SECRET.encode(), port=port, log=tmp_path / "log"):
    pass
  job = ("--node-rank", "0", "--address", f"127.0.0.1:{port}", "--", "true")
  assert main.main(["launch", "--nodes", "1", *job]) == 1
  assert mine.read_text() == "of this user"


def test_finished_run_leaves_no_log(tmp_path, monkeypatch):
  """The next one at this port, of the same name, begins anew."""
  monkeypatch.setenv("TMPDIR", str(tmp_path))
  (port,) = addresses.free_ports()
  log = process.default_log(port)
  for name in ({}, {"run": "mine"}):
    place = process.start(_SECRET.encode(), port=port, idle=60.0)
    with _join(place.address, **name) as replica:
      assert replica.step(jnp.ones(2)).global_step == 1
      replica.finish()
    assert [path.suffix for path in log.parent.iterdir()]
    assert place.process.wait(60.0) == 0
    assert not [*log.parent.iterdir()]


@pytest.mark.parametrize("killed", [False, True])
def test_log_of_another_job_without_replicas_is_named(tmp_path, killed):
  """Also while the next coordinator still waits for the replicas of its log."""
  start = functools.partial(
    process.start, _SECRET.encode(), port=0, log=tmp_path / "log"
  )
  with contextlib.ExitStack() as started:
    place = started.enter_context(start())
    code = f"""
import os, jax.numpy as jnp, optax
from optax_dist import coordinator
replica = coordinator.join(
  optax.sgd(0.1), jnp.zeros(2), coordinator_address={place.address!r},
  secret={_SECRET!r}, total_num_replicas=1, replica=0, start_coordinator=False)
while replica.global_step < 3:
  replica.step(jnp.ones(2))
if {killed}:
  os.kill({place.process.pid}, 9)
os._exit(0)
"""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    if killed:
      place.process.wait()
      place = started.enter_context(start())
    with pytest.raises(coordinator.JoinRefused) as caught:
      _join(place.address, 3)
  said = str(caught.value)
  assert "it differs in its parameters" in said
  assert "That job is in the coordinator's log, with 3 steps" in said


def test_a_run_goes_on_while_its_log_can_not_be_written(tmp_path, caplog):
  with full_disk.files_end_at(5000):
    place = process.start(_SECRET.encode(), port=0, log=tmp_path / "log")
  with place, _join(place.address) as replica:
    while replica.global_step < 60:
      assert replica.step(jnp.ones(2)).accepted
  assert (tmp_path / "log").stat().st_size <= 5000
  said = f"The coordinator's log can't be written: {tmp_path / 'log'}: No space"
  assert said in caplog.text
  assert "The run goes on; " in caplog.text


def test_coordinator_restarts_while_the_disk_is_full(tmp_path, caplog):
  log = tmp_path / "log"
  (port,) = addresses.free_ports()
  with contextlib.ExitStack() as started:
    begin = lambda: started.enter_context(
      process.start(_SECRET.encode(), port=port, log=log)
    )
    first = begin()
    with _join(first.address) as replica:
      assert replica.step(jnp.ones(2)).accepted
      first.kill()
      with full_disk.files_end_at(0):
        begin()
      assert replica.step(jnp.ones(2)).global_step == 2
  assert "The coordinator's log can't be written" in caplog.text


@pytest.mark.parametrize(
  ("found", "words"),
  [
    (b"\x7fELF and more", "is no log of this version"),
    (None, "coordinator.log can't be written"),
  ],
  ids=["foreign", "folder"],
)
def test_launcher_names_why_it_cannot_continue_a_log(
  tmp_path, capsys, monkeypatch, found, words
):
  monkeypatch.setenv("OPTAX_DIST_SECRET", _SECRET)
  path = pathlib.Path(tmp_path, "coordinator.log")
  if found is None:
    path.mkdir()
  else:
    path.write_bytes(found)
  (port,) = addresses.free_ports()
  flags = ("--nodes", "2", "--node-rank", "0", "--address", f"127.0.0.1:{port}")
  output = ("--output", str(tmp_path), "--resume")
  assert main.main(["launch", *flags, *output, "--", "true"]) == 1
  said = capsys.readouterr().err
  assert words in said
  assert str(path) in said
  if found is not None:
    assert path.read_bytes() == found  # Nobody has touched it.
