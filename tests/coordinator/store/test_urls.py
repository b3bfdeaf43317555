"""Where a store is, as people write it."""

import subprocess
import sys

import pytest

from optax_dist.coordinator.extras.etcd.client import Etcd
from optax_dist.coordinator.store import urls


def test_each_kind_of_url_is_parsed():
  assert urls.parse("tcp://host:29300") == urls.Tcp("host:29300")
  assert urls.parse("tcp://[::1]:29300/") == urls.Tcp("[::1]:29300")
  assert urls.parse("etcd://a,b:23790,[::1]") == Etcd(
    ("a:2379", "b:23790", "[::1]:2379")
  )


def test_login_and_certificates():
  place = urls.parse(
    "etcds://me:p%40ss@a,b?ca=/ca.pem&cert=me.pem&key=me.key&prefix=team"
  )
  assert place == Etcd(
    ("a:2379", "b:2379"),
    "me",
    "p@ss",
    True,
    "/ca.pem",
    "me.pem",
    "me.key",
    "team",
  )
  assert "p@ss" not in repr(place)


@pytest.mark.parametrize(
  ("url", "why"),
  [
    ("", "begins with none of these"),
    ("in-process", "begins with none of these"),
    ("host:29300", "begins with none of these"),
    ("redis://a:1", "begins with none of these"),
    ("tcp://host", "'host' is no host and port"),
    ("tcp://a:1,b:2", "one host and port"),
    ("tcp://a:1?tls=1", "one host and port"),
    ("tcp://:1", "is no host and port"),
    ("tcp://a:0", "is no host and port"),
    ("tcp://a:99999", "is no host and port"),
    ("tcp://unix:a", "is no host and port"),
    ("etcd://", "'' is no host and port"),
    ("etcd://a,,b", "'' is no host and port"),
    ("etcd://a,b/deep", "'b/deep' is no host and port"),
    ("etcd://a,a:2379", "a server twice"),
    ("etcd://a?colour=red", "no option 'colour'"),
    ("etcd://a?ca=ca.pem", "certificates are for etcds://"),
    ("etcds://a?cert=me.pem", "cert and key belong together"),
  ],
)
def test_invalid_urls_are_refused(url, why):
  with pytest.raises(ValueError, match=r"A store is tcp") as error:
    urls.parse(url)
  assert why in str(error.value)


def test_an_optional_store_is_loaded_when_it_is_named():
  """The core does not know it."""
  code = """
import sys
from optax_dist.coordinator.store import urls
assert not [m for m in sys.modules if "extras" in m]
urls.parse("etcds://a")
assert "optax_dist.coordinator.extras.etcd" in sys.modules
"""
  subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_no_password_is_shown():
  with pytest.raises(ValueError, match="no option") as error:
    urls.parse("etcd://me:hidden@a?x=1")
  assert "hidden" not in str(error.value)
