"""Tests of the mean change of replicas since their common start."""

import types

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pairwise

from optax_dist._internal.replica_params import Leaves
from optax_dist._internal.replicas import Replica, Replicas
from optax_dist.transforms.local_updates import outer_gradient

N = 4


def _average(center, points, others=(), reject=True):
  of = Replicas.of("test", maps.AXIS, N, ())
  me = Replica(of, N, types.SimpleNamespace(), False, frozenset())
  leaves = Leaves(jax.tree.structure(center), [*range(len(center))])
  gradient = outer_gradient("it", None, reject)
  method = gradient.init(center)
  return gradient.average(me, leaves, center, points, method, others)


@pairwise.every_value(map_name=maps.NAMES, reject=[True, False])
def test_the_mean_is_of_the_replicas_that_are_finite(map_name, reject):
  rng = np.random.default_rng(0)
  # Two that share a message, one that is too large for it, and one of another dtype.
  shapes = [(3, 2), (150, 150), (4,)]
  xs = [np.float32(rng.normal(size=(N, *shape))) for shape in shapes]
  xs.append(np.float16(rng.normal(size=(N, 5))))
  other = np.float32(rng.normal(size=(N, 2)))
  if reject:
    xs[0][1, 0, 0] = np.nan

  def step(xs, others):
    center = [jnp.ones(x.shape, x.dtype) for x in xs]
    change = _average(center, xs, others, reject)
    return change.mean, change.others, change.finite

  means, others, finite = maps.run(map_name, step, xs, [other], size=N)
  kept = [0, 2, 3] if reject else [0, 1, 2, 3]
  for x, mean in zip(xs, means, strict=True):
    assert mean.dtype == x.dtype
    expected = (1 - x[kept].astype(np.float32)).mean(0)
    atol = 1e-3 if x.dtype == np.float16 else 1e-6
    np.testing.assert_allclose(mean, np.stack([expected] * N), atol=atol)
  np.testing.assert_allclose(
    others[0], np.stack([other[kept].mean(0)] * N), atol=1e-6
  )
  assert finite.tolist() == [i in kept for i in range(N)]


@maps.both_kinds
def test_where_no_replica_is_finite_the_mean_is_zero(map_name):
  xs = [np.full((N, 3), np.inf, np.float32), np.ones((N, 2), np.float32)]

  def step(xs):
    center = [jnp.zeros(x.shape, x.dtype) for x in xs]
    change = _average(center, xs)
    return change.mean, change.finite

  means, finite = maps.run(map_name, step, xs, size=N)
  assert not finite.any()
  assert not any(mean.any() for mean in means)


@maps.both_kinds
def test_without_a_finite_replica_other_values_stay_each_replicas_own(map_name):
  xs = [np.full((N, 3), np.nan, np.float32)]
  own = np.arange(2.0 * N, dtype=np.float32).reshape(N, 2)
  own[0], own[1, 0] = [np.inf, 5.0], np.nan
  # One that shares a message with the gaps, and one of another dtype.
  others = [own, own.astype(jnp.bfloat16)]

  def step(xs, others):
    center = [jnp.zeros(x.shape, x.dtype) for x in xs]
    return _average(center, xs, others).others

  expected = np.where(np.isfinite(own), own, 0)
  for x in maps.run(map_name, step, xs, others, size=N):
    np.testing.assert_array_equal(x.astype(np.float32), expected)
