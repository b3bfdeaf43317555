"""The memory of a replica that exchanges between hosts."""

import json
import pathlib
import subprocess
import sys

import pytest

PROGRAM = (
  pathlib.Path(__file__).parents[3] / "benchmarks/comparison/replicas.py"
)


@pytest.mark.namespaces
def test_a_step_takes_three_times_the_memory_of_the_parameters():
  """Parameters, gradient and mean; then the new ones, once the gradient is free."""
  command = [
    "--params",
    "32000000",
    "--seconds",
    "1",
    "--between",
    "bridge",
    "--memory",
  ]
  # Where threads wait for a core, what one has freed overlaps with what is next.
  first = ["chrt", "-r", "1", sys.executable, PROGRAM]
  done = subprocess.run(
    [*first, *command],
    stdout=subprocess.PIPE,
    check=True,
    timeout=300,
  )
  said = json.loads(done.stdout.splitlines()[-1])
  # On a busy machine a half more, but never a fourth time.
  most = 3.9 * 4 * said["params"]
  assert said["memory_joining"] < most
  assert said["memory"] < most
