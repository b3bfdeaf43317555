"""Faults that a process injects into itself: which, when and once."""

import os
import signal
import types

import pytest

from optax_dist.coordinator._internal import phases
from optax_dist.coordinator.launch import faults
from optax_dist.coordinator.launch.environment import (
  Environment,
  ProcessEnvironment,
)

_STEP = ("computing", "arrived", "applied")


class _Killed(Exception):
  """Raised where the process would end."""


@pytest.fixture(autouse=True)
def _nobody_is_killed(monkeypatch):
  def kill(_, number):
    assert number == signal.SIGKILL
    raise _Killed

  monkeypatch.setattr(os, "kill", kill)
  yield
  phases.listen(None)
  phases.slow_down(factor=1.0)


def _strikes(steps, text, replica=1, restarts=None):
  """In which step, counted from 1, and phase the process is killed; or None."""
  which = ProcessEnvironment(replica=replica, restarts=restarts)
  phases.listen(None)
  faults.install(Environment(faults=text), which)
  for step in range(1, steps + 1):
    for phase in _STEP:
      try:
        phases.reach(phase, 1)
      except _Killed:
        return step, phase
  return None


def test_faults_are_read():
  result = faults.Faults.parse("kill:3@40,slow:2x5,slow:0x2")
  assert result == faults.Faults({3: 40}, {2: 5.0, 0: 2.0})


@pytest.mark.parametrize(
  "text",
  [
    *("", "kill", "kill:1", "kill:-1@3", "kill:1@0", "kill:@3", "kill:1x3"),
    *("kill:0.1", "slow:1", "slow:1x0.5", "slow:1@3", "slow@1x2"),
  ],
)
def test_malformed_faults_are_refused(text):
  with pytest.raises(ValueError, match="must be kill:REPLICA@GRADIENT"):
    faults.Faults.parse(text)


@pytest.mark.parametrize("text", ["slow:2x2", "kill:2@40"])
def test_only_existing_replicas_can_have_faults(text):
  faults.Faults.parse(text).check(3)
  with pytest.raises(ValueError, match=r"replica 2, .* numbered 0 to 1"):
    faults.Faults.parse(text).check(2)


def test_a_planned_kill_strikes_the_first_process_once():
  plan = "kill:1@3"
  assert _strikes(5, plan) == (3, "arrived")
  # Its successor, and another replica, go on.
  assert _strikes(5, plan, restarts=1) is None
  assert _strikes(5, plan, replica=2) is None


def test_no_faults_are_installed_by_default():
  heard = []
  phases.listen(lambda *found: heard.append(found))
  some = "kill:1@1,slow:2x5"
  one = ProcessEnvironment(replica=1)
  faults.install(Environment(), one)
  faults.install(
    Environment(faults=some), ProcessEnvironment()
  )  # No replica's.
  faults.install(Environment(faults="slow:2x5"), one)
  phases.reach("computing", 1)
  assert heard == [("computing", 1)]


def test_only_the_slow_replica_is_slow(monkeypatch):
  slept = []
  # Not for other threads, which may still pause.
  clock = types.SimpleNamespace(sleep=slept.append)
  monkeypatch.setattr(phases, "time", clock)
  for replica in (1, 2):
    which = ProcessEnvironment(replica=replica)
    faults.install(Environment(faults="slow:2x5"), which)
    phases.slow_down(1.0)
  assert slept == [4.0]
