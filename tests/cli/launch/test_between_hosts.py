"""`optax-dist launch` on two hosts, each with a replica of two processes."""

import os
import pathlib
import re
import subprocess

import hosts as host_maker
import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_EXAMPLE = _ROOT / "examples" / "sharded_transformer_groups.py"


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
    printed = [one.communicate(timeout=240)[0] for one in both]
  for rank, text in enumerate(printed):
    assert both[rank].returncode == 0, text
    joined = re.findall(r"\[replica (\d\.\d)\] process \d+ joins", text)
    assert sorted(joined) == [f"{rank}.0", f"{rank}.1"]
    assert f"[replica {rank}.0] step 20, loss" in text
    assert "step 20" in text
    assert ", of 2" in text
  assert (tmp_path / "out" / "checkpoints" / "step-00000020").is_dir()
