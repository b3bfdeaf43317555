"""Where a process listens, and what it tells others."""

import errno
import os
import pathlib
import socket

import jax.numpy as jnp
import optax
import pytest

from optax_dist import coordinator
from optax_dist.cli import main
from optax_dist.coordinator.transport import addresses


@pytest.mark.parametrize(
  "text",
  [
    "",
    "host",
    "host:",
    ":1",
    "host:0",
    "host:65536",
    "host:-1",
    "unix:",
    "a:1,",
    "::1",
    "fd00::3",
    " host:1",
    "host/path:1",
    "host\n:1",
    "host\0:1",
    "fd00::3:29400",
    "[fd00::3]",
    "unix:" + "x" * 200,
  ],
)
def test_invalid_addresses_are_refused(text):
  with pytest.raises(ValueError, match="An address is host:port"):
    addresses.parse(text)


@pytest.mark.parametrize("text", ["a:1,b:1", "unix:abc", "a:1,unix:abc"])
def test_coordinator_address_has_one_host_and_port(text, tmp_path, capsys):
  job = ("--nodes", "1", "--node-rank", "0", "--address", text)
  for command in (
    ("launch", *job, "--", "true"),
    ("doctor", *job),
    ("coordinator", "--address", text, "--output", str(tmp_path)),
  ):
    assert main.main([*command]) == 2
    assert "An address is host:port, such as" in capsys.readouterr().err
  with pytest.raises(ValueError, match=f"An address is host:port.*{text!r}"):
    coordinator.join(
      *(optax.sgd(0.1), jnp.zeros(2)),
      coordinator_address=text,
      total_num_replicas=1,
      replica=0,
    )


def test_error_about_an_etcd_url_hides_its_password():
  with pytest.raises(ValueError, match="got 'a:2379'") as error:
    addresses.parse("etcd:/me:hidden@a:2379")
  assert "hidden" not in str(error.value)


@pytest.mark.parametrize(
  "text", ["unix:abc,10.0.0.1:29400", "[fe80::1]:29400", "node-7:1"]
)
def test_addresses_can_be_written_and_read(text):
  assert ",".join(map(str, addresses.parse(text))) == text


@pytest.mark.parametrize(
  "text", ["", "x", "5-", "-5", "9-8", "65536", "1-70000"]
)
def test_invalid_ports_are_refused(text):
  with pytest.raises(ValueError, match="Ports are"):
    addresses.parse_ports(text)


def _names(monkeypatch, ip):
  """Lets the name of this host stand for this IP address."""
  real = socket.getaddrinfo

  def look(host, *args, **options):
    return real(ip if host == "this-host" else host, *args, **options)

  monkeypatch.setattr(socket, "getaddrinfo", look)


def test_a_host_name_at_loopback_listens_on_all_addresses(monkeypatch):
  _names(monkeypatch, "127.0.1.1")
  assert addresses.bound("this-host") == (socket.AF_INET, "0.0.0.0")
  assert addresses.bound("127.0.0.1") == (socket.AF_INET, "127.0.0.1")
  assert addresses.bound("::1") == (socket.AF_INET6, "::1")
  _names(monkeypatch, "192.0.2.7")
  assert addresses.bound("this-host") == (socket.AF_INET, "192.0.2.7")


def test_an_unknown_host_is_named():
  with pytest.raises(ValueError, match=r"no\.such\.host\.invalid"):
    addresses.bound("no.such.host.invalid")
  with pytest.raises(ValueError, match=r"bind='store\.\.svc' is no address"):
    addresses.bound("store..svc")


@pytest.mark.parametrize("host", ["fe80::1", "fe80::1%no-such"])
def test_a_link_local_address_needs_an_interface_of_this_host(host):
  """It is refused at once: no interface would come while others wait for it."""
  for where in (
    {"coordinator_address": f"[{host}]:29300"},
    {"coordinator_address": "127.0.0.1:29300", "bind": host},
  ):
    with pytest.raises(ValueError, match=r"needs the name of an interface.*lo"):
      coordinator.join(
        optax.sgd(0.1),
        jnp.zeros(3),
        replica=0,
        total_num_replicas=2,
        secret="of at least 16 bytes",
        start_coordinator=False,
        timeout=5.0,
        **where,
      )
  addresses.own(None, "fe80::1%lo")


def test_loopback_is_never_advertised_to_other_hosts(monkeypatch):
  assert addresses.advertised("10.1.2.3") == "10.1.2.3"
  monkeypatch.setattr(
    addresses,
    "_source",
    lambda family, target: {"store": "127.0.0.1"}.get(target, "10.9.8.7"),
  )
  assert addresses.advertised("0.0.0.0", "store") == "10.9.8.7"
  assert addresses.advertised("0.0.0.0", "elsewhere") == "10.9.8.7"
  monkeypatch.setattr(addresses, "_source", lambda family, target: "127.0.0.1")
  with pytest.raises(ValueError, match=r"advertise=, or launch --local-addr\."):
    addresses.advertised("0.0.0.0", "10.1.2.3")
  with pytest.raises(ValueError, match=r"'store\.\.svc' can't be resolved"):
    addresses.advertised("0.0.0.0", "store..svc")


def test_a_host_without_ipv6_advertises_no_ipv6_address(monkeypatch):
  def make(*_):
    raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

  monkeypatch.setattr(socket.socket, "__init__", make)
  assert addresses._source(socket.AF_INET6, "2001:db8::1") is None


def _handed_out():
  """Ports that the system takes for the near ends of connections."""
  path = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
  if not path.exists():
    return range(49152, 65536)
  first, last = map(int, path.read_text().split())
  return range(first, last + 1)


def test_a_reserved_port_is_outside_of_the_ephemeral_range():
  result = addresses.free_ports(50)
  assert len(set(result)) == 50
  assert not set(result) & set(_handed_out())
  with socket.create_server(("127.0.0.1", 0)) as server:
    taken = server.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(addresses, "_QUIET_PORTS", range(taken, taken + 1))
      with pytest.raises(OSError, match=f"Only 0 of 1 .* {taken} to"):
        addresses.free_ports()
