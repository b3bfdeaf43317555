"""Two hosts with IPv6 alone, where the store is given by its name."""

import os
import pathlib
import subprocess
import sys

import hosts as host_maker
import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_TRAIN = """
import jax.numpy as jnp, optax
from optax_dist import coordinator
with coordinator.join(optax.sgd(1.0), jnp.zeros(2)) as replica:
  while replica.global_step < 5:
    replica.step(jnp.ones(2))
  replica.finish()
  print("ends with", float(replica.params[0]))
"""

pytestmark = pytest.mark.namespaces


def _run(hosts, command, folder, program, **more):
  """The exit codes, and what is printed, on both hosts."""
  secret = folder / "secret"
  secret.write_text("a secret of enough bytes")
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)}
  made = [
    hosts.python(
      rank,
      *("-m", "optax_dist", command, "--nodes", "2", "--replicas", "2"),
      *("--node-rank", str(rank), "--address", "host0:29300"),
      *("--secret-file", str(secret), *program),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      env=environment | more,
    )
    for rank in (0, 1)
  ]
  texts = [one.communicate(timeout=240)[0] for one in made]
  return [one.returncode for one in made], texts


# With IPv4 alone other tests are between hosts.
@pytest.fixture(
  scope="module",
  params=[(6,), (6, 4), pytest.param((4,), marks=pytest.mark.nightly)],
)
def hosts(request):
  with host_maker.Hosts(2, versions=request.param) as made:
    yield made


def test_doctor_and_job_succeed_on_hosts_with_ipv6(hosts, tmp_path):
  codes, texts = _run(hosts, "doctor", tmp_path, ("--host-timeout", "60"))
  assert codes == [0, 0], texts
  version = hosts.versions[0]
  for rank, text in enumerate(texts):
    at = hosts.address(rank, version)
    at = f"[{at}]:" if version == 6 else f"{at}:"
    assert f"other hosts are to reach this one at {at}294" in text
  program = ("--", sys.executable, "-c", _TRAIN)
  # Its timeout is 300 s otherwise, and nobody would wait for the reason.
  codes, texts = _run(hosts, "launch", tmp_path, program)
  assert codes == [0, 0], texts
  for rank, text in enumerate(texts):
    assert f"[replica {rank}] ends with -5.0" in text
