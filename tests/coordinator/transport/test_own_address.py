"""Family and loopback are what names resolve to, for all that listen."""

import socket

import jax.numpy as jnp
import optax
import pytest

from optax_dist import coordinator
from optax_dist.coordinator.transport import addresses

_MINE = socket.gethostname()


class _Network:
  """Fakes name resolution, and the addresses from which this host reaches others."""

  def __init__(self, names, sources):
    self._names, self._sources = names, sources

  def look_up(self, host, port, *_, **__):
    if host not in self._names:
      raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    result = []
    for text in self._names[host]:
      ip, _, scope = text.partition("%")
      kind = socket.AF_INET6 if ":" in ip else socket.AF_INET
      place = (ip, port, 0, int(scope or 0))[: 4 if ":" in ip else 2]
      result.append((kind, socket.SOCK_STREAM, 6, "", place))
    return result

  def source(self, family, target):
    result = self._sources.get(family)
    return target if addresses.is_loopback(target) else result


@pytest.fixture
def network(monkeypatch):
  def make(names, v4=None, v6=None):
    made = _Network(names, {socket.AF_INET: v4, socket.AF_INET6: v6})
    monkeypatch.setattr(socket, "getaddrinfo", made.look_up)
    monkeypatch.setattr(addresses, "_source", made.source)
    monkeypatch.setattr(socket, "if_indextoname", lambda number: f"eth{number}")

  return make


def _own(host, bind=None):
  """Where a process listens, and what it advertises."""
  result = addresses.own(bind, host)
  if result is None:
    return None
  return result.text, addresses.advertised(result.text, host)


@pytest.mark.parametrize(
  ("resolved", "v4", "v6", "own"),
  [
    # A host with one family; the name may have both.
    (["fd00::1"], None, "fd00::2", ("::", "fd00::2")),
    (["10.0.0.1"], "10.0.0.2", None, ("0.0.0.0", "10.0.0.2")),
    (["fd00::1", "10.0.0.1"], None, "fd00::2", ("::", "fd00::2")),
    (["fd00::1", "10.0.0.1"], "10.0.0.2", None, ("0.0.0.0", "10.0.0.2")),
    # With both, the system's order.
    (["fd00::1", "10.0.0.1"], "10.0.0.2", "fd00::2", ("::", "fd00::2")),
    (["10.0.0.1", "fd00::1"], "10.0.0.2", "fd00::2", ("0.0.0.0", "10.0.0.2")),
    # Two families on this host, one of the store.
    (["fd00::1"], "10.0.0.2", "fd00::2", ("::", "fd00::2")),
    (["10.0.0.1"], "10.0.0.2", "fd00::2", ("0.0.0.0", "10.0.0.2")),
    # The store is on this host, whose name means loopback to itself alone.
    (["127.0.1.1"], "10.0.0.2", None, ("0.0.0.0", "10.0.0.2")),
    (["127.0.1.1"], None, "fd00::2", ("::", "fd00::2")),
    (["::1", "127.0.1.1"], None, "fd00::2", ("::", "fd00::2")),
    # Only this host is served.
    (["::1"], "10.0.0.2", "fd00::2", None),
    (["127.0.0.1", "::1"], "10.0.0.2", None, None),
    # Others of their kind.
    (["::ffff:10.0.0.1"], "10.0.0.2", "fd00::2", ("0.0.0.0", "10.0.0.2")),
    (["::ffff:127.0.0.1"], "10.0.0.2", "fd00::2", None),
    (["fe80::1%3"], None, "fe80::2%eth3", ("::", "fe80::2%eth3")),
  ],
)
def test_resolved_addresses_decide_where_to_listen(
  network, resolved, v4, v6, own
):
  network({"store": resolved}, v4, v6)
  assert _own("store") == own


def test_name_of_this_host_is_not_advertised_as_loopback(network):
  """To others it is another address."""
  for name in (_MINE, _MINE.upper()):
    network({name: ["127.0.0.1"]}, "10.0.0.2")
    assert _own(name) == ("0.0.0.0", "10.0.0.2")


def test_a_link_local_address_keeps_its_interface(network):
  network({"store": ["fe80::1%3"]})
  [ip] = addresses.resolve("store")
  assert ip.text == "fe80::1%eth3"
  [way] = addresses.parse(f"[{ip.text}]:29300")
  assert addresses.resolve(way.host) == [ip]


def test_listener_is_not_advertised_in_the_other_address_family(network):
  network({"store": ["fd00::1"]}, None, "fd00::2")
  with pytest.raises(ValueError, match="no address that others could reach"):
    _own("store", bind="0.0.0.0")


@pytest.mark.parametrize("secret", [None, "a secret of enough bytes"])
def test_join_reports_an_unknown_host_name(network, monkeypatch, secret):
  network({"127.0.0.1": ["127.0.0.1"]}, "10.0.0.2")
  monkeypatch.setattr(addresses, "_UNKNOWN_SECONDS", 0.0)
  with pytest.raises(ValueError, match=r"the name 'nowhere' can't be resolved"):
    coordinator.join(
      optax.sgd(0.1),
      jnp.zeros(3),
      coordinator_address="nowhere:29300",
      replica=1,
      total_num_replicas=2,
      secret=secret,
    )
