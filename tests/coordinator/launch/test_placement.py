"""Which host this is."""

import pytest

from optax_dist.coordinator.launch import placement
from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.launch.placement import Placement
from optax_dist.coordinator.server.process import Settings


def test_replicas_are_shared_out():
  for hosts in range(1, 6):
    shares = [Placement(7, rank=r, hosts=hosts).here for r in range(hosts)]
    assert [r for share in shares for r in share] == list(range(7))
    sizes = list(map(len, shares))
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
  ("count", "replicas", "processes"),
  [(4, 2, 2), (4, 2, 3), (6, 2, 5), (3, 1, 3), (2, 2, 2)],
)
def test_processes_of_a_replica_are_shared_out_over_its_hosts(
  count, replicas, processes
):
  result = {}
  for rank in range(count):
    share = Placement(replicas, processes, rank, count)
    assert share.processes_here
    [replica] = share.here
    result.setdefault(replica, []).extend(share.processes_here)
  assert result == {r: list(range(processes)) for r in range(replicas)}


@pytest.mark.parametrize(
  ("count", "given", "words"),
  [
    (2, (1,), "on 2 hosts.*at least 2 processes, got 1"),
    (4, (3,), "4 hosts can't be shared out among 3 replicas: with fewer"),
    (5, (2, 5), "the same number of hosts for each"),
  ],
)
def test_indivisible_placement_is_refused(count, given, words):
  with pytest.raises(ValueError, match=words):
    Placement(*given, hosts=count)


def test_placement_follows_the_environment():
  find = lambda **host: placement.find(Environment(**host))
  two = find(node_rank=1, nodes=2, address="host0:29300")
  assert two == Placement(2, rank=1, hosts=2, address="host0:29300")
  assert find() == find(nodes=1) == Placement(1)
  one = find(node_rank=0, nodes=1, address="h:1")
  assert one == Placement(1, address="h:1")


@pytest.mark.parametrize(
  ("given", "words"),
  [
    ((1, 2, None), r"Nothing says what address \(OPTAX_DIST_ADDRESS\) of"),
    ((None, 2, "h:1"), r"what node_rank \(OPTAX_DIST_NODE_RANK\) of"),
    ((1, None, "h:1"), r"what nodes \(OPTAX_DIST_NODES\) of"),
    ((2, 2, "h:1"), "from 0 to 1"),
    ((0, 2, "host"), "host:port"),
  ],
)
def test_missing_or_wrong_variables_are_named(given, words):
  names = ("node_rank", "nodes", "address")
  with pytest.raises(ValueError, match=words):
    placement.find(Environment(**dict(zip(names, given, strict=True))))


def test_coordinator_listens_on_an_address_of_its_host(caplog):
  at = lambda address: Settings.at(address).bind
  assert at("127.0.0.1:7") == "127.0.0.1"
  assert not caplog.messages
  # An address of none of its interfaces is mapped to one of them, or it is wrong.
  assert at("192.0.2.1:7") == "0.0.0.0"
  assert "192.0.2.1 is no address of this host" in caplog.text
  assert at("[2001:db8::1]:7") == "::"
  result = Settings.at("[::1]:7")
  assert (result.port, result.advertise) == (7, "::1")
