"""Parameters and gradients as trees of any library."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from optax_dist.coordinator.runtime import trees


def test_leaves_that_are_no_arrays_are_named_with_the_remedy():
  with pytest.raises(TypeError, match=r"\['f'\] must be an array, got .*nnx"):
    trees.as_params({"w": jnp.ones(2), "f": jnp.tanh})


def test_nothing_is_refused():
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


def test_other_containers_with_the_same_keys_will_do():
  from flax.core import FrozenDict

  template = trees.Template({"a": jnp.ones(2), "b": {"c": jnp.ones(3)}})
  grads = FrozenDict({"a": jnp.zeros(2), "b": {"c": jnp.zeros(3)}})
  found = template.fit(grads)
  assert type(found) is dict
  assert found["b"]["c"].shape == (3,)
