"""RETURNN's configurations give the parameters that RETURNN computed.

`tests/golden/returnn` has the recordings and the programs that made them.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import optimizers
from optax_dist.sparse import IndexedSlices, apply_updates

_FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "returnn"
_RATES = json.loads((_FOLDER / "learning_rates.json").read_text())
_TORCH = json.loads((_FOLDER / "torch.json").read_text())
_TENSORFLOW = json.loads((_FOLDER / "tensorflow.json").read_text())


def _arrays(tree):
  return {key: np.asarray(x, np.float32) for key, x in tree.items()}


def _trajectory(tx, kind, repeats=1):
  """The parameters after each step, from the recorded start and gradients."""
  params = _arrays(_TENSORFLOW["start"])
  given = [_arrays(step) for step in _TENSORFLOW["gradients"][kind] * repeats]
  given = jax.tree.map(lambda *x: np.stack(x), *given)

  @jax.jit
  def run(params, given):
    def step(carry, grads):
      params, state = carry
      updates, state = tx.update(grads, state, params)
      params = apply_updates(params, updates)
      return (params, state), params

    return jax.lax.scan(step, (params, tx.init(params)), given)[1]

  return run(params, given)


def _compare(got, case, rtol):
  for key, recorded in case["trajectory"].items():
    recorded = np.asarray(recorded, np.float32)
    np.testing.assert_array_equal(np.isnan(got[key]), np.isnan(recorded))
    np.testing.assert_allclose(got[key], recorded, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
  "case", _TENSORFLOW["cases"], ids=lambda case: case["name"]
)
def test_tensorflow_recordings_are_reproduced(case):
  """Zero, None and False are off, and all else is in RETURNN's order."""
  config = case["config"]
  l2 = _TENSORFLOW["l2"] if config.get("decouple_constraints") else None
  tx = optimizers.from_returnn_config(
    config, _TENSORFLOW["learning_rate"], l2=l2
  )
  _compare(_trajectory(tx, case["gradients"]), case, 2e-6)


@pytest.mark.parametrize(
  "case",
  _TENSORFLOW["sparse"],
  ids=lambda case: case["config"]["optimizer"]["class"],
)
def test_sparse_recordings_are_reproduced(case):
  """Norms are those of the values as they are, with a row that comes twice."""
  tx = optimizers.from_returnn_config(
    case["config"], _TENSORFLOW["learning_rate"]
  )
  params = _arrays(_TENSORFLOW["start"])
  state, rows = tx.init(params), jnp.array(_TENSORFLOW["rows"])
  for step, inputs in enumerate(_TENSORFLOW["gradients"]["normal"]):
    inputs = _arrays(inputs)
    slices = IndexedSlices(inputs["w"], rows, params["w"].shape)
    updates, state = tx.update(inputs | {"w": slices}, state, params)
    params = apply_updates(params, updates)
    for key, recorded in case["trajectory"].items():
      np.testing.assert_allclose(
        params[key], recorded[step], rtol=2e-6, atol=2e-6
      )


def _dynamic(*, global_train_step, learning_rate, **_):
  """The function of the recordings."""
  return learning_rate * 0.9 ** jnp.float32(global_train_step)


# As optax's own powers need it.
@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("case", _TORCH["cases"], ids=lambda case: case["name"])
def test_torch_recordings_are_reproduced(case):
  """PyTorch's rules; a bias decays only by PyTorch's own default."""
  config = case["config"] | {
    "backend": "torch",
    "learning_rate": 0.1,
    "dynamic_learning_rate": _dynamic,
  }
  tx = optimizers.from_returnn_config(
    config, weight_decay_mask={"w": True, "b": False}
  )
  got = _trajectory(tx, case["gradients"], _TORCH["repeats"])
  # optax's bias corrections are float32 differences of 1 and a power.
  _compare(got, case, 1e-5)


@pytest.mark.parametrize(
  "kind", ["constant", "newbob", "newbob_abs", "newbob_multi_epoch"]
)
def test_recorded_learning_rates_are_reproduced(kind):
  """Those of every epoch, from the scores before it."""
  replayed = 0
  for case in _RATES["cases"]:
    config = case["config"]
    control = config.get("learning_rate_control")
    if {"newbob_rel": "newbob", "newbob_relative": "newbob"}.get(
      control, control
    ) == kind:
      got = optimizers.returnn_learning_rates(config, case["scores"])
      np.testing.assert_allclose(got, case["rates"], rtol=1e-12)
      replayed += 1
  assert replayed > 5
