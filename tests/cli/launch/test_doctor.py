"""`optax-dist doctor`, on two hosts that are this one."""

import logging
import subprocess
import sys

import pytest

from optax_dist.cli import main
from optax_dist.coordinator.transport import addresses

_SECRET = "a secret of enough bytes"
_PROGRAM = """
import sys
from optax_dist.cli import main
sys.exit(main.main(sys.argv[1:]))
"""
_CLOCK_AHEAD = "import time; now = time.time; time.time = lambda: now() + 90"
_CUT_OFF = """
import socket
def refuse(*args):
  raise TimeoutError("timed out")
socket.create_connection = refuse
"""


def _doctors(tmp_path, *hosts, timeout="60"):
  """The exit code and the findings on each host."""
  address = f"127.0.0.1:{addresses.free_ports()[0]}"
  made = []
  for rank, (prelude, secret, *flags) in enumerate(hosts):
    file = tmp_path / f"secret-{rank}"
    file.write_text(secret)
    made.append(
      subprocess.Popen(
        [
          *(sys.executable, "-c", prelude + _PROGRAM, "doctor"),
          *("--nnodes", "2", "--node_rank", str(rank)),
          *("--rdzv-endpoint", address, "--secret-file", str(file)),
          *("--host-timeout", timeout, *flags),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
      )
    )
  try:
    texts = [one.communicate(timeout=300)[0] for one in made]
  finally:
    for one in made:
      one.kill()
  return [one.returncode for one in made], texts


def test_doctor_approves_matching_hosts(tmp_path):
  codes, texts = _doctors(tmp_path, ("", _SECRET), ("", _SECRET))
  assert codes == [0, 0], texts
  for other, text in zip((1, 0), texts, strict=True):
    *findings, last = text.splitlines()
    assert last == "all is good"
    assert all(line.startswith("[ok] ") for line in findings)
    assert f"host {other}: its clock agrees" in text
    assert "is reached, has the same settings and versions" in text


@pytest.mark.parametrize(
  ("second", "words"),
  [
    (
      ("", _SECRET, "--replicas", "4"),
      "[FAILED] The hosts of the job have different settings: --replicas",
    ),
    ((_CLOCK_AHEAD, _SECRET), "set both by NTP"),
    ((_CUT_OFF, _SECRET), " can't be reached from here: timed out"),
  ],
)
def test_doctor_names_a_mismatch_with_its_remedy(tmp_path, second, words):
  codes, texts = _doctors(tmp_path, ("", _SECRET), second)
  assert 1 in codes, texts
  assert words in "".join(texts)
  assert "see the lines with FAILED" in "".join(texts)


def test_doctor_names_a_different_secret(tmp_path):
  other = ("", "another secret of enough bytes")
  codes, texts = _doctors(tmp_path, ("", _SECRET), other, timeout="8")
  assert codes == [1, 1], texts
  assert (
    "host 1 has not connected in 8 s: run the same command there" in texts[0]
  )
  assert "Host 0 does not answer at 127.0.0.1:" in texts[1]
  assert "the secret must be the same there" in texts[1]


@pytest.mark.parametrize(
  ("flags", "code", "words"),
  [
    (
      ("--address", "nowhere.invalid:29300"),
      1,
      "'nowhere.invalid' can't be res",
    ),
    (("--address", "192.0.2.7"), 2, "An address is host:port"),
  ],
)
def test_doctor_reports_local_problems_at_once(
  tmp_path, capsys, flags, code, words
):
  (tmp_path / "secret").write_text(_SECRET)
  hosts = ("--nodes", "2", "--node-rank", "1")
  secret = ("--secret-file", str(tmp_path / "secret"))
  assert main.main(["doctor", *hosts, *secret, *flags]) == code
  assert words in "".join(capsys.readouterr())
  assert logging.getLogger("optax_dist").level == logging.NOTSET


def test_doctor_has_nothing_to_check_on_a_single_host(capsys):
  assert main.main(["doctor", "--replicas", "2"]) == 2
  assert "there is one host only" in capsys.readouterr().err
