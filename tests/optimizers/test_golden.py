"""Replays the recorded runs of the originals, each at its own tolerance.

All 365 cases are replayed. 15 of them are not normative: the sparse ones of
CustomAdam, GradVarianceScaled and NeuralOptimizer1, whose class races with
itself on TensorFlow 2's variables, were recorded on those of TensorFlow 1,
without repeated indices; they hold here too.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import optimizers, sparse
from optax_dist.states import slots

_FOLDER = pathlib.Path(__file__).parent.parent / "golden"
_INDEX = json.loads((_FOLDER / "index.json").read_text())
_CASES = {case["id"]: case for case in _INDEX["cases"]}


def _sign_rule(grad, param, slots, step):
  """The rule of the user-defined subclass that was recorded."""
  del param
  return -step.learning_rate * jnp.sign(grad), slots


_FACTORIES = {
  "Adadelta": optimizers.adadelta,
  "Adagrad": optimizers.adagrad,
  "AdagradDA": optimizers.adagrad_da,
  "Adam": optimizers.adam,
  "AMSGrad": optimizers.amsgrad,
  "BaseCustom": functools.partial(optimizers.base_custom, _sign_rule),
  "CustomAdam": optimizers.custom_adam,
  "CustomGradientDescent": optimizers.custom_gradient_descent,
  "Ftrl": optimizers.ftrl,
  "GradientDescent": optimizers.gradient_descent,
  "GradVarianceScaled": optimizers.grad_variance_scaled,
  "Momentum": optimizers.momentum,
  "Nadam": optimizers.nadam,
  "NeuralOptimizer1": optimizers.neural_optimizer1,
  "NormalizedSGD": optimizers.normalized_sgd,
  "ProximalAdagrad": optimizers.proximal_adagrad,
  "ProximalGradientDescent": optimizers.proximal_gradient_descent,
  "RMSProp": optimizers.rmsprop,
}


@functools.cache
def _arrays(file):
  with np.load(_FOLDER / file) as arrays:
    return dict(arrays)


def _optimizer(case):
  """The optimizer of a case, made as its user would."""
  arguments = dict(case["hyperparameters"])
  if "per_step_key" in case["learning_rate"]:
    rates = _arrays(case["file"])[case["learning_rate"]["per_step_key"]]
    arguments["learning_rate"] = lambda count: jnp.asarray(rates)[count]
  if case["optimizer"] == "KerasWrapper":
    return optimizers.keras(
      case["source_class"].rsplit(".", 1)[-1],
      frozen_iterations=case["variant"] == "wrapper",
      **arguments,
    )
  if "global_step_start" in case:
    arguments["global_step_start"] = case["global_step_start"]
  return _FACTORIES[case["optimizer"]](**arguments)


@functools.cache
def _run(optimizer, name):
  """Runs the sequences of one set of hyper-parameters.

  Dense and sparse parameters are in one tree, so one program serves all.

  Returns:
    Trajectories, and slots at the end, by case id.
  """
  cases = [
    case
    for case in _CASES.values()
    if (case["optimizer"], case["case"]) == (optimizer, name)
  ]
  transformation = _optimizer(cases[0])

  @jax.jit
  def replay(params, sequence):
    def step(carry, gradients):
      params, state = carry
      updates, state = transformation.update(gradients, state, params)
      params = sparse.apply_updates(params, updates)
      return (params, state), params

    (_, state), trajectory = jax.lax.scan(
      step, (params, transformation.init(params)), sequence
    )
    return trajectory, state

  arrays = _arrays(cases[0]["file"])
  results = {}
  for sequence_kind in ("regular", "extreme", "unique"):
    group = [c for c in cases if c["sequence"].endswith(sequence_kind)]
    params, gradients = {}, {}
    for case in group:
      params |= {key: arrays[path] for key, path in case["init"].items()}
      inputs = {key: arrays[path] for key, path in case["gradients"].items()}
      if case["kind"] == "sparse":
        # A scan slices the leading axis of steps off the leaves.
        shape = params["embedding"].shape
        leaves = [inputs["values"], inputs["indices"]]
        slices = sparse.IndexedSlices.tree_unflatten(shape, leaves)
        inputs = {"embedding": slices}
      gradients |= inputs
    if group:
      trajectory, state = replay(params, gradients)
      for case in group:
        results[case["id"]] = trajectory, state
  return results


def _error(got, reference, initial, tensor):
  """The recording's own measure; see `comparison` in its index."""
  reference = np.concatenate([initial[np.newaxis], reference])
  magnitude = np.abs(reference)
  if tensor:
    magnitude = magnitude.reshape(len(magnitude), -1)
    magnitude = np.nanmax(magnitude, axis=1, initial=0.0)
    magnitude = magnitude.reshape(-1, *(1,) * (reference.ndim - 1))
  # A coordinate that is NaN has no scale any more; fmax keeps the former one.
  scale = np.maximum(np.fmax.accumulate(magnitude), 1e-30)[1:]
  reference = reference[1:]
  np.testing.assert_array_equal(np.isnan(got), np.isnan(reference))
  difference = np.abs(np.float64(got) - np.float64(reference))
  difference[np.isnan(difference) | (difference <= 1e-30)] = 0.0
  return (difference / scale).max()


@pytest.mark.parametrize("case_id", _CASES)
def test_recorded_trajectory_is_reproduced(case_id):
  case = _CASES[case_id]
  arrays = _arrays(case["file"])
  trajectory, _ = _run(case["optimizer"], case["case"])[case_id]
  for parameter, path in case["trajectory"].items():
    got = np.asarray(trajectory[parameter])
    initial = arrays[case["init"][parameter]]
    for measure, tolerance in case["tolerance"].items():
      error = _error(got, arrays[path], initial, measure == "per_tensor")
      assert error <= tolerance, f"{parameter} {measure}"


@pytest.mark.parametrize("optimizer", _INDEX["optimizers"])
def test_recorded_slots_are_reproduced(optimizer):
  """The recorded slots exist under their names."""
  for case in _CASES.values():
    if case["optimizer"] != optimizer:
      continue
    arrays = _arrays(case["file"])
    _, state = _run(optimizer, case["case"])[case["id"]]
    recorded = {path.split("/")[-1] for path in case["final_slots"]}
    if recorded:
      assert recorded == set(slots.slot_names(state))
    for path, key in case["final_slots"].items():
      parameter, name = path.split("/")
      np.testing.assert_allclose(
        slots.get_slot(state, parameter, name),
        arrays[key],
        rtol=1e-4,
        atol=1e-6 * np.abs(arrays[key]).max(),
        err_msg=f"{case['id']} {name}",
      )


def test_error_measure_detects_a_wrong_trajectory():
  """A relative error of twice the tolerance in one step is found."""
  reference = np.full((25, 4, 3), 2.0, np.float32)
  got = reference.astype(np.float64)
  got[7, 1, 2] *= 1 + 2e-5
  for tensor in (False, True):
    error = _error(got, reference, reference[0], tensor)
    np.testing.assert_allclose(error, 2e-5, rtol=1e-6)
  got[7, 1, 2] = np.nan
  with pytest.raises(AssertionError):
    _error(got, reference, reference[0], False)
