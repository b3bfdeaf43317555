"""Launchers that share replicas, on loopback, with processes of bare Python."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from left_over import is_running, wait_for_end
from waiting import until

from optax_dist.coordinator.transport import addresses

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_PROGRAM = """
import os, signal, time
told = {k.removeprefix("OPTAX_DIST_"): v for k, v in os.environ.items()}
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
print("start", told["RESTARTS"], "at", told["GROUP_ADDRESS"], os.getpid())
time.sleep(600)
"""
_START = r"\[replica (\d)\.(\d)\] start (\d+) at (\S+) (\d+)"


class _Job:
  """The launchers of a job, each as if on its own host."""

  def __init__(self, folder, nodes):
    self._folder, self._nodes = folder, nodes
    self._address = f"127.0.0.1:{addresses.free_ports()[0]}"
    self.launchers, self._logs = {}, {}
    for rank in range(nodes):
      self.launch(rank)

  def launch(self, rank):
    log = self._folder / f"{rank}-{len(self._logs)}.log"
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "OPTAX_DIST_SECRET": "a secret of enough bytes",
      "PYTHONPATH": str(_ROOT),
    }
    with log.open("wb") as out:
      self.launchers[rank] = subprocess.Popen(
        [
          *(sys.executable, "-m", "optax_dist", "launch"),
          *("--nodes", str(self._nodes), "--node-rank", str(rank)),
          *("--address", self._address, "--replicas", "2"),
          # Loopback has many addresses: one for each host.
          *("--local-addr", f"127.0.0.{rank + 2}"),
          *("--processes-per-replica", "2", "--min-replicas", "1"),
          *("--host-timeout", "120", "--", sys.executable, "-c", _PROGRAM),
        ],
        stdout=out,
        stderr=subprocess.STDOUT,
        env=environment,
      )
    self._logs[rank] = log

  def text(self, rank):
    return self._logs[rank].read_text()

  def starts(self, rank, count):
    """The last of so many starts on a host: number, address and process id."""
    found = []

    def are_there():
      found[:] = re.findall(_START, self.text(rank))
      return len(found) >= count

    until(are_there, lambda: [self.text(r) for r in self._logs], 180.0)
    assert len(found) == count
    _, _, number, address, pid = found[-1]
    return int(number), address, int(pid)

  def close(self):
    for one in self.launchers.values():
      one.kill()
      one.wait()


@pytest.fixture
def job(tmp_path):
  made = _Job(tmp_path, 4)
  yield made
  made.close()


def test_a_replica_starts_again_on_all_of_its_hosts(job):
  first = [job.starts(rank, 1) for rank in range(4)]
  assert first[0][:2] == first[1][:2]
  assert first[2][:2] == first[3][:2]
  assert first[0][1].startswith("127.0.0.2:")
  assert first[2][1].startswith("127.0.0.4:")
  # A process that is killed on the first host of a replica; one on the second
  # host is killed in test_between_hosts.py.
  os.kill(first[2][2], signal.SIGKILL)
  again = [job.starts(rank, 2) for rank in (2, 3)]
  assert again[0][:2] == again[1][:2]
  assert again[0][0] == 1
  assert again[0][1] != first[2][1]
  assert not is_running(first[3][2])
  # A host whose launcher is killed, and comes back.
  job.launchers[3].kill()
  job.launchers[3].wait()
  job.launch(3)
  number, address, _ = job.starts(3, 1)
  assert number == 2
  assert job.starts(2, 3)[:2] == (number, address)
  assert not is_running(again[0][2])
  # Of the killed launcher: its watcher may come to it later.
  wait_for_end(again[1][2])
  # A host that is to end takes the replica with it, on the others as well.
  job.launchers[3].terminate()
  assert job.launchers[3].wait(180.0) == 143, job.text(3)
  assert job.launchers[2].wait(180.0) == 0, job.text(2)
  # All the time nothing has happened to the other one.
  assert [job.starts(rank, 1) for rank in (0, 1)] == first[:2]
  assert all(is_running(pid) for _, _, pid in first[:2])
  # Nor is anything left when the first host ends, with the store.
  job.launchers[0].terminate()
  assert job.launchers[0].wait(180.0) == 143, job.text(0)
  assert job.launchers[1].wait(180.0) == 0, job.text(1)
  assert not any(is_running(pid) for _, _, pid in first[:2])
  assert not any("Traceback" in job.text(rank) for rank in range(4))
