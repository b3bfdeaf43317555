"""The dense accumulator: TensorFlow's recordings, and its edges, under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scenario_recordings as recorded
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_dist.tensorflow1 import accumulator

_apply = jax.jit(accumulator.apply, static_argnames="max_staleness")
_take = jax.jit(accumulator.take, static_argnames="reduction")


class _Jitted:
  """Jitted accumulators beside the rules, one per variable."""

  def __init__(self, recording):
    self.config = recording["config"]
    self.dtype = self.config["dtype"]
    config = recording["config"]
    shapes = config.get("shapes", [config.get("shape")])
    start = config.get(
      "initial_step", config.get("initial_accumulator_step", 0)
    )
    # Where no shape is given the first gradient after a take fixes it.
    self.states = [
      accumulator.init(jax.ShapeDtypeStruct(shape or (), self.dtype), start)
      for shape in shapes
    ]
    self.replay = recorded.AccumulatorReplay(
      recording, self.on_apply, self.on_take, self.on_step
    )

  def on_apply(self, var, event, accepted):
    value = recorded.array(event["value"], self.dtype)
    state = self.states[var]
    if state.total.shape != value.shape:
      assert int(state.count) == 0
      like = jax.ShapeDtypeStruct(value.shape, self.dtype)
      state = accumulator.init(like, state.step)
    self.states[var] = _apply(state, jnp.asarray(value), event["local_step"])
    assert int(self.states[var].count) == int(state.count) + accepted

  def on_take(self, var, done):
    assert int(self.states[var].count) == len(done.value)
    self.states[var], mean, taken = _take(
      self.states[var],
      len(done.value),
      reduction=self.config.get("reduction_type", "MEAN").lower(),
    )
    assert bool(taken)
    assert int(self.states[var].step) == done.step + 1
    return mean

  def on_step(self, var, step):
    self.states[var] = accumulator.set_global_step(self.states[var], step)


@pytest.mark.parametrize("id", recorded.ids(*recorded.ACCUMULATORS))
def test_recording_under_jit(id):
  recording = recorded.RECORDINGS[id]
  with jax.enable_x64(recording["config"]["dtype"] == "float64"):
    _Jitted(recording).replay.run()


def _reference(gradients):
  """Sums one by one, divides once, all in the gradients' type."""
  total = gradients[0]
  for gradient in gradients[1:]:
    total = (total + gradient).astype(gradient.dtype)
  count = gradients[0].dtype.type(len(gradients))
  return (total / count).astype(gradients[0].dtype)


@pytest.mark.parametrize(
  "dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64]
)
@pytest.mark.parametrize("number", [3, 7])
def test_one_program_rounds_as_many_do(dtype, number):
  # A compiler that sees all of it could keep halves in float32, or multiply
  # by the reciprocal of the count.
  rng = np.random.default_rng(0)
  gradients = [rng.normal(size=4096).astype(dtype) for _ in range(number)]

  @jax.jit
  def mean(gradients):
    state = accumulator.init(gradients[0])
    for gradient in gradients:
      state = accumulator.apply(state, gradient, 0)
    return accumulator.take(state, number)[1]

  with jax.enable_x64(dtype == jnp.float64):
    actual = np.asarray(mean([jnp.asarray(g) for g in gradients]))
  np.testing.assert_array_equal(actual, _reference(gradients))


@given(
  steps=st.lists(st.integers(-1, 3), min_size=1, max_size=12),
  global_step=st.integers(0, 2),
  max_staleness=st.integers(0, 1),
)
@settings(max_examples=30)
def test_only_fresh_gradients_of_a_tree_count(
  steps, global_step, max_staleness
):
  state = accumulator.init({"a": jnp.zeros(2), "b": None}, global_step)
  total = np.zeros(2, np.float32)
  fresh = 0
  for i, local_step in enumerate(steps):
    gradient = np.array([i, np.nan if local_step < 0 else -i], np.float32)
    accepted = local_step >= global_step - max_staleness
    if accepted:
      total, fresh = gradient + total, fresh + 1
    tree = {"a": jnp.asarray(gradient), "b": None}
    state = _apply(state, tree, local_step, max_staleness=max_staleness)
  assert int(state.count) == fresh
  if fresh:
    np.testing.assert_array_equal(np.asarray(state.total["a"]), total)
  after, mean, taken = _take(state, fresh + 1)
  assert not taken
  assert int(after.count) == fresh
  assert mean["a"].tolist() == [0.0, 0.0]


def test_the_first_gradient_keeps_the_sign_of_zero():
  state = accumulator.init(jnp.ones(1))
  state = _apply(state, jnp.array([-0.0]), 0)
  _, mean, _ = _take(state, 1)
  assert np.signbit(np.asarray(mean)).tolist() == [True]


def test_accumulated_gradients_survive_set_global_step():
  state = _apply(accumulator.init(jnp.zeros(1)), jnp.ones(1), 0)
  state = accumulator.set_global_step(state, 9)
  state = _apply(state, jnp.full(1, 5.0), 8)
  assert int(state.count) == 1
  state, total, _ = _take(state, 1, reduction="sum")
  assert total.tolist() == [1.0]
  assert (int(state.step), int(state.count)) == (10, 0)


def test_steps_and_values_do_not_recompile():
  program = jax.jit(lambda *args: accumulator.apply(*args))
  state = accumulator.init(jnp.zeros(2))
  for step in range(3):
    state = program(state, jnp.full(2, float(step)), jnp.int32(step))
  assert program._cache_size() == 1


def test_an_empty_accumulator_is_never_taken():
  state, mean, taken = _take(accumulator.init(jnp.zeros(1)), 0)
  assert not taken
  assert (int(state.step), mean.tolist()) == (0, [0.0])


def test_errors_name_what_is_wrong():
  state = accumulator.init(jnp.zeros(2))
  with pytest.raises(ValueError, match=r"\(2,\), 'float32'.*\(3,\)"):
    accumulator.apply(state, jnp.zeros(3), 0)
  with pytest.raises(ValueError, match=r"reduction must be one of.*'median'"):
    accumulator.take(state, 1, "median")
