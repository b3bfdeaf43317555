"""`optax-dist launch` of replicas that end in all ways: its exit codes and lines."""

import os
import pathlib

import pytest

from optax_dist.cli import main

_PROGRAM = str(pathlib.Path(__file__).with_name("ending_program.py"))
_ONE = ("--replicas", "2", "--min-replicas", "1")
_NOBODY = "no replica has joined; does the script call coordinator.join?"


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch):
  for name in list(os.environ):
    if name.startswith("OPTAX_DIST_"):
      monkeypatch.delenv(name)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def _launch(capfd, tmp_path, flags, *ending):
  """Its exit code, its own lines, and those of the replicas."""
  code = main.main(["launch", *flags, _PROGRAM, str(tmp_path), *ending])
  out, err = capfd.readouterr()
  said = [line for line in err.splitlines() if line.startswith("[launch] ")]
  print(out, err)
  return code, said, out + err


@pytest.mark.parametrize("how", ["killed", "raises", "0"])
def test_one_that_dies_before_it_joins_is_lost_as_afterwards(
  capfd, tmp_path, how
):
  flags = (*_ONE, "--restarts", "0")
  code, said, text = _launch(capfd, tmp_path, flags, "1", "imports", how)
  assert code == 0
  words = {"killed": "was ended by SIGKILL", "raises": "ended with exit code 1"}
  default = "ended with exit code 0, and has not joined the run"
  assert said[0] == f"[launch] replica 1 {words.get(how, default)}"
  assert "[replica 0] members 0" in text
