"""Tests that many small leaves are computed with at once, and to the same numbers."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest

from optax_dist._internal.leaves import horizontal_fusion, packing
from optax_dist._internal.leaves.horizontal_fusion import fuse_leaves

N = 2
_SHAPES = [(3, 2), (4,), (), (150, 150), (1,)]

_TRANSFORMS = {
  "adamw": optax.adamw(1e-2),
  "amsgrad": optax.amsgrad(1e-2),
  "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.lion(1e-2)),
  "schedule": optax.sgd(optax.linear_schedule(0.1, 0, 10), 0.9, nesterov=True),
  "injected": optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.1),
  "factored": optax.adafactor(1e-2),
  "labels": optax.partition(
    {"a": optax.adam(1e-2), "b": optax.sgd(0.1)},
    lambda params: ["ab"[i % 2] for i in range(len(params))],
  ),
  "by leaf": optax.stateless(
    lambda updates, _: [x * (i + 1) for i, x in enumerate(updates)]
  ),
  "accumulated": optax.MultiSteps(optax.adam(1e-2), 2),
}


def _args(tx, rng):
  draw = lambda: [
    jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in _SHAPES * 2
  ]
  params = draw()
  state = tx.init(params)
  _, state = tx.update(draw(), state, params)
  return draw(), state, params


@jax.numpy_dtype_promotion("standard")  # Which some of optax need.
@pytest.mark.parametrize("name", _TRANSFORMS)
@pytest.mark.parametrize("map_name", ["shard_map", "shard_map_vma"])
def test_results_are_the_same(name, map_name):
  tx = optax.with_extra_args_support(_TRANSFORMS[name])
  args = _args(tx, np.random.default_rng(0))
  stacked = jax.tree.map(lambda x: jnp.stack([x] * N), args)
  found = [
    maps.run(map_name, fun, *stacked, size=N)
    for fun in (tx.update, fuse_leaves(tx.update, (maps.AXIS,)))
  ]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *found
  )
  assert jax.tree.map(lambda x: (x.shape, x.dtype), found[0]) == jax.tree.map(
    lambda x: (x.shape, x.dtype), found[1]
  )


def _program(fun, *args, map_name="shard_map"):
  return str(jax.make_jaxpr(maps.mapped(map_name, fun, args, N))(*args))


def _xs(count, shape=(3,)):
  return [np.full((N, *shape), i + 1, np.float32) for i in range(count)]


def test_the_same_arithmetic_is_done_once():
  fun = lambda xs: [jnp.sin(x) * 2 for x in xs]
  fused = fuse_leaves(fun, (maps.AXIS,))
  assert _program(fun, _xs(9)).count("= sin ") == 9
  assert _program(fused, _xs(9)).count("= sin ") == 1
  # Large leaves, and one by itself, as they are.
  assert _program(fused, _xs(9, (200, 200))).count("= sin ") == 9
  assert _program(fused, _xs(9), map_name="vmap").count("= sin ") == 9


def test_what_is_done_with_one_leaf_stays_by_itself():
  fun = lambda xs: [jnp.sin(xs[0]), *(jnp.cos(x) for x in xs[1:])]
  program = _program(fuse_leaves(fun, (maps.AXIS,)), _xs(5))
  assert program.count("= sin ") == 1
  assert program.count("= cos ") == 1
  xs = _xs(5)
  got = maps.run("shard_map", fuse_leaves(fun, (maps.AXIS,)), xs, size=N)
  want = [np.sin(xs[0]), *(np.cos(x) for x in xs[1:])]
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_number_of_all_leaves_scales_each():
  fun = lambda xs: [x / optax.tree.norm(xs) for x in xs]
  xs = _xs(6)
  got = maps.run("shard_map", fuse_leaves(fun, (maps.AXIS,)), xs, size=N)
  norm = np.sqrt(sum(3 * (i + 1) ** 2 for i in range(6)))
  for x, y in zip(xs, got, strict=True):
    np.testing.assert_allclose(y, x / norm, rtol=1e-6)


def test_leaves_that_meet_are_not_packed_apart():
  """Each is added to the next one: one component, whatever its order."""
  fun = lambda xs: [x + y for x, y in zip(xs, xs[1:] + xs[:1], strict=True)]
  xs = _xs(4)
  got = maps.run("shard_map", fuse_leaves(fun, (maps.AXIS,)), xs, size=N)
  for i, y in enumerate(got):
    np.testing.assert_array_equal(y, xs[i] + xs[(i + 1) % 4])


def test_derivatives_pass():
  def loss(xs):
    return sum(jnp.sum(x**3) for x in fuse_leaves(cube, (maps.AXIS,))(xs))

  cube = lambda xs: [x * x for x in xs]
  xs = _xs(3)
  got = maps.run("shard_map", jax.grad(loss), xs, size=N)
  for x, y in zip(xs, got, strict=True):
    np.testing.assert_allclose(y, 6 * x**5, rtol=1e-5)


@pytest.mark.parametrize("whole", [True, False])
def test_what_lies_side_by_side_is_not_joined_again(whole):
  double = lambda xs: [2 * x for x in xs]

  def fun(buffer):
    together = packing.Packing.side_by_side([jnp.zeros(3)] * 4)
    leaves = together.unpack([buffer])
    joined = together.joined([buffer], leaves)
    leaves = leaves[1:] if whole else [leaves[3], leaves[1]]
    return fuse_leaves(double, (maps.AXIS,), joined)(leaves)

  xs = np.arange(12.0 * N, dtype=np.float32).reshape(N, 12)
  assert _program(fun, xs).count("concatenate") == (0 if whole else 1)
  got = maps.run("shard_map", fun, xs, size=N)
  for y, i in zip(got, [1, 2, 3] if whole else [3, 1], strict=True):
    np.testing.assert_array_equal(y, 2 * xs[:, 3 * i : 3 * i + 3])


def test_keys_do_not_grow_with_the_depth(monkeypatch):
  """They grew threefold at each step here, and so did the time."""
  lengths, key = [], horizontal_fusion._Step.key

  def measured(self):
    found = key(self)
    lengths.append(len(repr(found)))
    return found

  monkeypatch.setattr(horizontal_fusion._Step, "key", measured)

  def deep(xs):
    for _ in range(8):
      xs = [x * x + x for x in xs]
    return xs

  stacked = [jnp.ones((N, 3)), jnp.ones((N, 2))]
  _program(lambda *xs: fuse_leaves(deep, (maps.AXIS,))(list(xs)), *stacked)
  assert 0 < max(lengths) < 300
