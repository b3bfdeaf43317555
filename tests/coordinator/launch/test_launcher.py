"""The launcher looks after real processes, and leaves none behind."""

import contextlib
import errno
import os
import pathlib
import re
import resource
import subprocess
import sys
import time

import left_over
import pytest

from optax_dist.coordinator.extras.hosts import board, nodes, peers
from optax_dist.coordinator.extras.hosts.placement import HostPlacement
from optax_dist.coordinator.launch import (
  child,
  environment,
  launcher,
  placement,
  supervisor,
)
from optax_dist.coordinator.launch.launcher import LaunchError
from optax_dist.coordinator.store import process as stores
from optax_dist.coordinator.transport import addresses

_PROGRAM = str(pathlib.Path(__file__).with_name("launched.py"))


def _launcher(folder, what, hear=lambda line: None, restarts=0, **options):
  """A launcher of two replicas; `hear` gets what they and it print."""
  return launcher.Launcher(
    [sys.executable, _PROGRAM, *what.split()],
    placement.Placement(2),
    supervisor.Policy(restarts=restarts),
    folder=folder,
    env={"JAX_PLATFORMS": "cpu"},
    echo=lambda label, line, error: hear(line),
    **options,
  )


def test_a_replica_that_dies_is_started_again(tmp_path):
  lines = []
  made = _launcher(tmp_path, f"die {tmp_path}", lines.append, restarts=1)
  assert made.run() == 0
  said = ["replica 1 was ended by SIGKILL"]
  said += ["replica 1 starts again (restart 1 of 1)"]
  assert [line for line in lines if line in said] == said
  placed = [line.split()[1:3] for line in lines if line.startswith("placed")]
  assert sorted(placed) == [["0", "0"], ["1", "0"], ["1", "1"]]


def test_the_run_ends_when_the_only_replica_with_the_parameters_dies(tmp_path):
  made = _launcher(tmp_path, f"alone {tmp_path}", restarts=1)
  words = (
    "No replica is left that has the run's parameters: replica 1 was ended"
  )
  with pytest.raises(LaunchError, match=words):
    made.run()


def test_a_process_that_can_not_be_started_is_named(tmp_path, monkeypatch):
  made, start = [], child.Child

  def start_one(*arguments, **options):
    if made:
      raise OSError(errno.EMFILE, "Too many open files")
    made.append(start(*arguments, **options))
    return made[0]

  monkeypatch.setattr(child, "Child", start_one)
  # No store is needed: it is never asked.
  told = environment.Environment(store="tcp://127.0.0.1:1")
  with pytest.raises(LaunchError, match="Too many open") as caught:
    _launcher(tmp_path, "sleep", told=told).run()
  assert str(caught.value).startswith("replica 1 can't be started")
  assert "ulimit -n" in str(caught.value)
  left_over.wait_for_end(made[0].pid)


def test_the_launcher_says_that_the_store_has_died(tmp_path):
  steps = []

  def hear(line):
    if line.startswith("step"):
      steps.append(line)
      if len(steps) == 5:
        made._store.process.kill()

  made = _launcher(tmp_path, "train 600", hear)
  with pytest.raises(LaunchError, match="SIGKILL") as caught:
    made.run()
  assert str(caught.value).startswith("The store of the job")
  assert "last checkpoint" in str(caught.value)
  assert len(steps) >= 5


class _Kills:
  """A supervisor that kills the replica as soon as it has joined."""

  over = False
  never_joined = frozenset()

  def __init__(self, may_join, running):
    self._may_join, self._running = may_join, running

  def start(self, now):
    return [supervisor.StartReplica(0, 0)]

  def step(self, given, now):
    if isinstance(given, supervisor.Joined):
      return [supervisor.KillReplica(0), supervisor.JobEnded(0)]
    # What it says and its end are seen together.
    self._may_join.touch()
    while not self._running()[0].has_ended():
      time.sleep(0.01)
    return []


def test_a_replica_may_be_killed_for_what_it_said_before_its_end(tmp_path):
  may_join = tmp_path / "may join"

  class Placement(placement.Placement):
    def supervisor(self, policy, told):
      return _Kills(may_join, lambda: made._running[0])

  made = launcher.Launcher(
    [sys.executable, _PROGRAM, "join", may_join],
    Placement(1),
    supervisor.Policy(),
    told=environment.Environment(store="tcp://127.0.0.1:1"),
    env={"JAX_PLATFORMS": "cpu"},
  )
  assert made.run() == 0


def test_a_host_without_an_address_of_its_own_is_an_error(monkeypatch):
  def fail(*arguments):
    raise ValueError("This host has no address from which it reaches it.")

  monkeypatch.setattr(addresses, "advertised", fail)
  # Its two processes are on two hosts, and meet on this one.
  made = launcher.Launcher(
    [sys.executable, "-c", ""],
    HostPlacement(nodes.Node(0, 2), 1, 2),
    supervisor.Policy(),
    told=environment.Environment(
      store="tcp://192.0.2.1:1", secret="a secret of enough bytes"
    ),
  )
  with pytest.raises(LaunchError, match="no address from which"):
    made.run()


def test_freed_memory_stays_with_replicas_unless_told_otherwise(
  tmp_path, monkeypatch
):
  monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "77")
  found = []

  def hear(line):
    if line.startswith("placed"):
      pid = line.split()[-1]
      lines = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
      found.append(sorted(x for x in lines if x.startswith(b"MALLOC_")))

  _launcher(tmp_path, "train 3", hear).run()
  threshold = b"MALLOC_MMAP_THRESHOLD_=1073741824"
  assert found == [[threshold, b"MALLOC_TRIM_THRESHOLD_=77"]] * 2


def test_a_host_may_have_hundreds_of_processes(tmp_path):
  """Each has four descriptors or so; `select` takes numbers up to 1023."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = 2000
  if hard != resource.RLIM_INFINITY and hard < wanted:
    pytest.skip(f"needs {wanted} descriptors")
  with contextlib.ExitStack() as stack:
    stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    for _ in range(1024):
      stack.enter_context(open(os.devnull))
    made = launcher.Launcher(
      [sys.executable, "-c", "pass"],
      placement.Placement(2),
      supervisor.Policy(),
      folder=tmp_path,
    )
    # As they should: nobody has joined.
    with pytest.raises(LaunchError, match="no replica has joined"):
      made.run()


def test_a_host_without_a_store_says_what_it_waits_for(monkeypatch, tmp_path):
  """Host 0 was never started."""
  monkeypatch.setattr(board, "_TIMEOUT", 0.1)
  monkeypatch.setattr(peers, "_MEET", 1.0)
  address = f"127.0.0.1:{addresses.free_ports()[0]}"
  said = []
  made = launcher.Launcher(
    [sys.executable, "-c", "import time; time.sleep(600)"],
    HostPlacement(nodes.Node(1, 2, address), 2, silence=1.0),
    supervisor.Policy(),
    echo=lambda label, line, error: said.append(line),
    told=environment.Environment(secret="a secret of enough bytes"),
  )
  with pytest.raises(LaunchError, match=r"waited for 1 s\.$") as caught:
    made.run()
  [line] = said
  for text in (line, str(caught.value)):
    assert "Connection refused" in text
    assert address in text
    assert "The launcher of host 0 (--node-rank 0) starts it" in text


class _Hosts:
  """Launchers as commands, each as if on a host of its own."""

  def __init__(self, *flags):
    self._flags, self.processes = flags, []

  def launch(self, rank, *flags):
    self.processes.append(
      subprocess.Popen(
        [
          *(sys.executable, "-m", "optax_dist", "launch", "--nodes", "2"),
          *("--node-rank", str(rank), *self._flags, *flags),
          *("--", "sh", "-c", "echo starts; exec sleep 600"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "OPTAX_DIST_SECRET": "a" * 16},
      )
    )
    return self.processes[-1]

  def close(self):
    for one in self.processes:
      one.kill()
      one.wait()
      one.stdout.close()


def test_hosts_that_were_started_with_different_settings_end():
  address = f"127.0.0.1:{addresses.free_ports()[0]}"
  with contextlib.closing(_Hosts("--address", address)) as hosts:
    both = [hosts.launch(0, "--replicas", "2"), hosts.launch(1, "--replicas=4")]
    for one, mine, theirs in zip(both, (2, 4), (4, 2), strict=True):
      text = one.communicate(timeout=180)[0]
      assert one.returncode == 1, text
      assert re.search(
        f"--replicas {mine},.* here .*--replicas {theirs},", text
      )


def test_a_second_host_of_the_same_rank_ends():
  secret = b"a" * 16
  with stores.start(secret, port=0) as store:
    url = f"tcp://{store.address.partition(',')[0]}"
    flags = ("--store", url, "--run", "one")
    with contextlib.closing(_Hosts(*flags)) as hosts:
      first = hosts.launch(0)
      assert "starts" in first.stdout.readline()
      time.sleep(1.0)  # It writes its notice.
      second = hosts.launch(0)
      text = second.communicate(timeout=180)[0]
      assert second.returncode == 1, text
      assert "Two launchers say that they are on host 0" in text
      assert f"process {first.pid})" in text
      assert "advertise" not in text
      assert first.poll() is None
