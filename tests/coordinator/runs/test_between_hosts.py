"""Runs between hosts: late, cut off, gone, and with names that mislead.

Each host is a network namespace that the test makes and removes.
"""

import itertools
import json
import os
import statistics
import time

import cuts
import hosts as host_maker
import pytest

pytestmark = pytest.mark.namespaces

_PROGRAM = """
import json, socket, sys, time
import jax.numpy as jnp, optax
from optax_dist import coordinator

number, address, told = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
steps, width, pause = told.pop("steps"), told.pop("width"), told.pop("pause")
if told.get("bind") == "own name":
  told["bind"] = socket.gethostname()
grads = {"w": jnp.ones(width)}
with coordinator.join(
  optax.sgd(0.1), grads, replica=number, total_num_replicas=2,
  coordinator_address=address, secret="a secret of enough bytes",
  start_store=number == 0, **told,
) as replica:
  print("joined", flush=True)
  while replica.global_step < steps and not replica.finished:
    if number == 1:
      time.sleep(pause)
    replica.step(grads)
    now = time.monotonic()
    print("step", replica.global_step, now, replica.fingerprint(), flush=True)
  replica.finish()
print("ended", replica.global_step, flush=True)
"""


class Pair:
  """Two replicas on two hosts, and what they have printed."""

  def __init__(self, hosts, folder, *, version=4, **told):
    self._logs = [folder / f"replica-{i}.log" for i in (0, 1)]
    self._errors = [folder / f"replica-{i}.err" for i in (0, 1)]
    told = {
      "steps": 6,
      "width": 40,
      "pause": 0.0,
      "timeout": 120.0,
      "attempt_timeout": 15.0,
      "leader_timeout": 8.0,
    } | told
    host = hosts.address(0, version)
    address = f"[{host}]:29999" if version == 6 else f"{host}:29999"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    self.processes = []
    for i in (0, 1):
      with self._logs[i].open("w") as out, self._errors[i].open("w") as err:
        self.processes.append(
          hosts.python(
            i,
            *("-c", _PROGRAM, str(i), address, json.dumps(told)),
            stdout=out,
            stderr=err,
            env=environment,
          )
        )

  def steps(self, replica):
    """Of its steps: number, time and fingerprint."""
    lines = self._logs[replica].read_text().rpartition("\n")[0].splitlines()
    found = [line.split() for line in lines if line.startswith("step")]
    return [(int(n), float(at), mark) for _, n, at, mark in found]

  def has_joined(self, replica):
    return "joined" in self._logs[replica].read_text()

  def until(self, ready, seconds=90.0):
    end = time.monotonic() + seconds
    while not ready():
      told = [p.read_text()[-2000:] for p in self._errors]
      assert time.monotonic() < end, told
      assert all(p.poll() in (None, 0) for p in self.processes), told
      time.sleep(0.02)

  def check_ends(self):
    """Both end well, and held the same after each step."""
    self.until(lambda: all(p.poll() == 0 for p in self.processes))
    one, two = ({n: mark for n, _, mark in self.steps(i)} for i in (0, 1))
    common = one.keys() & two.keys()
    assert common
    assert all(one[n] == two[n] for n in common)


@pytest.mark.parametrize(
  "width", [pytest.param(40, marks=pytest.mark.nightly), 100_000]
)
def test_a_round_trip_of_300_ms(tmp_path, width):
  with host_maker.Hosts(2) as hosts:
    hosts.shape(delay=0.15)
    pair = Pair(hosts, tmp_path, width=width)
    pair.check_ends()
    steps = pair.steps(0)
    assert steps[-1][0] == 6
    # On a busy machine some of them take longer.
    times = [at for _, at, _ in steps]
    each = [later - at for at, later in itertools.pairwise(times)]
    assert statistics.median(each) < 12 * 0.3


def test_a_cut_of_three_seconds_is_over_soon_after_it_has_healed(tmp_path):
  with host_maker.Hosts(2) as hosts:
    pair = Pair(hosts, tmp_path, steps=10_000, pause=0.01, leader_timeout=60.0)
    pair.until(lambda: len(pair.steps(0)) > 10)
    hosts.cut([0], [1])
    at_cut = len(pair.steps(0))
    time.sleep(3.0)
    before = len(pair.steps(0))
    healed = time.monotonic()
    hosts.heal()
    pair.until(lambda: len(pair.steps(0)) > before)
    resumed = pair.steps(0)[before][1]
    # It stood still, but for what had come by then, and goes on; on a busy
    # machine not at once, but long before anybody would be given up.
    assert before <= at_cut + 3
    assert resumed - healed < 30.0


def test_a_vanished_host_is_removed_although_no_step_needs_it(tmp_path):
  """The others need only one gradient a step; it computes for minutes."""
  journal = tmp_path / "journal.jsonl"
  with host_maker.Hosts(2) as hosts:
    pair = Pair(
      hosts,
      tmp_path,
      replicas_to_aggregate=1,
      steps=100_000,
      pause=600.0,
      leader_timeout=5.0,
      journal=str(journal),
    )
    pair.until(lambda: pair.has_joined(1))
    pair.until(lambda: len(pair.steps(0)) > 5)
    assert '"lost"' not in journal.read_text()
    hosts.vanish(1)
    pair.until(lambda: '"lost"' in journal.read_text())
    steps = len(pair.steps(0))
    pair.until(lambda: len(pair.steps(0)) > steps + 5)


def test_a_host_name_at_loopback_is_not_advertised(tmp_path):
  """Debian has the host's own name at 127.0.1.1."""
  with host_maker.Hosts(2, hostnames=True) as hosts:
    pair = Pair(hosts, tmp_path, bind="own name")
    pair.check_ends()
    assert pair.steps(0)[-1][0] == 6


@pytest.mark.nightly
def test_hosts_of_ip_version_6(tmp_path):
  with host_maker.Hosts(2) as hosts:
    pair = Pair(hosts, tmp_path, version=6)
    pair.check_ends()
    assert pair.steps(0)[-1][0] == 6


@pytest.mark.nightly
def test_a_run_outlives_a_bad_network(tmp_path):
  """`benchmarks/coordinator/network_faults.py` has all cases; here are some."""
  with cuts.Run(tmp_path, 3) as run:
    # Late, narrow and lossy, all together.
    run.hosts.shape(delay=0.01, rate=100e6, loss=0.01)
    before = len(run.replicas[0].steps)
    run.wait(lambda: len(run.replicas[0].steps) > before + 5, "no step", 90.0)
    run.hosts.shape()
    for target, both in (
      *(("leader", False), ("store", True)),
      *(("two replicas", True), ("replica", False)),
    ):
      found = run.cut(target, 3.0, both=both)
      # On a machine that may be very busy.
      assert not cuts.too_late(target, 3.0, found, slack=40.0)
    run.vanish(90.0)
    steps, problems = run.finish()
    assert not problems
    assert steps > 5
