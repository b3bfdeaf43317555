"""`optax-dist launch` on two hosts, with replicas of two processes."""

import os
import pathlib
import subprocess
import sys
import time

import hosts as host_maker
import pytest
import waiting

_ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.mark.namespaces
@pytest.mark.parametrize(
  ("rank", "address", "words"),
  [
    (1, "nowhere.invalid:29300", "name 'nowhere.invalid' can't be resolved"),
  ],
)
def test_a_host_that_was_started_wrongly_says_what_is_wrong(
  tmp_path, rank, address, words
):
  """No host has a route to anywhere else, so that none can be guessed."""
  secret = tmp_path / "secret"
  secret.write_text("a secret of enough bytes")
  with host_maker.Hosts(2) as hosts:
    first = f"{hosts.address(0)}:29300"
    made = []
    for host, number, where in ((0, 0, first), (1, rank, address or first)):
      made.append(
        hosts.python(
          host,
          *("-m", "optax_dist", "launch", "--nodes", "2", "--replicas", "2"),
          *("--node-rank", str(number), "--address", where, "--restarts", "0"),
          *("--secret-file", str(secret), "--", sys.executable, "-c", _JOIN),
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          text=True,
          env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)},
        )
      )
      if host == 0:
        assert "starts" in made[0].stdout.readline()
        time.sleep(1.0)  # It writes its notice.
    text = made[1].communicate(timeout=240)[0]
    going_on = made[0].poll() is None
    made[0].kill()  # Its replica, which takes no step, would wait for one.
    other = made[0].communicate(timeout=60)[0]
  assert going_on, other
  assert made[1].returncode == 1, text
  assert words in text
  assert "as others see it" not in text


@pytest.mark.namespaces
def test_the_host_of_the_coordinator_vanishes_and_comes_back(tmp_path):
  """Within ten seconds all that wait for it say so, and what they do until when."""
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
    began = time.monotonic()
    where = f"the coordinator at {hosts.address(0)}:29300 is"
    gone = (
      f"[launch] {where} gone: not a byte came for ",
      f"[replica 1] {where} gone (not a byte came for ",
      "replica 1 goes on, and waits for it for at most 145 s",
      "each for at most the `timeout` of its join",
    )
    waiting.until(
      lambda: all(x in log.read_text() for x in gone), log.read_text
    )
    assert time.monotonic() - began < 20.0  # Ten, on a busy machine.
    hosts.heal()
    for one in made:
      assert one.wait(240.0) == 0, log.read_text()
  text = log.read_text()
  assert f"[launch] {where} there again" in text
  assert "[replica 1] ends at 700" in text
  assert "starts again" not in text


# What a replica does at first.
_JOIN = """
print("starts", flush=True)
import time
import jax.numpy as jnp, optax
from optax_dist import coordinator
coordinator.join(optax.sgd(0.1), jnp.zeros(2))
time.sleep(600)
"""
