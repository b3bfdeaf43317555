import os
import socket

import pytest

from optax_dist.coordinator import addresses


@pytest.mark.parametrize(
  ("text", "host", "port"),
  [
    ("127.0.0.1:1", "127.0.0.1", 1),
    ("[::1]:65535", "::1", 65535),
    ("h:0", "h", 0),
  ],
)
def test_addresses(text, host, port):
  assert addresses.split(text) == (host, port)


@pytest.mark.parametrize(
  "text", ["", ":1", "h", "h:", "h:x", "h:-1", "h:65536"]
)
def test_addresses_that_are_none(text):
  with pytest.raises(ValueError, match="host:port"):
    addresses.split(text)


def test_a_web_proxy_is_bypassed_for_the_job_alone(monkeypatch):
  own = "no_grpc_proxy"
  monkeypatch.setenv(own, "")  # So that it is restored.
  monkeypatch.delenv(own)
  monkeypatch.setenv("no_proxy", "example.org")
  addresses.bypass_proxy("127.0.0.1")
  addresses.bypass_proxy("10.0.0.1")
  addresses.bypass_proxy("10.0.0.1")
  assert os.environ.get(own) == "example.org,127.0.0.1,10.0.0.1"


def test_the_advertised_address_is_one_that_peers_can_reach(monkeypatch):
  names = {"here": "127.0.1.1", "localhost": "127.0.0.1", "wire": "10.0.0.7"}
  monkeypatch.setattr(
    socket, "gethostbyname", lambda name: names.get(name, name)
  )
  monkeypatch.setattr(addresses, "_towards", lambda service: "10.0.0.9")
  found = {
    bind: addresses.advertised(bind, "10.0.0.1:29400")
    for bind in (
      "127.0.0.1",
      "localhost",
      "wire",
      "10.0.0.8",
      "0.0.0.0",
      "here",
    )
  }
  assert found == {
    "127.0.0.1": "127.0.0.1",
    "localhost": "127.0.0.1",
    "wire": "10.0.0.7",
    "10.0.0.8": "10.0.0.8",
    "0.0.0.0": "10.0.0.9",
    "here": "10.0.0.9",
  }


def test_a_host_is_seen_from_another_by_the_address_towards_it():
  assert addresses.advertised("0.0.0.0", "127.0.0.1:9") == "127.0.0.1"
