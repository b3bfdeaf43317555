"""Which host this is."""

import pytest

from optax_dist.coordinator.extras.hosts import nodes
from optax_dist.coordinator.launch.environment import Environment

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
    parts = [nodes.Node(r, hosts).places(7) for r in range(hosts)]
    assert [p.replica for part in parts for p in part] == list(range(7))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for host, part in enumerate(parts):
      assert {p.hosts for p in part} == {range(host, host + 1)}


@pytest.mark.parametrize(
  ("count", "replicas", "processes", "each"),
  [
    (4, 2, 2, None),
    (4, 2, 3, None),
    (2, 2, 2, 2),
    (6, 7, 5, 3),
    (3, 1, 3, None),
  ],
)
def test_processes_of_a_replica_are_shared_out_over_its_hosts(
  count, replicas, processes, each
):
  found = {}
  for rank in range(count):
    for place in nodes.Node(rank, count).places(replicas, processes, each):
      assert rank in place.hosts
      assert len(place.hosts) == (each or count // replicas)
      assert place.processes
      found.setdefault(place.replica, []).extend(place.processes)
  assert found == {r: list(range(processes)) for r in range(replicas)}


@pytest.mark.parametrize(
  ("count", "given", "words"),
  [
    (2, (1,), "on 2 hosts.*at least 2 processes, got 1"),
    (4, (3,), "4 hosts can't be shared out among 3 replicas, with 1 for each"),
    (4, (2, 2, 3), "with 3 for each"),
    (2, (1, 4, 4), "with 4 for each"),
    (4, (1, 4, 2), "with 2 for each"),
  ],
)
def test_what_can_not_be_shared_out_is_refused(count, given, words):
  with pytest.raises(ValueError, match=words):
    nodes.Node(0, count).places(*given)


def test_a_host_is_what_its_launcher_was_told():
  told = Environment(node_rank=1, nodes=2, address="host0:29300")
  assert nodes.find(told) == nodes.Node(1, 2, "host0:29300")
  assert nodes.find(Environment()) == nodes.Node()
  assert nodes.find(Environment(nodes=1)) == nodes.Node()
  one = Environment(node_rank=0, nodes=1, address="h:1")
  assert nodes.find(one) == nodes.Node(0, 1, "h:1")


def test_a_scheduler_tells_all(monkeypatch):
  for name, value in _SLURM.items():
    monkeypatch.setenv(name, value)
  found = nodes.find(Environment())
  assert (found.rank, found.count) == (2, 3)
  assert found.address.startswith("node03:")
  # A single process of srun is a separate host.
  monkeypatch.setenv("SLURM_NTASKS", "1")
  monkeypatch.setenv("SLURM_PROCID", "0")
  assert nodes.find(Environment()) == nodes.Node()


@pytest.mark.parametrize(
  ("given", "words"),
  [
    ((1, 2, None), r"--address \(OPTAX_DIST_ADDRESS\) is missing"),
    ((None, 2, "h:1"), r"--node-rank \(OPTAX_DIST_NODE_RANK\) is missing"),
    ((1, None, "h:1"), r"--nodes \(OPTAX_DIST_NODES\) is missing"),
    ((2, 2, "h:1"), "from 0 to 1"),
    ((0, 2, "host"), "host:port"),
  ],
)
def test_what_is_missing_or_wrong_is_named(given, words):
  names = ("node_rank", "nodes", "address")
  with pytest.raises(ValueError, match=words):
    nodes.find(Environment(**dict(zip(names, given, strict=True))))


def test_the_store_listens_where_it_can():
  assert nodes.Node(0, 2, "127.0.0.1:7").listens_at() == ("127.0.0.1", 7)
  assert nodes.Node(0, 2, "[::1]:7").listens_at()[1] == 7
  # An address of none of its interfaces is mapped to one of them.
  assert nodes.Node(0, 2, "192.0.2.1:7").listens_at() == ("0.0.0.0", 7)
  assert nodes.Node(0, 2, "[2001:db8::1]:7").listens_at() == ("::", 7)
