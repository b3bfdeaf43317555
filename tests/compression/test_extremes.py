"""Numbers at the ends of a dtype: zeros stay zeros, the largest stay finite."""

import functools

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist import compression

N = 3
SHAPE = (16, 12)
METHODS = {
  "top_k": compression.top_k(0.3),
  "top_k, 2 bits": compression.top_k(0.1, bits=2),
  "top_k, 8 bits": compression.top_k(0.1, bits=8, error_feedback=None),
  "8 bits": compression.quantize(8),
  "2 bits, random": compression.quantize(
    2, stochastic=True, error_feedback=None
  ),
  "1 bit": compression.quantize(1),
  "sign": compression.sign(),
  "sign, scaled": compression.sign(error_feedback=1.0),
  "power_sgd": compression.power_sgd(2),
}
each_method = pytest.mark.parametrize("name", METHODS)


@functools.cache
def _stepper(name):
  tx = optax_dist.cross_shard(
    maps.AXIS, compression=METHODS[name], num_replicas=N
  )
  params = {
    dtype: jnp.zeros(SHAPE, dtype)
    for dtype in ("float32", "bfloat16", "float16")
  } | {"vector": jnp.zeros(SHAPE[0])}
  state = tx.init(params)
  return (
    params,
    state,
    maps.stepper("vmap", lambda s, g: tx.update(g, s), state, N),
  )


def _near_the_largest(params):
  def rows(x):
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], size=(N, *x.shape))
    most = float(jnp.finfo(x.dtype).max)
    numbers = signs * most * (1 - 0.1 * rng.random((N, *x.shape)))
    numbers[:, 0] = most
    return jnp.asarray(numbers, x.dtype)

  return jax.tree.map(rows, params)


@each_method
def test_largest_numbers_stay_finite_in_two_updates(name):
  """The sum of the replicas', and of a gradient and a residual, is too large."""
  params, state, step = _stepper(name)
  largest = _near_the_largest(params)
  ones = jax.tree.map(jnp.ones_like, largest)
  for gradients in (largest, largest, ones, ones):
    updates, state = step(state, gradients)
    for leaf in jax.tree.leaves((updates, state.replica.value.residual)):
      assert np.all(np.isfinite(np.asarray(leaf, np.float32)))


@each_method
@pytest.mark.filterwarnings("error")
def test_numbers_beyond_float32_are_sent_as_its_largest(name):
  method, most = METHODS[name], float(np.finfo(np.float32).max)
  with jax.enable_x64(True):
    rows = jnp.full((N, *SHAPE), 1e300, jnp.float64)
    mean = jax.vmap(
      lambda x: method.reduce(x, method.init(x), (maps.AXIS,))[0],
      axis_name=maps.AXIS,
    )(rows)
    assert mean.dtype == jnp.float64
    assert np.isfinite(mean).all()
    assert np.max(mean) <= most * (1 + 1e-5)
    if not name.startswith("sign"):
      assert np.max(mean) >= most * (1 - 1e-5)


@pytest.mark.parametrize(
  ("name", "bound"),
  [
    ("top_k", 0.0),
    ("8 bits", 1 / 254),
    ("sign, scaled", 0.1),
    # All are equal: a matrix of rank 1.
    ("power_sgd", 1e-5),
  ],
)
def test_mean_of_the_largest_number_is_exact(name, bound):
  params, state, step = _stepper(name)
  most = jax.tree.map(
    lambda x: jnp.full((N, *x.shape), jnp.finfo(x.dtype).max, x.dtype), params
  )
  means, _ = step(state, most)
  for mean, x in zip(
    jax.tree.leaves(means), jax.tree.leaves(most), strict=True
  ):
    share = np.asarray(mean, np.float64) / np.asarray(x, np.float64)
    sent = share[share != 0]
    assert np.all(np.abs(sent - 1) <= bound + 1e-6)
    assert sent.size >= 0.3 * x.size


@each_method
def test_frozen_layer_does_not_change(name):
  params, state, step = _stepper(name)
  nothing = jax.tree.map(lambda x: jnp.zeros((N, *x.shape), x.dtype), params)
  for _ in range(2):
    updates, state = step(state, nothing)
    for leaf in jax.tree.leaves(updates):
      np.testing.assert_array_equal(np.asarray(leaf, np.float32), 0)


@pytest.mark.parametrize(
  "name", ["top_k", "top_k, 2 bits", "top_k, 8 bits", "8 bits", "sign"]
)
def test_rows_without_a_gradient_do_not_change(name):
  """As those of a table that no sample looked up: top_k had zeros to fill up with."""
  params, state, step = _stepper(name)
  gradients = jax.tree.map(
    lambda x: jnp.zeros((N, *x.shape), x.dtype).at[:, 0].set(0.5), params
  )
  for _ in range(3):
    updates, state = step(state, gradients)
    for leaf in jax.tree.leaves(updates):
      rows = np.asarray(leaf, np.float32)[:, 1:]
      np.testing.assert_array_equal(rows, 0)


def test_one_bit_zero_is_unbiased():
  """It has no zero: a row without a gradient drifted by the mean at each step."""
  method = compression.quantize(1, error_feedback=None)
  tx = optax_dist.cross_shard(maps.AXIS, compression=method, num_replicas=N)
  gradients = jnp.zeros((N, 256)).at[:, 128:].set(2.0)
  state = tx.init(jnp.zeros(256))
  step = maps.stepper("vmap", lambda s, g: tx.update(g, s), state, N)
  total = np.zeros(128)
  for _ in range(8):
    updates, state = step(state, gradients)
    total += updates[0, :128]
    np.testing.assert_array_equal(updates[0, 128:], 1.0)
  # The mean of 3,072 signs of one step each: six standard errors.
  assert abs(np.mean(total / 8)) <= 6 / np.sqrt(3 * 128 * 8)


def test_vote_of_zeros_and_nan_is_defined():
  """Neither is a vote: the others decide."""
  tx = optax.chain(
    optax_dist.cross_shard(
      maps.AXIS, compression=compression.sign(), num_replicas=N
    )
  )
  gradients = jnp.array(
    [[0.0, 0.0, np.nan, 0.0], [0, -3, 1, np.nan], [0, 0, 1, -np.inf]]
  )
  state = tx.init(jnp.zeros(4))
  step = maps.stepper("vmap", lambda s, g: tx.update(g, s), state, N)
  votes, _ = step(state, gradients)
  np.testing.assert_array_equal(votes[0], [0, -1, 1, -1])


@each_method
@pytest.mark.parametrize("tree", [{"w": None}, {}])
def test_updates_without_arrays_send_nothing(name, tree):
  """An empty part of `optax.partition` has such updates."""
  tx = optax_dist.cross_shard(
    maps.AXIS, compression=METHODS[name], num_replicas=N
  )
  state = tx.init(tree)

  def step(state, dummy):
    updates, state = tx.update(tree, state)
    return (updates, dummy), state

  (updates, _), _ = maps.stepper("vmap", step, state, N)(state, jnp.zeros(N))
  assert updates == tree
