"""The variables are read as they were written, and wrong ones are named."""

import dataclasses
import os
import pathlib

import pytest

from optax_dist.cli import main
from optax_dist.coordinator.launch import environment
from optax_dist.coordinator.launch.environment import (
  Environment,
  ProcessEnvironment,
)

_FULL = Environment(
  coordinator_address="10.0.0.1:29300",
  store="etcd://a:2379",
  secret="sixteen bytes or more",
  secret_file="/run/secrets/job",
  certificates="me.pem:me.key:ca.pem",
  run="a run",
  num_replicas=4,
  replicas_to_aggregate=3,
  min_replicas=2,
  local_addr="10.0.0.2",
  output="/out",
  journal="/out/journal.jsonl",
  grace=2.5,
  step_timeout=60.0,
  faults='{"kill": 0.1}',
)
_PROCESS = ProcessEnvironment(
  replica=3,
  restarts=1,
  standby=1,
  num_processes=2,
  process_index=1,
  channel=7,
)


@pytest.mark.parametrize(
  "told", [_FULL, _PROCESS, Environment(), Environment(grace=0.0)]
)
def test_written_variables_are_read_back(told):
  assert type(told).read(told.variables()) == told


def test_each_variable_is_in_the_table_of_the_page():
  page = pathlib.Path(__file__).parents[3] / "docs" / "coordinator_cli.md"
  text = page.read_text("utf-8").split("finds in its environment\n")[1]
  table = text.split("| variable | meaning |")[1].split("\n\n")[0]
  names = [
    environment.variable(field.name)
    for kind in (Environment, ProcessEnvironment)
    for field in dataclasses.fields(kind)
  ]
  assert [name for name in names if f"`{name}`" not in table] == []


def test_environment_is_read_from_this_process_by_default(monkeypatch):
  monkeypatch.setenv("OPTAX_DIST_REPLICA", "5")
  monkeypatch.setenv("OPTAX_DIST_NODES", "2")
  monkeypatch.setenv("OPTAX_DIST_NUM_REPLICAS", "")  # As if it were not set.
  assert ProcessEnvironment.read() == ProcessEnvironment(replica=5)
  assert Environment.read() == Environment(nodes=2)


@pytest.mark.parametrize(
  ("variables", "words"),
  [
    ({"REPLICA": "-1"}, "OPTAX_DIST_REPLICA is '-1': Expected `int` >= 0"),
    ({"GRACE": "inf"}, "OPTAX_DIST_GRACE is 'inf': Expected `float`"),
    ({"GRACE": "soon"}, "OPTAX_DIST_GRACE is 'soon': Expected `float"),
    ({"NUM_REPLICAS": "0"}, "NUM_REPLICAS is '0': Expected `int` >= 1"),
    (
      {"NUM_PROCESSES": "2", "PROCESS_INDEX": "2"},
      "PROCESS_INDEX must be from 0 to 1",
    ),
    ({"NUM_PROCESSES": "2"}, "OPTAX_DIST_PROCESS_INDEX must be set"),
  ],
)
def test_wrong_variables_are_named(variables, words):
  named = {f"OPTAX_DIST_{name}": text for name, text in variables.items()}
  with pytest.raises(ValueError, match=words):
    Environment.read(named), ProcessEnvironment.read(named)


def test_a_secret_is_the_same_from_a_file_and_from_a_variable(tmp_path):
  """Kubernetes gives the end of a line to both, and a shell to neither."""
  (tmp_path / "secret").write_text("sixteen bytes or more\n")
  for variable, text in (
    ("SECRET", "sixteen bytes or more"),
    ("SECRET", "sixteen bytes or more\n"),
    ("SECRET_FILE", str(tmp_path / "secret")),
  ):
    told = Environment.read({f"OPTAX_DIST_{variable}": text})
    assert told.find_secret() == "sixteen bytes or more"


@pytest.mark.parametrize("command", ["coordinator", "launch"])
@pytest.mark.parametrize("secret", [b"\xff" * 16, b"\n"])
def test_undecodable_secret_is_named(
  command, secret, tmp_path, monkeypatch, capsys
):
  monkeypatch.setenv("OPTAX_DIST_SECRET", os.fsdecode(secret))
  flags = ("--address", "127.0.0.1:29300", "--output", str(tmp_path / "out"))
  more = (
    ("--nodes", "1", "--node-rank", "0", "--", "true")
    if command == "launch"
    else ()
  )
  (tmp_path / "secret").write_bytes(secret)
  given = ("--secret-file", str(tmp_path / "secret"))
  for where, args in (("OPTAX_DIST_SECRET", ()), (tmp_path / "secret", given)):
    assert main.main([command, *flags, *args, *more]) == 2
    said = capsys.readouterr().err
    assert f"The secret in {where} is empty, or no text" in said


def test_secrets_are_not_shown():
  assert "sixteen" not in repr(_FULL)
  assert "etcd" not in repr(_FULL)
