"""`optax-dist launch` on two hosts, with replicas of two processes."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import hosts as host_maker
import pytest
import waiting

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_EXAMPLE = _ROOT / "examples" / "sharded_transformer_groups.py"
_REPLICA = pathlib.Path(__file__).with_name("spread_replica.py")


@pytest.mark.nightly
@pytest.mark.namespaces
def test_a_replica_of_two_processes_on_each_host(tmp_path):
  """Processes meet on their own host, and their like on the other one."""
  secret = tmp_path / "secret"
  secret.write_text("a secret of enough bytes")
  environment = os.environ | {
    "JAX_NUM_CPU_DEVICES": "1",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(_ROOT),
  }
  with host_maker.Hosts(2) as hosts:
    both = [
      hosts.python(
        rank,
        *("-m", "optax_dist", "launch", "--nodes", "2"),
        *("--node-rank", str(rank), "--address", f"{hosts.address(0)}:29300"),
        *("--secret-file", str(secret), "--replicas", "2"),
        *("--processes-per-replica", "2", "--output", str(tmp_path / "out")),
        *(str(_EXAMPLE), "--steps", "20", "--save-every", "10"),
        *("--width", "16", "--layers", "1", "--context", "16"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
      )
      for rank in (0, 1)
    ]
    printed = [one.communicate(timeout=400)[0] for one in both]
  for rank, text in enumerate(printed):
    assert both[rank].returncode == 0, text
    joined = re.findall(r"\[replica (\d\.\d)\] process \d+ joins", text)
    assert sorted(joined) == [f"{rank}.0", f"{rank}.1"]
    assert f"[replica {rank}.0] step 20, loss" in text
    assert "step 20" in text
    assert ", of 2" in text
  assert (tmp_path / "out" / "checkpoints" / "step-00000020").is_dir()


class _Launched:
  """A launcher on each of four hosts, and what they have printed."""

  def __init__(self, hosts, folder, *flags):
    secret = folder / "secret"
    secret.write_text("a secret of enough bytes")
    self.end = folder / "end"
    environment = os.environ | {
      "JAX_NUM_CPU_DEVICES": "1",
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    self._logs = [folder / f"host-{rank}.log" for rank in range(4)]
    self.processes = []
    for rank, log in enumerate(self._logs):
      with log.open("wb") as out:
        self.processes.append(
          hosts.python(
            rank,
            *("-m", "optax_dist", "launch", "--nodes", "4"),
            *("--node-rank", str(rank), "--address"),
            *(f"{hosts.address(0)}:29300", "--secret-file", str(secret)),
            *(*flags, str(_REPLICA), str(self.end)),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
          )
        )

  def wait_for(self, host, pattern, count=1, seconds=240.0):
    """Waits until a launcher has printed it so often; returns what it found."""
    end = time.monotonic() + seconds
    while len(result := re.findall(pattern, self.text(host))) < count:
      assert time.monotonic() < end, self.texts()
      codes = [one.poll() for one in self.processes]
      assert codes == [None] * 4, self.texts()
      time.sleep(0.05)
    return result

  def text(self, host):
    return self._logs[host].read_text()

  def texts(self):
    return "".join(map(self.text, range(4)))

  def fingerprints(self):
    """By process of a replica, all that it has printed: by replica and step."""
    result = {0: {}, 1: {}}
    line = r"\[replica (\d)\.(\d)\] step (\d+) of \d, fingerprint (\w+)"
    for replica, process, step, mark in re.findall(line, self.texts()):
      result[int(process)].setdefault(int(step), {})[int(replica)] = mark
    return result


@pytest.mark.namespaces
@pytest.mark.parametrize(
  ("rank", "address", "words"),
  [
    (1, "nowhere.invalid:29300", "name 'nowhere.invalid' can't be resolved"),
  ],
)
def test_a_host_that_was_started_wrongly_says_what_is_wrong(
  tmp_path, rank, address, words
):
  """No host has a route to anywhere else, so that none can be guessed."""
  secret = tmp_path / "secret"
  secret.write_text("a secret of enough bytes")
  with host_maker.Hosts(2) as hosts:
    first = f"{hosts.address(0)}:29300"
    made = []
    for host, number, where in ((0, 0, first), (1, rank, address or first)):
      made.append(
        hosts.python(
          host,
          *("-m", "optax_dist", "launch", "--nodes", "2", "--replicas", "2"),
          *("--node-rank", str(number), "--address", where, "--restarts", "0"),
          *("--secret-file", str(secret), "--", sys.executable, "-c", _JOIN),
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          text=True,
          env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)},
        )
      )
      if host == 0:
        assert "starts" in made[0].stdout.readline()
        time.sleep(1.0)  # It writes its notice.
    text = made[1].communicate(timeout=240)[0]
    going_on = made[0].poll() is None
    made[0].kill()  # Its replica, which takes no step, would wait for one.
    other = made[0].communicate(timeout=60)[0]
  assert going_on, other
  assert made[1].returncode == 1, text
  assert words in text
  assert "as others see it" not in text


@pytest.mark.namespaces
def test_the_host_of_the_coordinator_vanishes_and_comes_back(tmp_path):
  """Within ten seconds all that wait for it say so, and what they do until when."""
  secret = tmp_path / "secret"
  secret.write_text("a secret of enough bytes")
  program = str(pathlib.Path(__file__).with_name("hosts_program.py"))
  log = tmp_path / "log"
  with host_maker.Hosts(2) as hosts, log.open("wb") as out:
    made = [
      hosts.python(
        host,
        *("-m", "optax_dist", "launch", "--nodes", "2", "--replicas", "2"),
        *("--node-rank", str(host), "--secret-file", str(secret), "--address"),
        *(f"{hosts.address(0)}:29300", program, "700"),
        stdout=out if host else subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)},
      )
      for host in (0, 1)
    ]
    waiting.until(lambda: "step 150 " in log.read_text(), log.read_text)
    hosts.vanish(0)
    began = time.monotonic()
    where = f"the coordinator at {hosts.address(0)}:29300 is"
    gone = (
      f"[launch] {where} gone: not a byte came for ",
      f"[replica 1] {where} gone (not a byte came for ",
      "replica 1 goes on, and waits for it for at most 145 s",
      "each for at most the `timeout` of its join",
    )
    waiting.until(
      lambda: all(x in log.read_text() for x in gone), log.read_text
    )
    assert time.monotonic() - began < 20.0  # Ten, on a busy machine.
    hosts.heal()
    for one in made:
      assert one.wait(240.0) == 0, log.read_text()
  text = log.read_text()
  assert f"[launch] {where} there again" in text
  assert "[replica 1] ends at 700" in text
  assert "starts again" not in text


# What a replica does at first.
_JOIN = """
print("starts", flush=True)
import time
import jax.numpy as jnp, optax
from optax_dist import coordinator
coordinator.join(optax.sgd(0.1), jnp.zeros(2))
time.sleep(600)
"""
_JOINS = r"\[replica (\d)\.(\d)\] process (\d+) joins at step (\d+)"


def _listeners(pid):
  """Address, as /proc has it, and port of all at which a process listens."""
  own = set()
  for file in pathlib.Path(f"/proc/{pid}/fd").iterdir():
    with contextlib.suppress(FileNotFoundError):  # It was closed just now.
      own.add(os.readlink(file))
  result = []
  for table in ("tcp", "tcp6"):
    lines = pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()
    for fields in map(str.split, lines[1:]):
      if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
        address, _, port = fields[1].partition(":")
        result.append((address[-8:], int(port, 16)))
  return result


@pytest.mark.nightly  # Without launchers: runs/test_groups_on_hosts.py.
@pytest.mark.namespaces
def test_each_replica_over_two_hosts(tmp_path):
  """A kill on one host ends the replica on both; it comes back as a whole."""
  with host_maker.Hosts(4) as hosts:
    run = _Launched(
      hosts,
      tmp_path,
      *("--replicas", "2", "--processes-per-replica", "2"),
      *("--min-replicas", "1"),
    )
    pids = []
    for host in range(4):
      [(replica, process, pid, _)] = run.wait_for(host, _JOINS)
      assert (int(replica), int(process)) == divmod(host, 2)
      pids.append(int(pid))
    for host, pid in enumerate(pids):
      # The transport's port may be reached over all of its addresses; where
      # processes of a replica meet, only at the one that others use.
      ip = socket.inet_aton(hosts.address(host))[::-1].hex().upper()
      inside = [x for x in _listeners(pid) if not 29400 <= x[1] < 29500]
      assert {address for address, _ in inside} == {ip}, (host, inside)
      is_first = host % 2 == 0
      assert any(29500 <= port < 29600 for _, port in inside) == is_first
    together = r"\[replica 0\.0\] step \d+ of 2"
    run.wait_for(0, together, 5)
    os.kill(pids[3], signal.SIGKILL)
    alone = run.wait_for(0, r"\[replica 0\.0\] step (\d+) of 1")
    again = [run.wait_for(host, _JOINS, 2)[1] for host in (2, 3)]
    assert [x[:2] for x in again] == [("1", "0"), ("1", "1")]
    steps = {int(x[3]) for x in again}
    assert len(steps) == 1
    assert min(steps) >= int(alone[0])
    before = len(re.findall(together, run.text(0)))
    run.wait_for(0, together, before + 5)
    together = r"\[replica 0\.1\] step \d+ of 2"
    before = len(re.findall(together, run.text(1)))
    run.wait_for(1, together, before + 20)
    run.end.touch()
    for one in run.processes:
      assert one.wait(240.0) == 0, run.texts()
    ends = re.findall(r"ends at (\d+), (\w+)", run.texts())
    assert len(ends) == 4
    assert len({step for step, _ in ends}) == 1
    compared = 0
    for steps in run.fingerprints().values():
      both = [marks for marks in steps.values() if len(marks) == 2]
      assert all(marks[0] == marks[1] for marks in both)
      compared += len(both)
    assert compared > 30
