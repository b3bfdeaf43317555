"""elastic_average against recordings of TensorFlow's ElasticAverageOptimizer.

TensorFlow's workers meet the center one after the other. The same here: each
worker is a map of one replica, and the center is handed from one to the next.
"""

import functools

import elastic_recordings
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import IndexedSlices
from optax_dist.states import state_axes
from optax_dist.states.center import center_params, reset_to_center
from optax_dist.transforms.elastic_average import elastic_average


def _alone(tx):
  """The update of a replica that is alone on its axis."""

  def update(gradients, state, params):
    updates, state = tx.update(gradients, state, params)
    updates = jax.tree.map(
      lambda x, u: jnp.zeros_like(x) if u is None else u, params, updates
    )
    return optax.apply_updates(params, updates), state

  return jax.jit(
    jax.vmap(
      update, in_axes=None, out_axes=(None, None), axis_name="i", axis_size=1
    ),
  )


def _tx(inner=None, **kwargs):
  return elastic_average(inner or optax.sgd(1.0), "i", num_replicas=1, **kwargs)


@pytest.mark.parametrize("id", elastic_recordings.STEPS)
def test_recorded_steps_are_reproduced(id):
  replay = elastic_recordings.Replay(id)
  tx = _tx(
    optax.sgd(replay.lr),
    communication_period=replay.period,
    moving_rate=replay.rate,
    rho=replay.rho,
  )
  update = _alone(tx)
  local = [[jnp.asarray(x) for x in replay.start]] * replay.workers
  state = [tx.init(local[0])] * replay.workers
  center, exchanges = center_params(state[0]), jnp.int32(0)
  own = jax.tree.map(lambda x: x[0], state[0].replica.value)
  replay.check_start(
    np.testing.assert_array_equal,
    local=local[0],
    local_center=own.local_center,
    center=center,
    local_step=int(own.local_step),
    global_step=int(state[0].global_step),
  )
  for worker, event in replay.steps():
    own = state[worker]._replace(center=center, global_step=exchanges)
    gradients = replay.gradients(event, local[worker])
    local[worker], own = update(gradients, own, local[worker])
    state[worker], center, exchanges = own, own.center, own.global_step
    for i in range(replay.workers):
      replica = jax.tree.map(lambda x: x[0], state[i].replica.value)
      replay.check(
        event,
        i,
        functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6),
        local=local[i],
        local_center=replica.local_center,
        center=center,
        local_step=int(replica.local_step),
        global_step=int(exchanges),
      )


def test_every_op_is_known():
  for id in set(elastic_recordings.ELASTIC) - set(elastic_recordings.STEPS):
    for event in elastic_recordings.ELASTIC[id]["events"]:
      assert event["op"] in elastic_recordings.FACTS, event


def _apply(tx, params, state, gradients):
  updates, state = tx.update(gradients, state, params)
  return optax.apply_updates(params, updates), state


def _expect(id, op):
  (event,) = [
    e for e in elastic_recordings.OF_FACTS[id]["events"] if e["op"] == op
  ]
  return event["expect"]


def test_recorded_defaults_are_reproduced():
  """EA-10: moving_rate and rho, and what TensorFlow divides by zero in."""
  for event in elastic_recordings.OF_FACTS["EA-10"]["events"][:2]:
    workers, lr = event["num_worker"], event["lr"]
    tx = elastic_average(
      optax.sgd(1.0),
      "i",
      num_replicas=workers,
      communication_period=event["period"],
      learning_rate=lr,
    )
    state = tx.init(jnp.zeros(()))
    own = jax.tree.map(lambda x: x[0], state.replica.value)
    state = state._replace(replica=type(state.replica)(own))

    def drift(state, tx=tx, workers=workers):
      return jax.vmap(
        lambda s: tx.update(jnp.float32(0.0), s, jnp.float32(1.0)),
        in_axes=None,
        out_axes=(0, None),
        axis_name="i",
        axis_size=workers,
      )(state)

    # One away from the center, with no gradient: the update is -rho.
    updates, _ = drift(state)
    np.testing.assert_allclose(updates, -event["expect"]["rho"], rtol=1e-6)
    # In an exchange, the center gets its part from each.
    iterations = jnp.int32(event["period"] - 1)
    updates, state = drift(state._replace(iterations=iterations))
    moved = (1 - event["expect"]["rho"]) * event["expect"]["moving_rate"]
    np.testing.assert_allclose(state.center, workers * moved, rtol=1e-6)
  for bad in ({"num_replicas": 0}, {"communication_period": 0}):
    with pytest.raises(ValueError, match="must be a positive integer, got 0"):
      elastic_average(optax.sgd(1.0), "i", moving_rate=0.5, **bad)
  with pytest.raises(ValueError, match="give `learning_rate`, or `rho`"):
    _tx(optax.adam(1.0))
  _tx(optax.adam(1.0), rho=0.0).init(0.0)


@pytest.mark.parametrize("names", [("b", "a"), ("a", "b"), ("b",)])
def test_each_parameter_meets_its_own_center(names):
  """EA-11: TensorFlow pairs the wrong ones where var_list is in another order."""
  tx = _tx(optax.sgd(1.0), rho=1.0)
  start = {"a": jnp.float32(1.0), "b": jnp.float32(5.0)}
  state = tx.init(start)
  # Gradients of a loss of 0; None for what is not in the list.
  gradients = dict.fromkeys(start)
  gradients.update({name: jnp.float32(0.0) for name in names})
  params, _ = _alone(tx)(gradients, state, start)
  assert params == start
  moved = {**start, "b": jnp.float32(7.0)}
  params, _ = _alone(tx)(gradients, state, moved)
  correct = elastic_recordings.OF_FACTS["EA-11"]["events"][2]["expect"]
  assert moved["b"] - params["b"] == correct["correct_grads"]["b"]
  assert params["a"] == start["a"]


def test_parameter_without_a_gradient_is_left_alone():
  """EA-13."""
  config = elastic_recordings.OF_FACTS["EA-13"]["config"]
  tx = _tx(
    optax.sgd(config["lr"]),
    communication_period=config["period"],
    moving_rate=config["moving_rate"],
    rho=config["rho"],
  )
  params = {"a": jnp.float32(1.0), "b": jnp.float32(5.0)}
  state = tx.init(params)
  state = state._replace(center={**state.center, "b": jnp.float32(9.0)})
  gradients = {"a": jnp.float32(1.0), "b": None}
  params, state = _alone(tx)(gradients, state, params)
  own = jax.tree.map(lambda x: x[0], state.replica.value)
  assert _expect("EA-13", "step") == {
    "a": params["a"],
    "global_a": state.center["a"],
    "b": params["b"],
    "center_b": own.local_center["b"],
    "global_b": state.center["b"],
  }


def test_center_is_saved():
  """EA-14: and the replicas' parameters come back too, unlike TensorFlow's."""
  config = elastic_recordings.OF_FACTS["EA-14"]["config"]
  tx = _tx(
    optax.sgd(config["lr"]),
    communication_period=config["period"],
    moving_rate=config["moving_rate"],
    rho=config["rho"],
  )
  params = [jnp.float32(1.0), jnp.float32(2.0)]
  state = tx.init(params)
  for _ in range(3):
    gradients = [jnp.float32(-1.0)] * 2
    params, state = _alone(tx)(gradients, state, params)
  expect = _expect("EA-14", "3 steps")
  assert params == expect["local"]
  saved = _expect("EA-14", "save")["ckpt"]
  assert center_params(state) == [saved["x"], saved["y"]] == expect["global"]


def test_replicas_that_start_apart_are_reset_to_the_center():
  """EA-15: until they are reset."""
  tx = _tx(rho=0.0)
  state = tx.init(jnp.float32(1.0))
  own = state.replica.value._replace(local_center=jnp.float32([3.0]))
  state = state._replace(replica=type(state.replica)(own))
  params, state = reset_to_center(jnp.float32(2.0), state)
  assert _expect("EA-15", "get_init_op")["all_equal_to_global"]
  assert params == state.center == state.replica.value.local_center[0] == 1.0


def test_a_restarted_worker_does_not_wait():
  """EA-16: it starts from the center, and the next step needs nothing else."""
  tx = elastic_average(
    optax.sgd(1.0),
    "i",
    num_replicas=2,
    communication_period=1,
    moving_rate=0.5,
    rho=0.0,
  )
  params, state = jnp.zeros(2), tx.init(jnp.zeros(()))
  axes = state_axes(state)
  step = jax.vmap(
    functools.partial(_apply, tx),
    in_axes=(0, axes, 0),
    out_axes=(0, axes),
    axis_name="i",
  )
  params, state = step(params, state, jnp.float32([-4.0, -8.0]))
  assert _expect("EA-16", "restart w1") == {"ready": []}  # TensorFlow hangs.
  fresh = tx.init(center_params(state))  # What a new process has.
  params = params.at[1].set(center_params(state))
  own = jax.tree.map(
    lambda old, new: old.at[1].set(new[1]), state.replica, fresh.replica
  )
  params, state = step(params, state._replace(replica=own), jnp.zeros(2))
  # The center 6, replicas 2 and 6: the first moves half of the way.
  np.testing.assert_allclose(params, [4.0, 6.0])
  np.testing.assert_allclose(state.center, 4.0)
  assert state.replica.value.local_step.tolist() == [2, 1]


@pytest.mark.parametrize("op", elastic_recordings.EVENTS_OF_EA_17)
def test_state_without_a_center_is_refused(op):
  """EA-17: named, where TensorFlow names its collections."""
  error = _expect("EA-17", op)["error"]
  state = optax.sgd(1.0).init(jnp.zeros(2))
  ask = {"get_init_op": lambda: reset_to_center(jnp.zeros(2), state)}.get(
    op.split()[0], lambda: center_params(state)
  )
  assert "empty" in error
  with pytest.raises(ValueError, match=r"a state with a center.*there are 0"):
    ask()


def test_embedding_gradients_become_dense():
  """EA-19: the gradient of a gather becomes dense with the pull."""
  config = elastic_recordings.OF_FACTS["EA-19"]["config"]
  tx = _tx(optax.sgd(config["lr"]), rho=config["rho"])
  table = jnp.float32([[1.0], [2.0], [3.0]])
  state = tx.init(jnp.float32([[0.0], [2.0], [3.0]]))
  gradient = IndexedSlices(jnp.ones((2, 1)), jnp.array([1, 1]), (3, 1))
  got, _ = _alone(tx)(gradient, state, table)
  np.testing.assert_array_equal(got, _expect("EA-19", "step")["e"])
