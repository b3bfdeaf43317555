"""Tests that orders and reports survive encoding and decoding."""

import pytest

from optax_dist.coordinator.extras.groups import commands


def test_an_address_of_a_replica_has_one_for_each_process():
  address = commands.join_addresses([("a", "at a"), ("a.1", "at a.1")])
  assert commands.address_of("a", address, 0) == ("a", "at a")
  assert commands.address_of("a", address, 1) == ("a.1", "at a.1")


@pytest.mark.parametrize("address", ["at a", "[]", "{}", "[1]", "7"])
def test_malformed_address_stays_as_it_is(address):
  assert commands.address_of("a", address, 1) == ("a", address)
