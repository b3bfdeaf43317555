"""Certificates on the command line: `launch`, `doctor` and `coordinator`."""

import os
import re
import ssl

import commands
import issued
import pytest
import waiting

from optax_dist.cli import main
from optax_dist.coordinator.transport import addresses

_VARIABLE = "OPTAX_DIST_CERTIFICATES"
# The replica says whose certificate its coordinator shows.
_TRAIN = """
import os, ssl, jax.numpy as jnp, optax
from optax_dist import coordinator
with coordinator.join(optax.sgd(0.5), jnp.zeros(2)) as replica:
  host, port = os.environ["OPTAX_DIST_COORDINATOR_ADDRESS"].split(":")
  shown = ssl.get_server_certificate((host, int(port)))
  own = os.environ["OPTAX_DIST_CERTIFICATES"].split(":")[0]
  with open(own) as file:
    print("encrypted", shown == file.read(), flush=True)
  while replica.global_step < 3:
    replica.step(jnp.ones(2))
  replica.finish()
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
  return issued.Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def good(authority):
  return authority.issue()


@pytest.fixture
def start(tmp_path):
  with commands.starting(tmp_path) as begin:
    yield begin


def test_launch_passes_certificates_to_replicas_and_coordinator(
  start, good, tmp_path
):
  script = tmp_path / "train.py"
  script.write_text(_TRAIN)
  launched, text = start(
    *("launch", "--replicas", "2", "--certificates", *good.files(), script)
  )
  assert launched.wait(300.0) == 0, text()
  assert text().count("encrypted True") == 2


def test_coordinator_command_uses_certificates(start, good, tmp_path):
  for more, variables in (
    (("--certificates", *good.files()), {}),
    ((), {_VARIABLE: ":".join(good.files())}),
  ):
    (port,) = addresses.free_ports()
    made, text = start(
      *("coordinator", "--address", f"127.0.0.1:{port}"),
      *("--output", tmp_path / f"{port}", *more),
      **variables,
    )
    waiting.until(lambda made=made, text=text: "ready" in text() or made.poll())
    shown = ssl.get_server_certificate(("127.0.0.1", port))
    with open(good.certificate) as file:
      assert shown == file.read()


def test_a_launcher_of_another_authority_ends_at_once(start, good, tmp_path):
  (tmp_path / "train.py").write_text(_TRAIN)
  address = f"127.0.0.1:{addresses.free_ports()[0]}"
  _, said = start(
    *("coordinator", "--address", address, "--output", tmp_path / "out"),
    *("--certificates", *good.files()),
  )
  waiting.until(lambda: "ready" in said())
  other = issued.Authority(tmp_path / "other").issue()
  launched, text = start(
    *("launch", "--no-coordinator", "--address", address, "--replicas", "1"),
    *("--nodes", "1", "--node-rank", "0", "--certificates", *other.files()),
    "train.py",
  )
  assert launched.wait(120.0) == 1, text()
  assert text().count("[replica 0] Traceback") <= 1
  assert (
    "its certificate can't be used: it is not signed by this side's authority in"
    f" {other.authority}"
  ) in text()


def _encrypted(authority, good):
  key = authority.folder / "encrypted.key"
  authority.run(f"pkey -in {good.key} -aes256 -passout pass:phrase -out {key}")
  return (good.certificate, str(key), good.authority), "pass phrase"


def _expired(authority, good):
  return authority.issue("expired", days=-1).files(), "it has expired"


def _pipe(authority, good):
  path = authority.folder / "pipe"
  os.mkfifo(path)
  return (
    str(path),
    good.key,
    good.authority,
  ), f"{path} can't be read: It is no"


@pytest.mark.parametrize("make", [_encrypted, _expired, _pipe])
def test_launch_and_doctor_refuse_bad_certificates_at_once(
  make, authority, good, capsys, tmp_path
):
  files, words = make(authority, good)
  (tmp_path / "secret").write_text(commands.SECRET)
  (tmp_path / "train.py").write_text("raise SystemExit('it was started')")
  flags = ("--secret-file", str(tmp_path / "secret"), "--certificates", *files)
  assert main.main(["launch", *flags, str(tmp_path / "train.py")]) == 2
  assert re.search(
    f"launch: The (key|certificate) in .*{words}", capsys.readouterr().err
  )
  (port,) = addresses.free_ports()
  host = ("--nodes", "2", "--node-rank", "1", "--address", f"127.0.0.1:{port}")
  assert main.main(["doctor", *host, *flags]) == 1
  assert re.search(
    rf"\[FAILED\] The (key|certificate) in .*{words}", capsys.readouterr().out
  )


def test_coordinator_command_names_a_bad_certificate(
  start, authority, good, tmp_path
):
  files, words = _expired(authority, good)
  (port,) = addresses.free_ports()
  made, text = start(
    *("coordinator", "--address", f"127.0.0.1:{port}"),
    *("--output", tmp_path, "--certificates", *files),
  )
  assert made.wait(60.0) == 1
  assert words in text()


def test_doctor_names_differing_certificates(start, good, tmp_path):
  other = issued.Authority(tmp_path / "other").issue()
  (port,) = addresses.free_ports()
  host = ("doctor", "--nodes", "2", "--address", f"127.0.0.1:{port}")
  _, first = start(
    *(*host, "--node-rank", "0", "--certificates"), *good.files()
  )
  waiting.until(lambda: "to reach this one" in first())
  for more, words in (
    (("--certificates", *other.files()), "its certificate can't be used"),
    ((), "this side has certificates, and the other side none"),
    (("--certificates", *good.files()), "all is good"),
  ):
    second, text = start(*host, "--node-rank", "1", *more)
    second.wait(60.0)
    assert words in text()
