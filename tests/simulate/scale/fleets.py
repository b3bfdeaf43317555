"""Fleets for the tests."""

from optax_dist import simulate
from optax_dist.simulate import scale


def fleet(chips=64, per_group=4, latency="constant:1", **fields):
  """A fleet whose groups fail once in a hundred seconds."""
  given = {"failure_rate": 0.0025, "repair": 10.0} | fields
  return scale.Fleet(chips, per_group, simulate.parse_latency(latency), **given)
