"""Tests of what replicas send of their distance from a center."""

import types

import jax.numpy as jnp
import maps
import numpy as np
import pytest

from optax_dist._internal.gaps import Gaps
from optax_dist._internal.replica_params import Replica, Replicas

N = 4


def _replica():
  of = Replicas.of("test", maps.AXIS, N, ())
  return Replica(of, N, types.SimpleNamespace(), False, frozenset())


@maps.every_map
@pytest.mark.parametrize("reject", [True, False])
def test_the_mean_is_of_the_replicas_that_are_finite(map_name, reject):
  rng = np.random.default_rng(0)
  # Two that share a buffer, one that is too large for it, and one of another dtype.
  shapes = [(3, 2), (150, 150), (4,)]
  xs = [np.float32(rng.normal(size=(N, *shape))) for shape in shapes]
  xs.append(np.float16(rng.normal(size=(N, 5))))
  other = np.float32(rng.normal(size=(N, 2)))
  if reject:
    xs[0][1, 0, 0] = np.nan
  others = [other]

  def step(xs, others):
    center = [jnp.ones(x.shape, x.dtype) for x in xs]
    gaps = Gaps.of(_replica(), center, reject, others)
    mean, finite = gaps.mean(gaps.pack(xs, center, others))
    return *gaps.unpack(mean, others), finite

  means, other_means, finite = maps.run(map_name, step, xs, others, size=N)
  kept = [0, 2, 3] if reject else [0, 1, 2, 3]
  for x, mean in zip(xs, means, strict=True):
    assert mean.dtype == x.dtype
    expected = (1 - x[kept].astype(np.float32)).mean(0)
    atol = 1e-3 if x.dtype == np.float16 else 1e-6
    np.testing.assert_allclose(mean, np.stack([expected] * N), atol=atol)
  np.testing.assert_allclose(
    other_means[0], np.stack([other[kept].mean(0)] * N), atol=1e-6
  )
  assert finite.tolist() == [i in kept for i in range(N)]


@maps.every_map
def test_where_no_replica_is_finite_the_mean_is_zero(map_name):
  xs = [np.full((N, 3), np.inf, np.float32), np.ones((N, 2), np.float32)]

  def step(xs):
    center = [jnp.zeros(x.shape, x.dtype) for x in xs]
    gaps = Gaps.of(_replica(), center, True)
    mean, finite = gaps.mean(gaps.pack(xs, center))
    return gaps.unpack(mean)[0], finite

  means, finite = maps.run(map_name, step, xs, size=N)
  assert not finite.any()
  assert not any(mean.any() for mean in means)


@maps.every_map
def test_where_no_replica_is_finite_the_others_stay_its_own(map_name):
  xs = [np.full((N, 3), np.nan, np.float32)]
  own = np.arange(2.0 * N, dtype=np.float32).reshape(N, 2)
  own[0], own[1, 0] = [np.inf, 5.0], np.nan
  # One that shares a buffer with the gaps, and one of another dtype.
  others = [own, own.astype(jnp.bfloat16)]

  def step(xs, others):
    center = [jnp.zeros(x.shape, x.dtype) for x in xs]
    gaps = Gaps.of(_replica(), center, True, others)
    mean, _ = gaps.mean(gaps.pack(xs, center, others))
    return gaps.unpack(mean, others)[1]

  expected = np.where(np.isfinite(own), own, 0)
  for x in maps.run(map_name, step, xs, others, size=N):
    np.testing.assert_array_equal(x.astype(np.float32), expected)
