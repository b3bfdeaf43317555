"""Runs between hosts: late, cut off and gone.

Each host is a network namespace that the test makes and removes.
"""

import itertools
import statistics
import time

import pytest

from tests.runs import between_hosts

pytestmark = pytest.mark.namespaces


def _end(run):
  """Ends a run after some more steps; all of it must have been right."""
  run.wait_for_steps(3)
  _, problems = run.finish()
  assert not problems


@pytest.mark.parametrize(
  "width", [pytest.param(40, marks=pytest.mark.nightly), 100_000]
)
def test_steps_take_few_round_trips_of_300_ms(tmp_path, width):
  with between_hosts.Run(
    tmp_path, 2, delay=0.15, width=width, pause=0.0
  ) as run:
    run.wait_for_steps(6)
    # On a busy machine some of them take longer.
    times = [step["at"] for step in run.replicas[0].steps]
    each = [later - at for at, later in itertools.pairwise(times)]
    assert statistics.median(each) < 12 * 0.3
    _end(run)


def test_run_continues_after_a_cut_of_three_seconds(tmp_path):
  patient = {"silence_timeout": 60.0, "transfer_timeout": 60.0}
  with between_hosts.Run(tmp_path, 2, timeout=480.0, **patient) as run:
    result = run.cut("two replicas", 3.0, both=True)
    # The run stood still, and continues; on a busy machine not at once, but long before
    # anybody would be given up.
    assert result.stall > 2.0
    assert result.back < 30.0
    assert '"lost"' not in run.journal.read_text()
    _end(run)


def test_a_vanished_host_is_removed_although_no_step_needs_it(tmp_path):
  """The others need only one gradient a step; it computes for minutes."""
  slow = {1: 600.0}
  with between_hosts.Run(
    tmp_path, 2, replicas_to_aggregate=1, pauses=slow
  ) as run:
    run.wait_for_steps(5)
    lost = lambda: '"lost"' in run.journal.read_text()
    assert not lost()
    run.vanish()
    run.run.wait(lost, "it is not removed", 90.0)
    _end(run)


def test_newcomer_catches_up_over_a_slow_network(tmp_path):
  """The other one steps alone, more often than means of it can be sent."""
  with between_hosts.Run(tmp_path, 2, width=1_000_000) as run:
    run.run.kill(run.run.everyone[1])
    run.wait_for_steps(3)
    run.hosts.shape(rate=20e6)
    began = time.monotonic()
    run.run.start(1)
    joined = lambda: run.replicas[-1].steps_of(0, 1, after=began)
    run.run.wait(joined, "it never catches up", 60.0)
    run.hosts.shape()
    _end(run)


@pytest.mark.nightly
def test_run_between_hosts_works_over_ipv6(tmp_path):
  with between_hosts.Run(tmp_path, 2, version=6) as run:
    _end(run)


@pytest.mark.nightly
def test_run_survives_a_bad_network(tmp_path):
  """`benchmarks/coordinator/network_faults.py` has all cases; here are some."""
  with between_hosts.Run(tmp_path, 3) as run:
    # Late, narrow and lossy, all together.
    run.hosts.shape(delay=0.01, rate=100e6, loss=0.01)
    run.wait_for_steps(6)
    run.hosts.shape()
    for target, both in (
      *(("coordinator", False), ("coordinator", True)),
      *(("two replicas", True), ("replica", False)),
    ):
      result = run.cut(target, 3.0, both=both)
      # On a machine that may be very busy.
      assert not between_hosts.too_late(target, 3.0, result, slack=40.0)
    run.vanish()
    _end(run)
