"""Faults, as one writes them and as replicas are told them."""

import argparse

import pytest

from optax_dist.cli import errors
from optax_dist.cli.launch import chaos
from optax_dist.coordinator import faults


def test_faults_are_read_and_told():
  found = chaos.parse("kill:0.02,stop:0.1,slow:2x5,slow:0x2")
  assert found == {"kill": 0.02, "stop": 0.1, "slow": {2: 5.0, 0: 2.0}}
  told = faults.Faults.load(chaos.dump(found, seed=3))
  assert told == faults.Faults(0.02, 0.1, {2: 5.0, 0: 2.0}, seed=3)
  assert chaos.dump(None) is None


@pytest.mark.parametrize("text", ["kill", "kill:1", "slow:1", "slow:1x0.5", ""])
def test_what_is_no_fault_is_refused(text):
  with pytest.raises(argparse.ArgumentTypeError, match="must be kill:P"):
    chaos.parse(text)


def test_only_replicas_that_there_are_can_be_slow():
  chaos.check({"slow": {1: 2.0}}, 2)
  with pytest.raises(errors.CommandError, match="numbered 0 to 1"):
    chaos.check({"slow": {2: 2.0}}, 2)
