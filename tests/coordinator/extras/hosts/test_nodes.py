"""Which host this is."""

import pytest

from optax_dist.coordinator.extras.hosts import nodes

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
  # A single process of srun is a separate host.
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
  assert nodes.Node(0, 2, "[2001:db8::1]:7").listens_at() == ("::", 7)
