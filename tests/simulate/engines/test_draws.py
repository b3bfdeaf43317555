"""Streams of latencies: a replica's values do not depend on the others."""

import numpy as np

from optax_dist import simulate
from optax_dist.simulate.engines import draws

_LATENCY = simulate.parse_latency("slow-hosts:0.5,3,exponential:1")


def _make(**options):
  return draws.Draws(_LATENCY, 4, seed=3, **options)


def test_the_order_of_drawing_does_not_matter():
  everyone = np.arange(4)
  whole = _make().rows(everyone)
  turns, single = _make(), _make()
  together = np.stack([turns.take(everyone) for _ in range(300)], axis=1)
  np.testing.assert_array_equal(together[:, : whole.shape[1]], whole)
  for i in (2, 0, 3, 1):
    alone = [single.take(np.array([i]))[0] for _ in range(300)]
    np.testing.assert_array_equal(alone, together[i])
  assert len(np.unique(together)) == together.size


def test_the_seed_decides():
  same, other = (
    draws.Draws(_LATENCY, 4, seed=seed).take(np.arange(4)) for seed in (3, 4)
  )
  np.testing.assert_array_equal(same, _make().take(np.arange(4)))
  assert (same != other).all()


def test_local_steps_are_summed():
  draw = draws.Draws(
    simulate.parse_latency("gamma:2,1"), 1, seed=0, local_steps=50
  )
  values = draw.rows(np.array([0]))
  np.testing.assert_allclose(values.mean(), 100, rtol=0.02)
  np.testing.assert_allclose(values.std(), 10, rtol=0.2)
