"""`optax-dist launch` on two hosts, with replicas of two processes."""

import os
import pathlib
import re
import subprocess

import hosts as host_maker
import pytest
import waiting

_ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.mark.namespaces
def test_job_survives_an_outage_of_the_coordinators_host(tmp_path):
  """Launcher and replica report it within ten seconds, and how long they wait."""
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
    where = f"the coordinator at {hosts.address(0)}:29300 is"
    gone = (
      f"[launch] {where} gone: not a byte came for ",
      f"[replica 1] {where} gone (not a byte came for ",
      "replica 1 goes on, and waits for it for at most 145 s",
      "each a little longer than the `timeout` of its join",
    )
    waiting.until(
      lambda: all(x in log.read_text() for x in gone), log.read_text
    )
    hosts.heal()
    for one in made:
      assert one.wait(240.0) == 0, log.read_text()
  text = log.read_text()
  silences = re.findall(r"not a byte came for ([\d.]+) s", text)
  assert max(map(float, silences)) < 20.0  # Ten, on an idle machine.
  assert f"[launch] {where} there again" in text
  assert "[replica 1] ends at 700" in text
  assert "starts again" not in text
