"""Tests of the launcher: it names hangs and failures, and leaves no process."""

import faulthandler
import os
import pathlib
import time

import jax
import launch
import pytest


def _who(x):
  return x, jax.process_index(), jax.device_count(), _listening_addresses()


def _listening_addresses():
  """Returns the addresses that this process's sockets listen on, in hex."""
  own = set()
  for fd in os.listdir("/proc/self/fd"):
    try:
      own.add(os.readlink(f"/proc/self/fd/{fd}"))
    except FileNotFoundError:  # The folder's own descriptor.
      continue
  found = []
  for table in ("tcp", "tcp6"):
    for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]:
      fields = line.split()
      if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
        found.append(fields[1].split(":")[0])
  return found


def _one_fails():
  if jax.process_index() == 1:
    raise ValueError("the cause")
  time.sleep(200)


def _one_hangs(folder):
  pathlib.Path(folder, str(jax.process_index())).write_text(str(os.getpid()))
  if jax.process_index() == 0:
    time.sleep(200)


def _begins_late_and_hangs(seconds):
  if jax.process_index() == 0:
    # As if its imports had taken longer than those of the other process.
    time.sleep(seconds)
    faulthandler.dump_traceback_later(3, exit=True)
    time.sleep(200)


def test_every_process_answers_and_listens_on_loopback_only():
  results = launch.run(_who, "x", processes=2, devices=2)
  for i, (x, index, devices, addresses) in enumerate(results):
    assert (x, index, devices) == ("x", i, 4)
    # Gloo's, and the coordinator's in the first process.
    assert len(addresses) == (2 if i == 0 else 1)
    for address in addresses:
      # 127.0.0.1 in the byte order of the host, also as an IPv6 address.
      assert address.endswith("0100007F"), addresses


def test_the_output_of_a_process_that_fails_is_shown():
  # The other one would sleep on.
  with pytest.raises(launch.ProcessError) as info:
    launch.run(_one_fails, processes=2)
  assert "Process 1 of 2 ended with exit code 1" in str(info.value)
  assert "ValueError: the cause" in str(info.value)
  assert "Process 0 of 2 was still running and was killed" in str(info.value)


@pytest.mark.nightly
def test_a_process_that_hangs_is_named_and_ended(tmp_path):
  with pytest.raises(launch.ProcessError) as info:
    launch.run(_one_hangs, str(tmp_path), processes=2, timeout=10)
  message = str(info.value)
  assert "_one_hangs did not finish in every process (10 s)" in message
  assert "Process 0 of 2 ended with exit code 1" in message
  assert "in _one_hangs" in message.split("Process 1 of 2")[0]
  assert "Process 1 of 2 finished and waited for the others" in message
  for i in range(2):
    assert not pathlib.Path("/proc", (tmp_path / str(i)).read_text()).exists()


@pytest.mark.nightly
def test_a_process_that_hangs_and_began_late_is_named():
  with pytest.raises(launch.ProcessError) as info:
    launch.run(_begins_late_and_hangs, 2, processes=2, timeout=3)
  message = str(info.value)
  assert "Process 0 of 2 ended with exit code 1" in message
  assert "in _begins_late_and_hangs" in message.split("Process 1 of 2")[0]
  assert "Process 1 of 2 finished and waited for the others" in message
