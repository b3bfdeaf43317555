"""Which host this is."""

import pytest

from optax_dist.coordinator.launch import nodes

_SLURM = {
  "SLURM_JOB_ID": "4111",
  "SLURM_STEP_NODELIST": "node[03-05]",
  "SLURM_NTASKS": "3",
  "SLURM_PROCID": "2",
  "SLURM_LOCALID": "0",
  "SLURM_STEP_NUM_NODES": "3",
}


def test_replicas_are_shared_out():
  for hosts in range(1, 6):
    parts = [nodes.Node(r, hosts).replicas(7) for r in range(hosts)]
    assert [i for part in parts for i in part] == list(range(7))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
  with pytest.raises(ValueError, match="2 hosts, and 1 replicas"):
    nodes.Node(0, 2).replicas(1)


def test_arguments_come_before_variables():
  told = {
    nodes.RANK: "1",
    nodes.NODES: "2",
    nodes.ADDRESS: "host0:29300",
  }
  assert nodes.find(environ=told) == nodes.Node(1, 2, "host0:29300")
  assert nodes.find(0, 3, "h:1", told) == nodes.Node(0, 3, "h:1")
  assert nodes.find(environ={}) == nodes.Node()
  assert nodes.find(count=1, environ={}) == nodes.Node()
  assert nodes.find(0, 1, "h:1", {}) == nodes.Node(0, 1, "h:1")


def test_a_scheduler_tells_all(monkeypatch):
  for name, value in _SLURM.items():
    monkeypatch.setenv(name, value)
  found = nodes.find()
  assert (found.rank, found.count) == (2, 3)
  assert found.address.startswith("node03:")
  # A single process of srun is a host of its own.
  monkeypatch.setenv("SLURM_NTASKS", "1")
  monkeypatch.setenv("SLURM_PROCID", "0")
  assert nodes.find() == nodes.Node()


@pytest.mark.parametrize(
  ("given", "words"),
  [
    ((1, 2, None), "--address is missing"),
    ((None, 2, "h:1"), "--node-rank is missing"),
    ((1, None, "h:1"), "--nodes is missing"),
    ((2, 2, "h:1"), "from 0 to 1"),
    ((0, 2, "host"), "host:port"),
  ],
)
def test_what_is_missing_or_wrong_is_named(given, words):
  with pytest.raises(ValueError, match=words):
    nodes.find(*given, {})
  with pytest.raises(ValueError, match=r"OPTAX_DIST_NODES.*'two'"):
    nodes.find(environ={nodes.NODES: "two"})


def test_the_store_listens_where_it_can():
  assert nodes.Node().listens_at() == ("127.0.0.1", 0)
  assert nodes.Node(0, 2, "127.0.0.1:7").listens_at() == ("127.0.0.1", 7)
  assert nodes.Node(0, 2, "[::1]:7").listens_at()[1] == 7
  # An address of none of its interfaces is mapped to one of them.
  assert nodes.Node(0, 2, "192.0.2.1:7").listens_at() == ("0.0.0.0", 7)
