"""Parameters and gradients as trees of any library."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from optax_dist import coordinator
from optax_dist.coordinator.runtime import trees


def test_leaves_other_than_arrays_are_named_with_the_remedy():
  with pytest.raises(TypeError, match=r"\['f'\] must be an array, got .*nnx"):
    trees.as_params({"w": jnp.ones(2), "f": jnp.tanh})


def test_arrays_that_jax_does_not_have_are_named():
  with pytest.raises(TypeError, match=r"\['t'\] must be .* floating .*object"):
    trees.as_params({"w": jnp.ones(2), "t": np.array([None, [1.0]], object)})


def test_an_empty_tree_is_refused():
  with pytest.raises(ValueError, match="at least one array"):
    trees.as_params({"a": None})


def test_an_nnx_state_is_a_tree_like_any_other():
  model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
  graph, state = nnx.split(model, nnx.Param)
  params = trees.as_params(state)
  template = trees.Template(params)

  def loss(state):
    return jnp.sum(nnx.merge(graph, state)(jnp.ones((1, 2))))

  grads = template.fit(jax.grad(loss)(params))
  assert jax.tree.structure(grads) == jax.tree.structure(params)


def test_other_containers_with_the_same_keys_are_accepted():
  from flax.core import FrozenDict

  template = trees.Template({"a": jnp.ones(2), "b": {"c": jnp.ones(3)}})
  grads = FrozenDict({"a": jnp.zeros(2), "b": {"c": jnp.zeros(3)}})
  result = template.fit(grads)
  assert type(result) is dict
  assert result["b"]["c"].shape == (3,)


def _trains(params, grads):
  """Two replicas make three steps; what they end with."""

  def train(replica):
    for _ in range(3):
      assert replica.step(grads).accepted
    assert jax.tree.structure(replica.params) == jax.tree.structure(params)
    return replica.params

  one, two = coordinator.run_embedded(train, 2, optax.sgd(0.5), params)
  jax.tree.map(np.testing.assert_array_equal, one, two)
  return one


def test_a_frozen_dict_trains():
  from flax.core import FrozenDict

  params = FrozenDict({"a": jnp.ones(2), "b": {"c": jnp.ones(3)}})
  result = _trains(params, jax.tree.map(jnp.ones_like, params))
  assert isinstance(result, FrozenDict)
  np.testing.assert_array_equal(result["b"]["c"], jnp.full(3, -0.5))


def test_an_nnx_state_trains():
  params = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)
  result = _trains(params, jax.tree.map(jnp.ones_like, params))
  assert isinstance(result, nnx.State)


def test_an_nnx_module_trains_on_the_gradients_of_nnx():
  """They are a State, which has keys where the module has attributes."""

  def loss(model):
    return jnp.sum(model(jnp.ones((1, 2))))

  model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
  grads = nnx.grad(loss)(model)
  assert isinstance(grads, nnx.State)
  result = _trains(model, grads)
  assert isinstance(result, nnx.Linear)
  np.testing.assert_allclose(result.bias[...], jnp.full(3, -1.5))


def test_module_trains_without_leaves_other_than_arrays():
  """As equinox has them: its filter leaves None where no array is."""

  @jax.tree_util.register_dataclass
  @dataclasses.dataclass
  class Module:
    weight: object
    activation: object

  module = Module(jnp.ones(3), jnp.tanh)
  with pytest.raises(TypeError, match=r"activation must be .* eqx\.filter"):
    coordinator.run_embedded(lambda _: None, 1, optax.sgd(0.5), module)
  params = Module(jnp.ones(3), None)
  result = _trains(params, Module(jnp.ones(3), None))
  np.testing.assert_array_equal(result.weight, jnp.full(3, -0.5))


def test_a_missing_gradient_is_reported():
  with pytest.raises(ValueError, match="one array, got no array"):
    trees.Template(jnp.ones(2)).fit(None)
  with pytest.raises(ValueError, match=r"\['a'\], got one array"):
    trees.Template({"a": jnp.ones(2)}).fit(jnp.ones(2))


@pytest.mark.parametrize(
  ("found", "said"),
  [
    ({"a": jnp.ones(3)}, r"x\['a'\] must be float32\[2\], got float32\[3\]"),
    ({"a": jnp.ones(2, jnp.int32)}, r"must be float32\[2\], got int32\[2\]"),
    ({}, r"x\['a'\] must be float32\[2\], got none"),
    ({"a": np.ones(2, np.float32), "b": 1}, r"x\['b'\] must be left out"),
  ],
)
def test_differing_trees_are_reported_by_leaf(found, said):
  wanted = {"a": jnp.ones(2)}
  trees.check_like("x", {"a": np.zeros(2, np.float32)}, wanted)
  with pytest.raises(ValueError, match=said):
    trees.check_like("x", found, wanted)
