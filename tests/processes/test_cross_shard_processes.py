"""Tests of cross_shard over several processes, against NumPy.

Each launch computes everything; the tests then look at one thing each.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import launch
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dist

AXIS = "data"
# Processes, and devices of each: three replicas, and four in two pairs.
LAYOUTS = [(2, 2), pytest.param((3, 1), marks=pytest.mark.nightly)]
GROUPS = {4: [[0, 3], [2, 1]], 3: [[0], [2], [1]]}
MAPS = {
  "shard_map": (False, AxisType.Auto),
  "shard_map_vma": (True, AxisType.Auto),
  "shard_map_explicit_vma": (True, AxisType.Explicit),
}
REDUCTIONS = {
  "mean": {},
  "sum": {"reduction": "sum"},
  "mean_of_groups": {"axis_index_groups": GROUPS},
  "sum_of_groups": {"axis_index_groups": GROUPS, "reduction": "sum"},
}
# Each map and each reduction; tests/transforms has them all together.
CASES = [
  *(("shard_map_vma", name) for name in REDUCTIONS),
  *((name, "mean") for name in MAPS if name != "shard_map_vma"),
]


def _gradients(size):
  """Returns leaves that are joined, of several dtypes, none, and large ones."""
  rng = np.random.default_rng(0)
  leaf = lambda *shape: rng.normal(size=(size, *shape)).astype(np.float32)
  integers = lambda *shape: rng.integers(-8, 8, (size, *shape))
  return {
    "small": [leaf(3, 2), leaf(5), leaf()],
    # Small integers add up exactly in each of these dtypes.
    "half": [integers(4).astype(np.float16), integers(2, 3).astype(np.float16)],
    "brain": integers(3).astype(jnp.bfloat16),
    "complex": (leaf(2) + 1j * leaf(2)).astype(np.complex64),
    "nothing": leaf(0),
    "large": [leaf(300, 70), leaf(40_000)],
    "alone": leaf(1 << 19),
    "frozen": None,
  }


def _parameters(size):
  rng = np.random.default_rng(1)
  w = rng.normal(size=(3, 2)).astype(np.float32)
  x = rng.normal(size=(size, 3)).astype(np.float32)
  return w, x


def _case(name, size):
  kwargs = dict(REDUCTIONS[name])
  if "axis_index_groups" in kwargs:
    kwargs["axis_index_groups"] = GROUPS[size]
  return kwargs


def _everything():
  """Runs in each process; returns its own replicas' results, by case."""
  size = jax.device_count()
  results = {}
  for map_name, (check_vma, kind) in MAPS.items():
    mesh = jax.make_mesh((size,), (AXIS,), axis_types=(kind,))
    run = functools.partial(_run, mesh, check_vma)
    for name in [name for at, name in CASES if at == map_name]:
      tx = optax_dist.cross_shard(AXIS, **_case(name, size))
      results[map_name, name] = run(
        lambda g, tx=tx: tx.update(g, tx.init(g))[0], _gradients(size)
      )
    results[map_name, "gradient"] = run(
      _plain_gradient, *_parameters(size)[::-1]
    )
  results["messages", "mean"] = _all_reduces(size)
  return results


def _all_reduces(size):
  """Returns how many messages the mean takes: of the program, not its run."""
  mesh = jax.make_mesh((size,), (AXIS,), axis_types=(AxisType.Auto,))
  tx = optax_dist.cross_shard(AXIS)
  run = jax.shard_map(
    lambda g: tx.update(g, tx.init(g))[0],
    mesh=mesh,
    in_specs=P(AXIS),
    out_specs=P(AXIS),
    check_vma=False,
  )
  return np.array([str(jax.make_jaxpr(run)(_gradients(size))).count("psum")])


def _plain_gradient(x, w):
  tx = optax_dist.cross_shard(AXIS)
  g = jax.grad(lambda w: jnp.sum(jnp.square(x @ w)))(w)
  return tx.update(g, tx.init(w), w)[0]


def _run(mesh, check_vma, fn, stacked, *shared):
  """Returns this process's part of ``fn`` run on every replica."""

  def placed(spec, x):
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

  def body(stacked, *shared):
    own = fn(jax.tree.map(lambda x: x[0], stacked), *shared)
    return jax.tree.map(lambda x: x[None], own)

  out = jax.jit(
    jax.shard_map(
      body,
      mesh=mesh,
      in_specs=(P(AXIS), *(P() for _ in shared)),
      out_specs=P(AXIS),
      check_vma=check_vma,
    )
  )(
    jax.tree.map(functools.partial(placed, P(AXIS)), stacked),
    *jax.tree.map(functools.partial(placed, P()), shared),
  )
  return jax.tree.map(_own_replicas, out)


def _own_replicas(x):
  if not x.size:  # JAX does not say which replicas hold parts of nothing.
    return np.zeros((jax.local_device_count(), *x.shape[1:]), x.dtype)
  shards = sorted(x.addressable_shards, key=lambda s: s.device.id)
  return np.concatenate([np.asarray(s.data) for s in shards])


@pytest.fixture(
  scope="module", params=LAYOUTS, ids=lambda layout: f"{layout[0]}_processes"
)
def stacked(request):
  """Returns a function from a case to all replicas' results, stacked."""
  processes, devices = request.param
  results = launch.run(_everything, processes=processes, devices=devices)

  def get(*case):
    parts = [result[case] for result in results]
    return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)

  get.size = processes * devices
  return get


def _oracle(x, reduction="mean", axis_index_groups=None):
  wide = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
  out = np.empty_like(wide)
  for group in axis_index_groups or [list(range(len(x)))]:
    out[group] = getattr(np, reduction)(wide[group], axis=0)
  return out.astype(x.dtype)


@pytest.mark.parametrize(("map_name", "case"), CASES)
def test_processes_compute_the_numbers_of_a_single_process(
  stacked, map_name, case
):
  gradients = _gradients(stacked.size)
  kwargs = _case(case, stacked.size)
  expected = jax.tree.map(lambda x: _oracle(x, **kwargs), gradients)
  got = stacked(map_name, case)
  chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
  chex.assert_trees_all_close(got, expected, rtol=2e-3, atol=1e-5)
  for key in ("small", "large", "alone", "complex"):
    chex.assert_trees_all_close(got[key], expected[key], rtol=1e-5, atol=1e-6)
  # Replicas that aggregate together must not drift apart by a single bit.
  for group in kwargs.get("axis_index_groups", [list(range(stacked.size))]):
    for i in group:
      chex.assert_trees_all_equal(
        jax.tree.map(lambda x, i=i: x[i], got),
        jax.tree.map(lambda x, group=group: x[group[0]], got),
      )


@pytest.mark.parametrize("map_name", MAPS)
def test_the_gradient_of_replicated_parameters_is_not_summed_twice(
  stacked, map_name
):
  w, x = _parameters(stacked.size)
  expected = np.mean(np.einsum("ni,nj->nij", x, 2 * (x @ w)), axis=0)
  for got in stacked(map_name, "gradient"):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_small_leaves_of_one_dtype_share_a_message(stacked):
  dtypes = {x.dtype for x in jax.tree.leaves(_gradients(stacked.size))}
  assert set(stacked("messages", "mean")) == {len(dtypes) + 1}
