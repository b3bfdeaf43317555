"""Where a coordinator is found, as people write it."""

import subprocess
import sys

import pytest

from optax_dist.coordinator.extras.etcd import keys
from optax_dist.coordinator.extras.etcd.keys import Etcd
from optax_dist.coordinator.server import places


def test_kinds_of_addresses_are_distinguished():
  assert places.in_etcd("host:29300") is None
  assert places.in_etcd("[::1]:29300") is None
  assert places.in_etcd("etcd://a,b:23790,[::1]") == Etcd(
    ("a:2379", "b:23790", "[::1]:2379")
  )


def test_etcd_url_has_login_and_certificates():
  result = keys.parse(
    "etcds://me:p%40ss@a,b?ca=/ca.pem&cert=me.pem&key=me.key&prefix=team/1&lease=9"
  )
  assert result == Etcd(
    *(("a:2379", "b:2379"), "me", "p@ss", True, "/ca.pem", "me.pem", "me.key"),
    *("team/1", 9.0),
  )
  assert "p@ss" not in f"{result} {result!r}"


@pytest.mark.parametrize(
  ("url", "why"),
  [
    ("redis://a:1", "host:port, or found by etcd://"),
    ("tcp://host:29300", "host:port, or found by etcd://"),
    ("etcd://", "'' is no host and port"),
    ("etcd://a,,b", "'' is no host and port"),
    ("etcd://a,b/deep", "'b/deep' is no host and port"),
    ("etcd://a:0", "'a:0' is no host and port"),
    ("etcd://a,a:2379", "a server twice"),
    ("etcd://a?colour=red", "no option 'colour'"),
    ("etcd://a?ca=ca.pem", "certificates are for etcds://"),
    ("etcds://a?cert=me.pem", "cert and key belong together"),
    ("etcd://a?prefix=a//b", "'a//b' is no path"),
    ("etcd://a?lease=1", "lease is seconds, at least 2"),
    ("etcd://a?lease=soon", "lease is seconds, at least 2"),
    ("etcd://me:hidden@a?x=1", "no option"),
    ("etcd://me:hidden?word@a", "? is written %3F in a password"),
    ("etcd://me:2379?hidden@a", "? is written %3F in a password"),
    ("etcd://a?password=hidden", "no option 'password'"),
    ("etcd://a..b", "'a..b' is no host and port"),
  ],
)
def test_invalid_urls_are_refused_without_their_password(url, why):
  with pytest.raises(ValueError, match=r"etcd://host:2379") as error:
    places.in_etcd(url)
  assert why in str(error.value)
  assert "hidden" not in str(error.value)


def test_etcd_is_loaded_when_it_is_named():
  """The core does not know it."""
  code = """
import sys
from optax_dist.coordinator.server import places
places.in_etcd("host:1")
assert not [m for m in sys.modules if "extras" in m]
places.in_etcd("etcds://a")
assert "optax_dist.coordinator.extras.etcd" in sys.modules
assert "jax" not in sys.modules
"""
  subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_password_on_a_command_line_is_refused():
  ended = subprocess.run(
    [
      *(sys.executable, "-m", "optax_dist", "coordinator"),
      *("--store", "etcd://me:hidden@127.0.0.1:1"),
    ],
    capture_output=True,
    text=True,
    timeout=100,
  )
  assert ended.returncode == 2
  assert "OPTAX_DIST_STORE" in ended.stderr
  assert "hidden" not in ended.stderr
