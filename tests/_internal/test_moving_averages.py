"""Tests of moving averages of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist._internal import moving_averages


@pytest.mark.parametrize("decay", [0, 0.75, 1.0])
def test_they_follow_the_updated_parameters(decay):
  params, expected = {"w": np.float32([1, 2])}, np.array([1.0, 2.0])
  averages = moving_averages.init(params, decay, None)
  for update in (np.float32([1, -1]), np.float32([0.5, 0])):
    updates = {"w": update}
    averages = moving_averages.update(averages, params, updates, decay)
    params = optax.apply_updates(params, updates)
    expected = decay * expected + (1 - decay) * params["w"]
    np.testing.assert_allclose(averages["w"], expected, rtol=1e-6)
  assert averages["w"].dtype == jnp.float32


def test_half_precision_is_averaged_in_float32():
  """In bfloat16 the average would stop a quarter of the way."""
  params = {"w": jnp.zeros(2, jnp.bfloat16)}
  averages = moving_averages.init(params, 0.999, None)
  to_one = {"w": jnp.ones(2, jnp.bfloat16)}
  update = jax.jit(lambda a: moving_averages.update(a, params, to_one, 0.999))
  for _ in range(1000):
    averages = update(averages)
  assert averages["w"].dtype == jnp.float32
  np.testing.assert_allclose(averages["w"], 1 - 0.999**1000, rtol=1e-4)


def test_the_dtype_of_averages_can_be_chosen():
  params = {"w": jnp.ones(2, jnp.bfloat16)}
  averages = moving_averages.init(params, 0.5, None, jnp.bfloat16)
  averages = moving_averages.update(averages, params, params, 0.5)
  assert averages["w"].dtype == jnp.bfloat16
  np.testing.assert_array_equal(averages["w"].astype(jnp.float32), 1.5)


def test_rows_that_a_sparse_update_touches_move():
  params = jnp.zeros((3, 2))
  averages = moving_averages.init(params, 0.5, None)
  update = optax_dist.IndexedSlices(jnp.ones((1, 2)), jnp.array([1]), (3, 2))
  averages = moving_averages.update(averages, params, update, 0.5)
  np.testing.assert_array_equal(averages[:, 0], [0, 0.5, 0])


def test_the_first_averages_share_no_buffer_with_the_parameters():
  params = {"w": jnp.ones(2)}
  averages = moving_averages.init(params, 0.5, None)
  own = averages["w"].unsafe_buffer_pointer()
  assert own != params["w"].unsafe_buffer_pointer()


def test_a_prefix_says_which():
  params = {"body": {"w": np.float32(1), "b": np.float32(2)}, "head": 3.0}
  averages = moving_averages.init(params, 0.5, {"body": True, "head": False})
  assert len(jax.tree.leaves(averages)) == 2
  assert averages["head"] == optax.MaskedNode()


def test_without_a_decay_there_are_no_averages():
  assert moving_averages.init({"w": 1.0}, None, None) is None
  assert moving_averages.update(None, 1.0, 1.0, None) is None


@pytest.mark.parametrize("decay", [-0.1, 1.1, "0.9", np.nan])
def test_bad_decays(decay):
  with pytest.raises(ValueError, match="must be a decay from 0 to 1") as info:
    moving_averages.check(decay, None)
  assert repr(decay) in str(info.value)


def test_a_choice_needs_a_decay():
  with pytest.raises(ValueError, match="needs `variable_averages`"):
    moving_averages.check(None, {"w": True})
