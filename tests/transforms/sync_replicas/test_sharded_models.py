"""sync_replicas on gradients that are sharded over a further axis."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pairwise
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_dist

N = 2


def _mesh(kind=AxisType.Auto):
  return jax.make_mesh((N, 2), ("data", "model"), axis_types=(kind,) * 2)


def _tx(needed, **kwargs):
  return optax_dist.sync_replicas(
    optax.sgd(1.0),
    "data",
    replicas_to_aggregate=needed,
    total_num_replicas=N,
    **kwargs,
  )


def _specs(state):
  """Of a state whose arrays of 4 columns are sharded over the model axis."""

  def spec(x, of_state):
    sharded = x.ndim and x.shape[-1] == 4
    return P(*of_state, "model") if sharded else of_state

  return jax.tree.map(spec, state, optax_dist.states.state_specs(state, "data"))


def _step(tx, state, check_vma):
  specs = _specs(state)

  def step(state, g):
    # One parameter is sharded over the model axis, the other is not.
    grads = {"w": g["w"][0], "b": g["b"][0]}
    params = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    return tx.update(grads, state, params)

  return jax.jit(
    jax.shard_map(
      step,
      mesh=_mesh(),
      in_specs=(specs, {"w": P("data", "model"), "b": P("data")}),
      out_specs=({"w": P("model"), "b": P()}, specs),
      check_vma=check_vma,
    )
  )


def _gradients(value, bad_at=None):
  w = np.full((N, 4), value, np.float32)
  if bad_at is not None:
    w[bad_at] = np.nan
  return {"w": w, "b": np.full(N, value, np.float32)}


@pytest.mark.parametrize(
  "tx",
  [
    _tx(N),
    optax_dist.elastic_average(
      optax.sgd(1.0), "data", num_replicas=N, rho=0.0, communication_period=1
    ),
    optax_dist.local_sgd(
      optax.sgd(1.0), "data", num_replicas=N, communication_period=1
    ),
  ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_model_axes_must_be_given_where_types_do_not_show_them(tx, size):
  """A shard with a NaN would be dropped, and the others would move."""
  mesh = jax.make_mesh(
    (N, size), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  params = jnp.zeros(4)
  state = tx.init(params)
  specs = optax_dist.states.state_specs(
    state, "data", param_specs=P("model"), params=params
  )
  run = jax.shard_map(
    lambda g, s: tx.update(g[0], s, jnp.zeros(4 // size))[1],
    mesh=mesh,
    in_specs=(P("data", "model"), specs),
    out_specs=specs,
    check_vma=False,
  )
  if size == 1:
    jax.eval_shape(run, jnp.ones((N, 4)), state)
    return
  with pytest.raises(ValueError, match=r"over axis 'model'.*Give `model_axes`"):
    jax.eval_shape(run, jnp.ones((N, 4)), state)


@pairwise.every_value(needed=[1, N, 2 * N], check_vma=[False, True])
def test_a_nan_in_one_shard_drops_the_whole_gradient(needed, check_vma):
  tx = _tx(needed, **({} if check_vma else {"model_axes": "model"}))
  state = tx.init({"w": jnp.zeros(4), "b": jnp.zeros(())})
  step = _step(tx, state, check_vma)
  updates, state = step(state, _gradients(2.0, bad_at=(1, 3)))
  report = optax_dist.sync_report(state)
  np.testing.assert_array_equal(report.dropped["nonfinite"], [0, 1])
  np.testing.assert_array_equal(report.accepted, [1, 0])
  stepped = needed == 1
  assert report.global_step == stepped
  np.testing.assert_array_equal(updates["w"], [-2.0 * stepped] * 4)
  # What was accepted counts in the next step, whatever shard it is on.
  while optax_dist.sync_report(state).global_step == stepped:
    updates, state = step(state, _gradients(5.0))
  held = [] if stepped else [2.0]
  mean = np.mean(held + [5.0] * (N if needed <= N else 2 * N))
  np.testing.assert_allclose(updates["w"], [-mean] * 4, rtol=1e-6)
  np.testing.assert_allclose(updates["b"], -mean, rtol=1e-6)


def test_axis_cannot_be_both_of_replicas_and_of_the_model():
  with pytest.raises(ValueError, match=r"lie along \['data'\].*`model_axes`"):
    _tx(1, model_axes=("model", "data"))


def test_groups_of_nested_replicas_drop_gradients_independently():
  """Replicas of replicas: a group drops a gradient that the other keeps."""
  tx = optax_dist.local_sgd(
    _tx(N), "model", num_replicas=2, communication_period=4
  )
  state = tx.init(jnp.zeros(3))
  specs = optax_dist.states.state_specs(state, "model", inner_axes=("data",))

  def step(params, state, g):
    updates, state = tx.update(g[0, 0], state, params[0])
    return updates[None], state

  g = np.ones((2, N, 3), np.float32)
  g[1, 0, 0] = np.nan
  run = jax.jit(
    jax.shard_map(
      step,
      mesh=_mesh(),
      in_specs=(P("model"), specs, P("model", "data")),
      out_specs=(P("model"), specs),
      check_vma=True,
    )
  )
  updates, state = run(np.zeros((2, 3), np.float32), state, g)
  np.testing.assert_array_equal(updates, [[-1] * 3, [0] * 3])
  np.testing.assert_array_equal(
    state.replica.value.inner_state.global_step, [1, 0]
  )


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("needed", [1, N, 2 * N])
def test_model_axis_may_be_explicit(needed, check_vma):
  """The axis types that jax.make_mesh gives by default."""
  mesh = _mesh(AxisType.Explicit)
  tx = _tx(needed)
  with jax.set_mesh(mesh):
    params = jax.device_put(jnp.zeros((3, 4)), P(None, "model"))
    state = tx.init(params)
    specs = optax_dist.states.state_specs(state, "data")
    step = jax.jit(
      jax.shard_map(
        lambda state, params, g: tx.update(g[0], state, params),
        mesh=mesh,
        in_specs=(specs, P(), P("data")),
        out_specs=(P(), specs),
        axis_names={"data"},
        check_vma=check_vma,
      )
    )
    g = np.arange(1, N + 1, dtype=np.float32)[:, None, None]
    g = jax.device_put(np.broadcast_to(g, (N, 3, 4)), P("data", None, "model"))
    for _ in range(max(1, needed // N)):
      updates, state = step(state, params, g)
  np.testing.assert_array_equal(updates, np.full((3, 4), -1.5))
  assert optax_dist.sync_report(state).global_step == 1
