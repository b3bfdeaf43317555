"""Tests that orders and reports survive encoding and decoding."""

import pytest

from optax_dist.coordinator.extras.groups import commands
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.entries import Member, Part, RoundId

ROUND = RoundId(1, 2, 3)
PEERS = (Member(0, 0, "a.1", "at a.1"), Member(1, 1, "b.1", "at b.1"))
PARTS = (Part(0, 0, 5, 2, 0, 1, 1.0), Part(1, 1, 6, 2, 0, 1, 1.0))


@pytest.mark.parametrize(
  "said",
  [
    msg.SubmitGradient(3, 1, 7, 1, 1, True, b"", "[4]", 0.5),
    msg.Done(ROUND),
    msg.Failed(ROUND, None, "why"),
    fx.Aggregate(ROUND, PARTS, PEERS, (), 1),
    fx.Apply(ROUND),
    fx.Resolved(3, "", 8, (0, "b"), 1),
    fx.Fail("Diverged", "why"),
    commands.Advance(4, 17, True),
    commands.EndGroup("why"),
  ],
  ids=lambda said: type(said).__name__,
)
def test_what_is_said_is_what_is_heard(said):
  assert commands.WIRE.decode(commands.WIRE.encode(said)) == said


def test_an_address_of_a_replica_has_one_for_each_process():
  address = commands.join_addresses([("a", "at a"), ("a.1", "at a.1")])
  assert commands.address_of("a", address, 0) == ("a", "at a")
  assert commands.address_of("a", address, 1) == ("a.1", "at a.1")


@pytest.mark.parametrize("address", ["at a", "[]", "{}", "[1]", "7"])
def test_an_address_that_is_none_leads_nowhere(address):
  assert commands.address_of("a", address, 1) == ("a", address)
