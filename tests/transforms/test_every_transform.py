"""Arguments and types that all wrapping transforms refuse, pass on and keep."""

import every_transform
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest

import optax_dist

N = 2
every_kind = pytest.mark.parametrize("kind", every_transform.NAMES)
#: Those in which each replica trains parameters of its own.
OWN = ("elastic_average", "local_updates", "streaming_updates")


def _tx(kind, inner=None, number=N, **kwargs):
  if kind == "sync_replicas":
    kwargs = {"replicas_to_aggregate": N} | kwargs
  return every_transform.make(kind, inner or optax.sgd(0.1), number, **kwargs)


# --- How many replicas there are ---------------------------------------------


@every_kind
def test_the_number_of_replicas_comes_from_the_caller_or_the_mesh(kind):
  with pytest.raises(ValueError, match="number of replicas is not known"):
    _tx(kind, number=None).init(jnp.zeros(2))
  with jax.set_mesh(maps.mesh(N)):
    state = _tx(kind, number=None).init(jnp.zeros(2))
    with pytest.raises(ValueError, match=f"there are {N} replicas along"):
      _tx(kind, number=N + 1).init(jnp.zeros(2))
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert shapes(state) == shapes(_tx(kind).init(jnp.zeros(2)))


@every_kind
@maps.both_kinds
def test_the_number_of_replicas_must_agree_with_the_axis(kind, map_name):
  tx = _tx(kind, number=N + 1)
  made_outside = tx.init(jnp.zeros(2))
  for step in (
    lambda x: jax.tree.leaves(tx.init(x))[0],
    lambda x: tx.update(x, made_outside, x)[0],
  ):
    with pytest.raises(ValueError, match=r"is 3, but there are 2"):
      maps.run(map_name, step, np.ones((N, 2), np.float32), size=N)


@pytest.mark.parametrize("kind", ["sync_replicas", *OWN])
def test_a_state_must_be_passed_into_the_map_by_its_axes(kind):
  tx, ones = _tx(kind), np.ones((N, 2), np.float32)
  state = tx.init(jnp.zeros(2))
  with pytest.raises(ValueError, match=r"state of 2 replicas.*state_axes"):
    maps.run("vmap", lambda x: tx.update(x, state, x)[0], ones, size=N)
  stacked = jax.tree.map(lambda x: np.stack([x] * N), state)
  for map_name in maps.TRACKED:
    with pytest.raises(
      ValueError, match=r"could disagree on when .*state_specs"
    ):
      maps.run(
        map_name, lambda s, x: tx.update(x, s, x)[0], stacked, ones, size=N
      )


@every_kind
def test_axis_is_unbound_outside_of_a_map(kind):
  tx = _tx(kind)
  with pytest.raises(optax_dist.UnboundAxisError, match=f"{kind}: "):
    tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


# --- Updates and parameters --------------------------------------------------


@every_kind
@maps.both_kinds
def test_integers_are_refused_by_name(kind, map_name):
  tx = _tx(kind)

  def step(x):
    tree = {"w": x}
    return tx.update({"w": jnp.int32(x)}, tx.init(tree), tree)[0]

  with pytest.raises(TypeError, match=r"updates\['w'\] is int32"):
    maps.run(map_name, step, np.ones((N, 2), np.float32), size=N)


@every_kind
def test_gradients_of_integers_are_refused_by_name(kind):
  tx, params = _tx(kind), {"w": jnp.ones(2), "n": jnp.arange(2)}

  def step(x):
    loss = lambda params: jnp.sum(params["w"] * x)
    gradient = jax.grad(loss, allow_int=True)(params)
    return tx.update(gradient, tx.init(params), params)[0]["w"]

  with pytest.raises(TypeError, match=r"updates\['n'\] is float0\. Leave it"):
    maps.run("vmap", step, np.ones((N, 2), np.float32), size=N)


@every_kind
@pytest.mark.parametrize(
  ("updates", "said"),
  [
    (
      {"a": jnp.ones((N, 3)), "b": jnp.ones((N, 2))},
      r"updates\['a'\] .*\(2,\)",
    ),
    ({"a": jnp.ones((N, 2))}, "must have the structure of `params`"),
  ],
  ids=["shape", "structure"],
)
def test_updates_unlike_the_parameters_are_refused_by_name(kind, updates, said):
  tx = _tx(kind)
  params = {"a": jnp.ones(2), "b": jnp.ones(2)}
  state = tx.init(params)
  axes = optax_dist.states.state_axes(state)
  with pytest.raises(ValueError, match=f"{kind}: .*{said}"):
    jax.vmap(
      lambda g, s: tx.update(g, s, params),
      in_axes=(0, axes),
      out_axes=(0, axes),
      axis_name=maps.AXIS,
    )(updates, state)


@pytest.mark.parametrize("kind", OWN)
@maps.tracked_map
def test_shared_parameters_are_refused_where_replicas_have_their_own(
  kind, map_name
):
  tx = _tx(kind, number=None)

  def step(cast, w, g):
    w = {"a": [optax_dist.local_params(w, maps.AXIS) if cast else w]}
    return tx.update({"a": [g]}, tx.init(w), w)[0]

  args = maps.Replicated(np.ones(2, np.float32)), np.ones((N, 2), np.float32)
  with pytest.raises(
    ValueError, match=rf"{kind}: params\['a'\]\[0\] does not vary.*local_params"
  ):
    maps.run(map_name, lambda *x: step(False, *x), *args, size=N)
  maps.run(map_name, lambda *x: step(True, *x), *args, size=N)


@pytest.mark.parametrize("kind", OWN)
def test_update_needs_the_parameters_of_one_replica(kind):
  tx, x = _tx(kind), jnp.ones((N, 1, 2))
  state = tx.init({"w": jnp.ones(2)})
  axes = optax_dist.states.state_axes(state)
  update = lambda *args: jax.vmap(
    tx.update, in_axes=(0, axes, *[0] * (len(args) - 2)), axis_name=maps.AXIS
  )(*args)
  with pytest.raises(ValueError, match="needs the parameters"):
    update({"w": x[:, 0]}, state)
  with pytest.raises(
    ValueError, match=r"params\['w'\] has shape \(1, 2\), but"
  ):
    update({"w": x}, state, {"w": x})


@every_kind
def test_the_first_update_changes_no_type(kind):
  """Weakly typed parameters would have the training step compiled twice."""
  params = {"scale": jnp.asarray(2.0), "filled": jnp.full(3, 0.5), "n": 1.0}
  tx = _tx(kind, optax.sgd(0.1, momentum=0.9))
  state = tx.init(params)
  axes = optax_dist.states.state_axes(state)
  update = jax.vmap(
    lambda s, g: tx.update(g, s, params)[1],
    axis_name=maps.AXIS,
    in_axes=(axes, 0),
    out_axes=axes,
  )
  gradients = jax.tree.map(lambda x: jnp.ones((N, *jnp.shape(x))), params)
  after = jax.eval_shape(update, state, gradients)
  kind = lambda x: (x.shape, x.dtype, x.weak_type)
  assert jax.tree.map(kind, after) == jax.tree.map(kind, state)


@pytest.mark.parametrize(
  "name", [*every_transform.NAMES, "sparse_loco", "variable_averages"]
)
def test_parameters_that_are_integers_or_keys_pass_every_transform(name):
  """Their gradient is None; no step changes them, or the state's structure."""
  inner = optax.chain(
    optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.5)
  )
  if name == "sparse_loco":
    tx = optax_dist.sparse_loco(
      inner, maps.AXIS, num_replicas=N, communication_period=2
    )
  elif name == "variable_averages":
    tx = _tx("sync_replicas", inner, variable_averages=0.5)
  else:
    outer = {"outer": optax.sgd(0.5, momentum=0.5)}
    tx = every_transform.make(
      name, inner, N, **outer if name in every_transform.OUTER else {}
    )
  params = {"w": jnp.ones(3), "n": jnp.array([3]), "k": jax.random.key(0)}
  state = tx.init(params)
  axes = optax_dist.states.state_axes(state)

  def step(params, state, gradient):
    updates, state = tx.update(
      {"w": gradient, "n": None, "k": None}, state, params
    )
    return optax_dist.apply_updates(params, updates), state

  own = jax.tree.map(lambda x: jnp.stack([x] * N), params)
  is_shared = name in ("sync_replicas", "sharded", "variable_averages")
  step = jax.vmap(
    step,
    axis_name=maps.AXIS,
    in_axes=(None if is_shared else 0, axes, 0),
    out_axes=(0, axes),
  )
  inputs = params if is_shared else own
  shapes = jax.eval_shape(step, inputs, state, jnp.ones((N, 3)))
  assert jax.tree.structure(shapes) == jax.tree.structure((own, state))
  for a, b in zip(
    jax.tree.leaves(shapes), jax.tree.leaves((own, state)), strict=True
  ):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)


@maps.every_map
def test_the_center_has_booleans_and_keys_of_the_first_replica(map_name):
  """Inside of a map, where each replica has others."""
  tx = _tx("elastic_average")
  params = {
    "w": jnp.ones((N, 3)),
    "mask": jnp.array([[True, False], [False, True]]),
    "keys": jax.random.split(jax.random.key(0), (N, 3)),
  }

  def start(params):
    center = optax_dist.center_params(tx.init(params))
    return center | {"keys": jax.random.key_data(center["keys"])}

  center = maps.run(map_name, start, params, size=N)
  params["keys"] = jax.random.key_data(params["keys"])
  for name, x in params.items():
    np.testing.assert_array_equal(center[name], np.stack([x[0]] * N))


# --- Arguments ---------------------------------------------------------------


def _update(tx, **extra):
  params = jnp.ones(3)
  state = tx.init(params)
  axes = optax_dist.states.state_axes(state)
  return jax.vmap(
    lambda g, s: tx.update(g, s, params, **extra),
    in_axes=(0, axes),
    out_axes=(0, axes),
    axis_name=maps.AXIS,
  )(jnp.ones((N, 3)), state)[0]


@every_kind
@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.scale(0.1)])
def test_arguments_that_no_transform_uses_are_refused(kind, inner):
  with pytest.raises(TypeError, match=f"{kind}: .* argument 'arived'"):
    _update(_tx(kind, inner), arived=True)


@pytest.mark.parametrize("kind", every_transform.NAMES[1:])
@pytest.mark.parametrize("name", ["arrived", "local_step"])
def test_other_transforms_refuse_the_arguments_of_sync_replicas(kind, name):
  with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
    _update(_tx(kind, optax.sgd(0.1)), **{name: True})


def test_a_misspelt_argument_is_corrected():
  with pytest.raises(TypeError, match=r"Did you mean `arrived`\?"):
    _update(_tx("sync_replicas"), arived=True)


@every_kind
def test_the_arguments_of_optaxs_training_loops_are_accepted(kind):
  _update(
    _tx(kind, optax.sgd(0.1)),
    value=jnp.float32(1),
    grad=jnp.ones(3),
    value_fn=jnp.sum,
  )


def _scaled_by_argument(read):
  return optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(),
    lambda g, state, params=None, **extra: (
      jax.tree.map(lambda g: read(extra) * g, g),
      state,
    ),
  )


@every_kind
@pytest.mark.parametrize(
  "read",
  [
    lambda extra: extra["factor"],
    lambda extra: jnp.asarray(extra.get("factor")),
    lambda extra: jnp.where(extra["factor"] > 1, 3.0, 1.0),
  ],
)
def test_arguments_reach_an_inner_transformation_that_uses_them(kind, read):
  """Wherever it is: the signatures of a chain and of what is in it say nothing."""
  inner = optax.chain(optax.scale(1.0), _scaled_by_argument(read))
  updates = _update(_tx(kind, inner), factor=jnp.float32(3))
  np.testing.assert_array_equal(updates, 3.0)


def test_arrived_reaches_nested_replicas():
  inner = optax_dist.sync_replicas(
    optax.sgd(1.0), "in", replicas_to_aggregate=2, total_num_replicas=2
  )
  tx = optax_dist.local_sgd(
    inner, "out", num_replicas=2, communication_period=4
  )

  def step(arrived):
    state = tx.init(jnp.zeros(3))
    updates, state = tx.update(
      jnp.ones(3), state, jnp.zeros(3), arrived=arrived
    )
    return updates

  both = jax.vmap(jax.vmap(step, axis_name="in"), axis_name="out")
  updates = both(jnp.array([[True, True], [True, False]]))
  np.testing.assert_array_equal(updates[:, :, 0], [[-1, -1], [0, 0]])


_WITH_CENTER = ["elastic_average", "local_updates", "streaming_updates"]


@pytest.mark.parametrize("outer", _WITH_CENTER)
@pytest.mark.parametrize("inner", _WITH_CENTER)
def test_centers_can_not_be_nested(outer, inner):
  """JAX's error came from the map, and named neither."""
  tx = optax.chain(
    optax.clip(1.0), every_transform.make(inner, optax.sgd(0.1), 2)
  )
  with pytest.raises(ValueError, match=f"{outer}: `inner` has a center"):
    every_transform.make(outer, tx, 4).init(jnp.zeros(2))


@pytest.mark.parametrize("name", _WITH_CENTER)
def test_learning_rate_can_be_set_for_each_replica(name):
  inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
  tx = every_transform.make(name, inner, 2)
  state = tx.init(jnp.zeros(3))
  with pytest.raises(ValueError, match=r"optax.tree.set\(.*jnp.full"):
    optax_dist.states.state_specs(
      optax.tree.set(state, learning_rate=0.25), maps.AXIS
    )
  with pytest.raises(ValueError, match=r"optax.tree.set\(.*jnp.full"):
    optax_dist.states.state_axes(
      optax.tree.set(state, learning_rate=jnp.float32(0.25))
    )
  step = optax_dist.train_step(
    lambda w, x: jnp.sum(x @ w), tx, maps.mesh(2), maps.AXIS
  )
  params, state = step.init(jnp.zeros(3))
  rates = jnp.array([0.25, 0.125])
  state = optax.tree.set(state, learning_rate=rates)
  params, _, _ = step(params, state, jnp.ones((2, 3)))
  np.testing.assert_array_equal(params, -rates[:, None] * np.ones((1, 3)))
