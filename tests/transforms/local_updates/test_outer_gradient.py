"""Tests of the mean change of replicas since their common start."""

import types

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pairwise

from optax_dist._internal.replica_params import Leaves
from optax_dist._internal.replicas import Replica, Replicas
from optax_dist.transforms._outer_gradient import mean_over_replicas

N = 4


def _average(center, points, reject=True):
  of = Replicas.of("test", maps.AXIS, N, ())
  me = Replica(of, N, types.SimpleNamespace(), False, frozenset())
  leaves = Leaves(jax.tree.structure(center), [*range(len(center))])
  gaps = [c - x for x, c in zip(points, center, strict=True)]
  gaps, finite = me.finite_or_zero(gaps, reject)
  mean = mean_over_replicas("it", None)
  means, _ = mean.of(me, leaves, center, gaps, finite, mean.init(center))
  return means, finite


@pairwise.every_value(map_name=maps.NAMES, reject=[True, False])
def test_the_mean_is_of_the_replicas_that_are_finite(map_name, reject):
  rng = np.random.default_rng(0)
  # Two that share a message, one that is too large for it, and one of another dtype.
  shapes = [(3, 2), (150, 150), (4,)]
  xs = [np.float32(rng.normal(size=(N, *shape))) for shape in shapes]
  xs.append(np.float16(rng.normal(size=(N, 5))))
  if reject:
    xs[0][1, 0, 0] = np.nan

  def step(xs):
    center = [jnp.ones(x.shape, x.dtype) for x in xs]
    return _average(center, xs, reject)

  means, finite = maps.run(map_name, step, xs, size=N)
  kept = [0, 2, 3] if reject else [0, 1, 2, 3]
  for x, mean in zip(xs, means, strict=True):
    assert mean.dtype == x.dtype
    expected = (1 - x[kept].astype(np.float32)).mean(0)
    atol = 1e-3 if x.dtype == np.float16 else 1e-6
    np.testing.assert_allclose(mean, np.stack([expected] * N), atol=atol)
  assert finite.tolist() == [i in kept for i in range(N)]


@maps.both_kinds
def test_where_no_replica_is_finite_the_mean_is_zero(map_name):
  xs = [np.full((N, 3), np.inf, np.float32), np.ones((N, 2), np.float32)]

  def step(xs):
    center = [jnp.zeros(x.shape, x.dtype) for x in xs]
    return _average(center, xs)

  means, finite = maps.run(map_name, step, xs, size=N)
  assert not finite.any()
  assert not any(mean.any() for mean in means)
