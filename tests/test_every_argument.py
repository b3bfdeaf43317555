"""A wrong argument of anything public is refused by name, when it is called.

`coordinator.join` and `as_optimizer` have theirs in coordinator/test_arguments.py.
"""

import decimal
import inspect
import math

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist import (
  compression,
  ledger,
  optimizers,
  quorum,
  simulate,
  sparse,
  states,
)
from optax_dist.optimizers.keras import KERAS_NAMES, keras_arguments

SGD = optax.sgd(0.1)
DATA = ledger.Batches(num_samples=8, global_batch=4)
LATENCY = simulate.parse_latency("constant:1")
RECORDED = simulate.Recorded(
  simulate.Recording([np.arange(9.0)], [np.ones(9)], np.arange(9.0)),
  replicas=1,
  strategy=simulate.sync_replicas(1),
  communication=0.0,
  steps_per_second=1.0,
)

#: What no argument can be, unless it is one of `ANYTHING`.
WRONG = {
  "an object": object(),
  "an array": np.arange(2.0),
  "a complex number": 1j,
  "NumPy's complex number": np.complex64(0.5),
  "a number in a dictionary": {1: 2},
  "True": True,
  "NaN": math.nan,
  "NaN on a device": jnp.float32(math.nan),
  "a number below all others": -math.inf,
  "a huge integer": 10**400,
  "bytes": b"x",
  "a decimal": decimal.Decimal("0.5"),
  "a random key": jax.random.key(0),
  "an array of objects": np.array(None),
  "another word": "another",
  "another word of NumPy": np.str_("another"),
  "a set": {"data"},
}
#: Trees, and functions of them: compared with parameters and updates when these are
#: there. Some are any object's: an axis name, or what a data set holds.
TREES = {
  "mask",
  "param_specs",
  "params",
  "sparse_capacity",
  "specs",
  "state",
  "tree",
  "values",
  "variables_to_average",
  "opt_state",
}
#: What may be True.
_FLAGS = (
  "all_arrive",
  "amsgrad",
  "cancel",
  "centered",
  "deterministic",
  "exact",
  "frozen_iterations",
  "has_aux",
  "lower_on_leave",
  "lowers",
  "needs_params",
  "nesterov",
  "num_updates",
  "own_params",
  "reject_nonfinite",
  "shuffle",
  "stochastic",
  "sum_duplicates",
  "two_phase",
  "use_nesterov",
  "window",
)
#: What an argument may be after all, or is refused for with a KeyError.
FINE = {
  **{flag: {"True"} for flag in _FLAGS},
  "amsgrad decay": {"True"},
  "axis_name": {"an object", "another word", "another word of NumPy", "bytes"},
  "model_axes": {"an object", "another word", "another word of NumPy", "bytes"},
  "get_slot path": {"another word", "another word of NumPy", "bytes"},
  "get_slot name": {"another word", "another word of NumPy"},
}
#: What messages call it, if not by its name.
CALLED = {"family": "latency", "text": "latency"}


def _replicas(n):
  return {"inner": SGD, "axis_name": "data", "num_replicas": n}


def _timing(**arguments):
  return simulate.simulate_timing(
    **{
      "strategy": simulate.sync_replicas(1),
      "latency": LATENCY,
      "replicas": 2,
      "steps": 2,
      **arguments,
    }
  )


def _by_keras(name):
  def make(**arguments):
    return optimizers.keras(name, **arguments)

  return make, dict.fromkeys(keras_arguments(name))


def _optimizers():
  special = {
    "keras",
    "base_custom",
    # They have tests of their own.
    "from_returnn_config",
    "returnn_class_names",
    "returnn_learning_rates",
  }
  for name in optimizers.__all__:
    function = getattr(optimizers, name)
    if inspect.isfunction(function) and name not in special:
      needed = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty
      ]
      yield name, (function, dict.fromkeys(needed, 0.1))


def _state(tx):
  return tx.init(jnp.ones(2))


_PERIOD = {**_replicas(2), "communication_period": 2}
_OUTER = {**_PERIOD, "outer": SGD}
_SYNC = {
  "inner": SGD,
  "axis_name": "data",
  "replicas_to_aggregate": 2,
  "total_num_replicas": 2,
}
_SYNCED = _state(optax_dist.sync_replicas(**_SYNC))
_LOCAL = _state(optax_dist.local_sgd(**_PERIOD))
_SHARDED = _state(optax_dist.sharded(**_replicas(2)))
_ADAM = _state(optimizers.adam(0.1))
_MESH = maps.mesh(1)

#: What is called, and valid arguments.
CALLS = {
  "bmuf": (optax_dist.bmuf, _PERIOD),
  "clip_by_global_norm": (
    optax_dist.clip_by_global_norm,
    {"max_norm": 1.0, "axis_name": "data"},
  ),
  "cross_shard": (optax_dist.cross_shard, {"axis_name": "data"}),
  "cross_shard compressed": (
    optax_dist.cross_shard,
    {"axis_name": "data", "compression": compression.sign()},
  ),
  "diloco": (optax_dist.diloco, _PERIOD),
  "elastic_average": (
    optax_dist.elastic_average,
    {**_PERIOD, "learning_rate": 0.1},
  ),
  "local_sgd": (optax_dist.local_sgd, _PERIOD),
  "local_updates": (optax_dist.local_updates, _OUTER),
  "params_ema": (optax_dist.params_ema, {"decay": 0.5}),
  "per_replica": (
    lambda **kwargs: optax_dist.per_replica(**kwargs),
    {"tx": SGD, "axis_name": "data", "num_replicas": 2},
  ),
  "sharded": (optax_dist.sharded, _replicas(2)),
  "slowmo": (optax_dist.slowmo, _PERIOD),
  "sparse_loco": (optax_dist.sparse_loco, _PERIOD),
  "streaming_updates": (
    optax_dist.streaming_updates,
    {**_OUTER, "fragments": 1},
  ),
  "sync_replicas": (
    optax_dist.sync_replicas,
    {**_SYNC, "variable_averages": 0.5},
  ),
  "train_step": (
    optax_dist.train_step,
    {
      "loss": lambda params, batch: 0.0,
      "tx": SGD,
      "mesh": _MESH,
      "axis_name": maps.AXIS,
    },
  ),
  "under_jit": (
    optax_dist.under_jit,
    {"tx": SGD, "axis_name": maps.AXIS, "mesh": _MESH},
  ),
  "power_sgd": (compression.power_sgd, {"rank": 1}),
  "quantize": (compression.quantize, {"bits": 8}),
  "sign": (compression.sign, {}),
  "top_k": (compression.top_k, {"density": 0.1}),
  "quorum.init": (quorum.init, {"replicas_to_aggregate": 2}),
  "Batches": (ledger.Batches, {"num_samples": 8, "global_batch": 4}),
  "ledger.init": (ledger.init, {"data": DATA, "gradients_per_step": 2}),
  "simulate.sync_replicas": (
    simulate.sync_replicas,
    {"replicas_to_aggregate": 2},
  ),
  "simulate_timing": (
    simulate.simulate_timing,
    {
      "strategy": simulate.sync_replicas(1),
      "latency": LATENCY,
      "replicas": 2,
      "steps": 2,
    },
  ),
  "Failures": (
    lambda **kwargs: _timing(failures=simulate.Failures(**kwargs)),
    {"rate": 0.1, "downtimes": (1.0,), "unnoticed": (), "lowers": False},
  ),
  "plan": (
    simulate.plan,
    {"latency": LATENCY, "replicas": 2, "steps": 2, "repetitions": 2},
  ),
  "predict": (
    simulate.predict,
    {"recorded": RECORDED, "repetitions": 2, "failures": None},
  ),
  "Distribution": (
    lambda **kwargs: simulate.Distribution(**kwargs),
    {"parameters": (1.0,), "family": "constant"},
  ),
  "SlowHosts": (
    simulate.SlowHosts,
    {"share": 0.5, "factor": 2.0, "base": LATENCY},
  ),
  "parse_latency": (simulate.parse_latency, {"text": "constant:1"}),
  "base_custom": (
    optimizers.base_custom,
    {
      "apply_rule": lambda grad, param, slots, step: (-grad, slots),
      "learning_rate": 0.1,
    },
  ),
  "keras": (optimizers.keras, {"name": "SGD"}),
  **{f"keras {name}": _by_keras(name) for name in KERAS_NAMES},
  **dict(_optimizers()),
  "IndexedSlices": (
    optax_dist.IndexedSlices,
    {
      "values": jnp.ones((1, 2)),
      "indices": jnp.array([0]),
      "dense_shape": (3, 2),
    },
  ),
  "lookup_value_and_grad": (
    sparse.lookup_value_and_grad,
    {"fun": lambda params: 0.0},
  ),
  "row_wise": (sparse.row_wise, {"inner": SGD}),
  "get_slot": (states.get_slot, {"state": _ADAM, "path": "", "name": "m"}),
  "place": (
    states.place,
    {"tree": jnp.ones(2), "mesh": _MESH, "specs": jax.P()},
  ),
  "resize_from_center": (
    states.resize_from_center,
    {"params": jnp.ones((2, 2)), "state": _LOCAL, "num_replicas": 3},
  ),
  "resize_replicas": (
    states.resize_replicas,
    {"state": _SYNCED, "num_replicas": 3, "departed": "fold"},
  ),
  "resize_sharded": (
    states.resize_sharded,
    {"state": _SHARDED, "params": jnp.ones(2), "num_replicas": 3},
  ),
  "state_axes": (states.state_axes, {"state": _SYNCED}),
  "state_specs": (states.state_specs, {"state": _SYNCED, "axis_name": "data"}),
}


def _arguments(call):
  function, given = CALLS[call]
  known = [
    p.name
    for p in inspect.signature(function).parameters.values()
    if p.kind is not p.VAR_KEYWORD
  ]
  return [name for name in dict.fromkeys([*known, *given]) if name not in TREES]


def _cases():
  for call in CALLS:
    for name in _arguments(call):
      yield pytest.param(call, name, id=f"{call}-{name}")


#: Functions of a state or of updates alone, which say what these lack.
_OF_TREES = {
  "apply_updates",
  "averaged_params",
  "center_params",
  "is_indexed_slices",
  "local_params",
  "map_values",
  "reset_to_center",
  "slot_names",
  "sum_duplicates",
  "sync_report",
  "to_dense",
}
#: Those whose arguments are checked elsewhere, or are events and states of the rules.
_OTHERS = {
  # tests/optimizers/test_returnn_config.py and tests/simulate
  "from_journal",
  "from_returnn_config",
  "replay_run",
  "returnn_class_names",
  "returnn_learning_rates",
  # quorum and ledger
  "accepts",
  "are_bad",
  "check_sync_arguments",
  "fits",
  "inverse_staleness",
  "is_blocked",
  "missing",
  "needed",
  "read",
  "report",
  "step",
  "swap",
}


@pytest.mark.parametrize(
  "module",
  [
    optax_dist,
    compression,
    ledger,
    optimizers,
    quorum,
    simulate,
    sparse,
    states,
  ],
)
def test_every_public_function_is_tested(module):
  functions = {
    name for name in module.__all__ if inspect.isfunction(getattr(module, name))
  }
  called = {call.split()[0].split(".")[-1] for call in CALLS}
  assert functions <= called | _OF_TREES | _OTHERS


@pytest.mark.parametrize("call", CALLS)
def test_base_arguments_are_valid(call):
  function, given = CALLS[call]
  function(**{k: v for k, v in given.items() if v is not None})


@pytest.mark.parametrize(("call", "name"), [*_cases()])
def test_a_wrong_argument_is_refused_by_name(call, name):
  function, given = CALLS[call]
  given = {k: v for k, v in given.items() if v is not None}
  said = {}
  fine = FINE.get(f"{call} {name}", FINE.get(name, set()))
  for what in WRONG.keys() - fine:
    try:
      function(**given | {name: WRONG[what]})
      said[what] = "accepted"
    except (TypeError, ValueError) as error:
      is_named = name in str(error) or CALLED.get(name, name) in str(error)
      if not is_named or len(str(error)) > 600:
        said[what] = f"{error!r:.200}"
  assert not said


_NO_COUNTS = (0, -1, 2.0, "2", None, np.True_)
_NO_FLAGS = ("no", 1, None, 0.0)
_NO_METHODS = ("sign", 3, compression.sign)
_NO_FLOATS = (int, "int32", "no dtype", 3.0)
#: Values of the right kind that are out of range, by call and argument.
OUT_OF_RANGE = {
  "Batches epochs": (0,),
  "Batches global_batch": (0, 2.0),
  "Batches mode": ("fast",),
  "Batches num_samples": _NO_COUNTS,
  "Batches seed": (-1, 2**63),
  "Batches shuffle": _NO_FLAGS,
  "adagrad initial_accumulator_value": (0.0, -1.0, jnp.float32(-1.0)),
  "adagrad_da initial_gradient_squared_accumulator_value": (0.0, -1.0),
  "clip_by_global_norm max_norm": (
    *(0.0, np.float32(-1), jnp.zeros(()), np.nan, "1", None, True, [1]),
  ),
  # JAX would take the mean over a numbered dimension of each replica's array.
  "cross_shard axis_name": (
    *(0, True, 1.0, np.int32(0), None, len, (), [], ("a", None), ("a", "a")),
    *([["a"]], ("a", 0), ("a", ("b", "c")), range(2), iter("ab")),
  ),
  "cross_shard compression": _NO_METHODS,
  "cross_shard invariant_updates": ("x",),
  "cross_shard reduction": ("none", "max", None),
  "diloco communication_period": (0,),
  "diloco compression": _NO_METHODS,
  "elastic_average communication_period": (0,),
  "elastic_average compression": _NO_METHODS,
  "elastic_average learning_rate": (0.0,),
  "elastic_average moving_rate": (-0.1,),
  "elastic_average num_replicas": (0,),
  "ftrl initial_accumulator_value": (-0.1,),
  "ftrl l1_regularization_strength": (-0.1,),
  "ftrl l2_regularization_strength": (-0.1,),
  "ftrl l2_shrinkage_regularization_strength": (-1,),
  "ftrl learning_rate": (0, 0.0, -0.1),
  "ftrl learning_rate_power": (0.5,),
  "keras Adagrad initial_accumulator_value": (-1.0,),
  "keras RMSprop momentum": (-0.5,),
  "keras SGD decay": (-1.0,),
  "keras SGD momentum": (1.5,),
  "local_sgd communication_period": (0,),
  "local_updates communication_period": _NO_COUNTS,
  "local_updates num_replicas": (0,),
  "params_ema decay": (1.5,),
  "params_ema dtype": _NO_FLOATS,
  "per_replica num_replicas": (0,),
  "power_sgd rank": (0, 1.5),
  "proximal_adagrad initial_accumulator_value": (0,),
  "quantize bits": (3,),
  "quantize block": (0,),
  "quantize error_feedback": (1.5,),
  "quorum.init max_staleness": (-1,),
  "quorum.init replicas_to_aggregate": (0, None),
  "quorum.init total_num_replicas": (0, -1),
  "resize_from_center num_replicas": (0, 2.0),
  "resize_replicas departed": ("keep",),
  "resize_replicas num_replicas": (0,),
  "resize_sharded num_replicas": (0,),
  "sharded reduction": ("max",),
  "slowmo communication_period": (0,),
  # A name was taken letter by letter.
  "state_specs inner_axes": ("model", None, {"model"}, 3),
  "streaming_updates communication_period": (0,),
  "streaming_updates compression": _NO_METHODS,
  "streaming_updates delay": (-1, 2),
  "streaming_updates fragments": (0,),
  "streaming_updates mix": (1.5,),
  "sync_replicas accumulator_dtype": _NO_FLOATS,
  "sync_replicas all_arrive": _NO_FLAGS,
  "sync_replicas averages_dtype": _NO_FLOATS,
  "sync_replicas max_staleness": (-1,),
  "sync_replicas replicas_to_aggregate": (0, 2**40),
  "sync_replicas staleness_weight": ("linear",),
  "sync_replicas total_num_replicas": (-1,),
  "sync_replicas variable_averages": (1.5,),
  "top_k bits": (3,),
  "top_k density": (0.0,),
  "train_step mesh": (None, _MESH.abstract_mesh, "data"),
}


@pytest.mark.parametrize("argument", OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_name(argument):
  call, _, name = argument.rpartition(" ")
  function, given = CALLS[call]
  given = {k: v for k, v in given.items() if v is not None}
  for value in OUT_OF_RANGE[argument]:
    with pytest.raises((TypeError, ValueError), match=f"{name}`? .*must"):
      function(**given | {name: value})


@pytest.mark.parametrize("value", [np.float32(0.25), np.float64(0.25)])
def test_numbers_of_numpy_are_numbers(value):
  assert compression.top_k(value).sent(jnp.ones(8)) == compression.top_k(
    0.25
  ).sent(jnp.ones(8))
  data = ledger.Batches(np.int64(8), np.int32(4), seed=np.uint8(1))
  assert data == ledger.Batches(8, 4, seed=1)
  assert type(data.num_samples) is int


@pytest.mark.parametrize("tree", [3, "x", {"zz": 1}, [jax.P()], (jnp.ones(2),)])
def test_a_tree_of_another_structure_is_refused_by_name(tree):
  params = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}
  local = optax_dist.local_sgd(**_PERIOD).init(params)
  averaged = optax_dist.params_ema(0.5).init(params)
  calls = {
    "sparse_capacity": lambda: optax_dist.sync_replicas(
      **_SYNC, sparse_capacity=tree
    ).init(params),
    "params": lambda: optax_dist.averaged_params(averaged, tree),
    "mask": lambda: optax_dist.params_ema(0.5, mask=tree).init(params),
    "specs": lambda: states.place(params, _MESH, tree),
    "param_specs": lambda: optax_dist.under_jit(
      SGD, maps.AXIS, mesh=_MESH, param_specs=tree
    ).init(params),
  }
  for name, call in calls.items():
    with pytest.raises(ValueError, match=f"`{name}` must"):
      call()
  for call in (states.reset_to_center, states.resize_from_center):
    number = () if call is states.reset_to_center else (2,)
    with pytest.raises(ValueError, match="`params` must have the structure"):
      call(tree, local, *number)


def test_specs_without_matching_state_are_refused():
  """Each array of the state would be whole on every device."""
  state = optax.sgd(0.1, momentum=0.9).init({"w": jnp.ones((2, 2))})
  for specs in ({"v": jax.P("model")}, [jax.P("model")]):
    with pytest.raises(ValueError, match="`param_specs` must have the struct"):
      states.state_specs(state, "data", param_specs=specs)
  states.state_specs(SGD.init(None), "data", param_specs={"v": jax.P("model")})
  noise = optax.add_noise(0.1, 0.5, 0).init(None)
  states.state_specs(noise, "data", param_specs={"v": jax.P("model")})
