"""The loop, with a step that only counts."""

import jax
import numpy as np
import pytest

from optax_dist.cli import errors
from optax_dist.cli.train import digits, loop, strategy


@pytest.fixture
def mesh():
  return jax.make_mesh(
    (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )


def _train(mesh, *, seed=0, epochs=2, metrics=None):
  """Trains on 11 images in batches of 4; returns records and what was seen."""
  size = 11
  data = digits.Batch(np.zeros((size, 8, 8, 1), np.float32), np.arange(size))
  test = digits.Batch(data.images[:10], data.labels[:10])
  seen = []

  def step(state, batch):
    assert batch.images.sharding.mesh == mesh
    seen.append(np.asarray(batch.labels).tolist())
    named = {"loss": state / 8} if metrics is None else metrics(state)
    return state + 1, {name: np.float32(x) for name, x in named.items()}

  # "Evaluates" to how many steps the state has seen.
  program = strategy.Program(
    init=lambda params: 0,
    step=jax.jit(step),
    eval_params=lambda state: {"steps": state},
  )
  compiled = loop.Compiled(0, step, lambda params: params["steps"])
  records = loop.train(
    program,
    compiled,
    mesh,
    (data, test),
    epochs=epochs,
    batch_size=4,
    seed=seed,
  )
  return records, seen


def test_records_are_in_order_and_epochs_end_with_an_evaluation(mesh):
  records, _ = _train(mesh)
  records = list(records)
  assert [r["step"] for r in records] == [1, 2, 3, 4]
  assert [r["epoch"] for r in records] == [1, 1, 2, 2]
  assert [r["loss"] for r in records] == [0, 1 / 8, 2 / 8, 3 / 8]
  # Of 10 test images; the state after the epoch's last step is evaluated.
  assert [r.get("test_accuracy") for r in records] == [None, 0.2, None, 0.4]
  assert all(r["samples_per_second"] > 0 for r in records)


def test_the_seed_decides_the_order_of_the_images(mesh):
  orders = []
  for seed in (0, 0, 1):
    records, seen = _train(mesh, seed=seed)
    list(records)
    orders.append(seen)
  assert orders[0] == orders[1] != orders[2]
  assert all(len(batch) == 4 for batch in orders[0])


def test_a_strategys_own_metrics_are_recorded(mesh):
  records, _ = _train(mesh, metrics=lambda s: {"loss": 0.5, "distance": s})
  assert [r["distance"] for r in records] == [0, 1, 2, 3]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_metric_that_is_not_finite_ends_the_training(mesh, value):
  records, _ = _train(
    mesh, metrics=lambda s: {"loss": value if s == 2 else 0.5}
  )
  with pytest.raises(errors.CommandError, match=f"{value} at step 3") as info:
    list(records)
  assert info.value.exit_code == 1


def test_steps_before_one_that_is_not_finite_are_recorded(mesh):
  records, _ = _train(
    mesh, metrics=lambda s: {"loss": np.nan if s == 2 else 0.5}
  )
  assert [next(records)["step"], next(records)["step"]] == [1, 2]
  with pytest.raises(errors.CommandError, match="diverged"):
    next(records)
