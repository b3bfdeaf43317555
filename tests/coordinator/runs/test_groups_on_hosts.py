"""Two replicas of two processes, each process on a host of its own.

Whoever starts a process knows only its own host: what ends is started again there,
and the processes of a replica find each other through the coordinator.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys

import hosts as host_maker
import pytest
from waiting import until

from optax_dist.coordinator.launch.environment import (
  Environment,
  ProcessEnvironment,
)

_PROGRAM = (
  pathlib.Path(__file__).resolve().parents[2] / "cli/launch/spread_replica.py"
)
_JOINS = r"process (\d+) joins at step (\d+)"
_PORT = 29300


class _Job:
  """What runs on the hosts, and what it has printed."""

  def __init__(self, hosts, folder):
    self._hosts, self._folder = hosts, folder
    self.end = folder / "end"
    self._address = hosts.address(0)
    self._processes, self._codes = {}, [[] for _ in range(4)]
    self.start_coordinator()
    for host in range(4):
      self._start(host)

  def _run(self, host, log, arguments, told):
    with (self._folder / log).open("ab") as out:
      return self._hosts.python(
        host,
        *arguments,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        env=os.environ
        | {
          "JAX_NUM_CPU_DEVICES": "1",
          "JAX_PLATFORMS": "cpu",
          "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        | told,
      )

  def start_coordinator(self):
    self._coordinator = self._run(
      0,
      "coordinator.log",
      [
        *("-m", "optax_dist", "coordinator", "--output", str(self._folder)),
        *("--address", f"{self._address}:{_PORT}"),
      ],
      Environment(secret="a secret of enough bytes").variables(),
    )

  def kill_coordinator(self):
    self._coordinator.kill()
    self._coordinator.wait()

  def _start(self, host):
    replica, process = divmod(host, 2)
    told = Environment(
      coordinator_address=f"{self._address}:{_PORT}",
      secret="a secret of enough bytes",
      num_replicas=2,
      min_replicas=1,
    ).variables()
    told |= ProcessEnvironment(
      replica=replica,
      num_processes=2,
      process_index=process,
      restarts=len(self._codes[host]),
    ).variables()
    arguments = [str(_PROGRAM), str(self.end)]
    self._processes[host] = self._run(host, f"{host}.log", arguments, told)

  def kill(self, host):
    # It has replaced the command that made it.
    os.kill(self._processes[host].pid, signal.SIGKILL)

  def text(self, host):
    return (self._folder / f"{host}.log").read_text()

  def texts(self):
    names = [*map(str, range(4)), "coordinator"]
    return "\n".join(
      f"--- {name}\n{(self._folder / f'{name}.log').read_text()[-3000:]}"
      for name in names
    )

  def look(self):
    """Starts again what has ended, on its host; returns whether all is over."""
    for host, one in list(self._processes.items()):
      if one.poll() is not None:
        self._codes[host].append(one.returncode)
        del self._processes[host]
        if one.returncode:
          self._start(host)
    return not self._processes

  def wait_for(self, host, pattern, more=1):
    """Waits until a process has printed it so often again; returns these."""
    before = len(re.findall(pattern, self.text(host)))

    def found():
      self.look()
      return re.findall(pattern, self.text(host))[before + more - 1 :]

    until(found, self.texts, 240.0)
    return re.findall(pattern, self.text(host))[before:]

  @property
  def codes(self):
    return self._codes

  def joins(self, count, some=range(4)):
    """Waits until processes have joined so often; returns the last times."""
    lasts = lambda: [re.findall(_JOINS, self.text(host)) for host in some]

    def ready():
      self.look()
      return all(len(result) >= count for result in lasts())

    until(ready, self.texts, 240.0)
    return [result[-1] for result in lasts()]

  def check_equal(self):
    """Like holds what like holds, at all steps that both have printed."""
    compared = 0
    line = r"step (\d+) of \d, fingerprint (\w+)"
    for process in range(2):
      one, other = (
        dict(re.findall(line, self.text(2 * replica + process)))
        for replica in range(2)
      )
      both = one.keys() & other.keys()
      assert [one[s] for s in both] == [other[s] for s in both]
      compared += len(both)
    return compared


@pytest.mark.nightly  # On one host: test_groups.py.
@pytest.mark.namespaces
def test_replicas_over_two_hosts_outlive_their_processes_and_coordinator(
  tmp_path,
):
  with host_maker.Hosts(4) as hosts:
    job = _Job(hosts, tmp_path)
    job.joins(1)
    together = r"step \d+ of 2"
    job.wait_for(0, together, 5)
    # Process 1 of replica 1, and then process 0: both begin again, elsewhere.
    for count, host in ((2, 3), (3, 2)):
      job.kill(host)
      job.wait_for(0, r"step \d+ of 1")
      steps = {step for _, step in job.joins(count, (2, 3))}
      assert len(steps) == 1
      job.wait_for(0, together, 5)
    codes = [list(result) for result in job.codes]
    assert codes[:2] == [[], []]
    assert sorted(codes[2] + codes[3])[:2] == [-9, -9]
    job.kill_coordinator()
    job.start_coordinator()
    job.wait_for(1, together, 20)
    assert job.codes == codes  # Nobody has ended with it.
    # Whoever can't be heard is lost with its replica; once it can, both are back.
    hosts.vanish(3)
    job.wait_for(0, r"step \d+ of 1")
    until(lambda: job.look() or len(job.codes[2]) > len(codes[2]), job.texts)
    hosts.heal()
    job.joins(4, (2, 3))
    job.wait_for(0, together, 5)
    assert job.codes[:2] == [[], []]
    job.end.touch()
    until(job.look, job.texts, 240.0)
    assert [result[-1] for result in job.codes] == [0] * 4, job.texts()
    ends = re.findall(r"ends at (\d+), (\w+)", "".join(map(job.text, range(4))))
    assert len(ends) == 4
    assert len({step for step, _ in ends}) == 1
    assert job.check_equal() > 30
