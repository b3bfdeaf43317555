"""Faults, as one writes them and as replicas get them."""

import argparse

import pytest

from optax_dist.cli import errors
from optax_dist.cli.launch import chaos
from optax_dist.coordinator import faults


def test_faults_are_read_and_passed_on():
  found = chaos.parse("kill:0.02,kill:3@40,stop:0.1,slow:2x5,slow:0x2")
  slow = {2: 5.0, 0: 2.0}
  assert found == {"kill": 0.02, "kill_at": {3: 40}, "stop": 0.1, "slow": slow}
  read = faults.Faults.load(chaos.dump(found, seed=3))
  assert read == faults.Faults(0.02, {3: 40}, 0.1, slow, seed=3)
  assert chaos.dump(None) is None


@pytest.mark.parametrize(
  "text", ["kill", "kill:1", "kill:1@0", "kill:@3", "slow:1", "slow:1x0.5", ""]
)
def test_what_is_no_fault_is_refused(text):
  with pytest.raises(argparse.ArgumentTypeError, match="must be kill:P"):
    chaos.parse(text)


def test_only_replicas_that_there_are_can_be_slow():
  chaos.check({"slow": {1: 2.0}, "kill_at": {0: 3}}, 2)
  with pytest.raises(errors.CommandError, match="numbered 0 to 1"):
    chaos.check({"slow": {2: 2.0}}, 2)


def test_only_replicas_that_there_are_can_be_killed():
  with pytest.raises(errors.CommandError, match=r"kill:2@.*numbered 0 to 1"):
    chaos.check({"kill_at": {2: 40}}, 2)


@pytest.mark.parametrize(("restarts", "killed"), [(0, [3]), (1, [])])
def test_a_planned_kill_strikes_once(restarts, killed, monkeypatch):
  """The process that comes in its place is spared."""
  struck = []
  monkeypatch.setattr(
    faults._Random, "_strike", lambda self, fault, phase: struck.append(fault)
  )
  random = faults._Random(faults.Faults(kill_at={1: 3}), (1, restarts), None)
  at = []
  for gradient in range(1, 6):
    for phase in ("computing", "arrived", "applied"):
      random(phase, None)
    at += [gradient] * len(struck)
    struck.clear()
  assert at == killed
