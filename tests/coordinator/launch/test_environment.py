"""The variables are read as they were written, and wrong ones are named."""

import pytest

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
def test_what_is_written_is_read(told):
  assert type(told).read(told.variables()) == told


def test_it_is_read_from_this_process_by_default(monkeypatch):
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


def test_secrets_are_not_shown():
  assert "sixteen" not in repr(_FULL)
  assert "etcd" not in repr(_FULL)
