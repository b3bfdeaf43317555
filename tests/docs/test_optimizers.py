"""Each row of the page of optimizers is run: what it says is what is computed."""

import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import optimizers
from optax_dist.optimizers.keras import KERAS_NAMES, keras_arguments
from optax_dist.states import slots

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PAGE = (_ROOT / "docs/optimizers.md").read_text("utf-8")


def _rows(header):
  """The cells of each row of the table whose header begins so."""
  block = re.search(
    rf"^\| {header}.*\n\|.*\n((?:\|.*\n)+)", _PAGE, re.MULTILINE
  )
  return [
    [
      cell.strip().replace(r"\|", "|")
      for cell in re.split(r"(?<!\\)\|", line)[1:-1]
    ]
    for line in block[1].splitlines()
  ]


def _by_call(header, pattern):
  """The cells and the arguments of each row by the name that is called."""
  rows = {}
  for first, *cells in _rows(header):
    name, arguments = re.fullmatch(pattern, first).groups()
    rows[name] = arguments, cells
  return rows


_RULES = _by_call("Function", r"`(\w+)\((.*)\)`")
_KERAS = _by_call(r"`keras\(", r'`"(\w+)", (.*)`')
_DIFFERENCES = {first: cells for first, *cells in _rows("Here")}

_START = np.array([1.0, -0.5, 0.02, 2.0])
_GRADS = np.array(
  [
    [0.3, -0.2, 0.01, 1.0],
    [-0.1, -0.4, -0.02, 1.0],
    [0.2, 0.5, 0.03, -3.0],
    [0.2, -0.1, 0.0, 1e-3],
    [0.05, 0.2, -0.3, 2.0],
  ]
)


def test_tables_list_every_optimizer():
  functions = {name for name in optimizers.__all__ if name.islower()}
  assert set(_RULES) == {name for name in functions if "returnn" not in name}
  assert len(_RULES) == 19
  assert set(_KERAS) == set(KERAS_NAMES)


def _defaults(text):
  """The arguments that a cell gives, with their defaults."""
  made = {}
  exec(f"def f({text}): pass", made)
  parameters = inspect.signature(made["f"]).parameters
  return {name: p.default for name, p in parameters.items()}


@pytest.mark.parametrize("name", sorted(set(_RULES) - {"keras", "base_custom"}))
def test_tables_list_arguments_and_defaults(name):
  parameters = inspect.signature(getattr(optimizers, name)).parameters
  actual = {key: p.default for key, p in parameters.items()}
  assert _defaults(_RULES[name][0]) == actual


@pytest.mark.parametrize("name", _KERAS)
def test_tables_list_arguments_and_defaults_of_keras(name):
  inputs = _defaults(_KERAS[name][0])
  assert set(inputs) | {"decay"} == set(keras_arguments(name)) | {"decay"}
  # Each default gives what leaving it out gives.
  for arguments in (inputs, {}):
    tx = optimizers.keras(name, **arguments)
    params = jnp.float32(_START)
    state, trajectory = tx.init(params), []
    for grad in jnp.float32(_GRADS):
      updates, state = tx.update(grad, state, params)
      trajectory.append(updates)
    if arguments:
      want = trajectory
  np.testing.assert_array_equal(trajectory, want)


def _initial(cell, arguments):
  """The slots that a cell names, with their initial values."""
  result = {}
  for part in re.split(r"[;,] (?=`)", cell):
    for name in re.findall(r"`(\w+)`", part):
      result[name] = 1.0 if "**1**" in part else 0.0
      if "the argument" in part:
        result[name] = next(x for k, x in arguments.items() if "initial_" in k)
  return result


@pytest.mark.parametrize("name", sorted(set(_RULES) - {"keras", "base_custom"}))
def test_tables_list_slots_and_their_initial_values(name):
  """The rules themselves are compared with recordings: `test_golden.py`."""
  text, cells = _RULES[name]
  arguments = {"learning_rate": 0.1} | {
    key: default
    for key, default in _defaults(text).items()
    if default is not inspect.Parameter.empty and key != "learning_rate"
  }
  # Without it, `momentum` is an argument that must be given.
  arguments |= {"momentum": {"momentum": 0.9}}.get(name, {})
  initial = _initial(cells[1], arguments)
  for more in ({"centered": True}, {}) if name == "rmsprop" else ({},):
    state = getattr(optimizers, name)(**arguments | more).init(jnp.ones(4))
    if name == "rmsprop" and not more:
      initial.pop("mg")
    assert set(slots.slot_names(state)) == set(initial)
    for key, value in initial.items():
      np.testing.assert_allclose(slots.get_slot(state, "", key), value)


def _steps(tx, grads=_GRADS, start=_START):
  """The parameters after each step."""
  params = jnp.float32(start)
  state, trajectory = tx.init(params), []
  for grad in grads:
    updates, state = tx.update(jnp.float32(grad), state, params)
    params = optax.apply_updates(params, updates)
    trajectory.append(params)
  return np.stack(trajectory)


def _differ(ours, theirs, **tolerance):
  with pytest.raises(AssertionError):
    np.testing.assert_allclose(ours, theirs, **tolerance)


_agree = np.testing.assert_allclose


def _same_as_sgd():
  ours = optimizers.gradient_descent(0.1)
  np.testing.assert_array_equal(_steps(ours), _steps(optax.sgd(0.1)))
  for nesterov in (False, True):
    ours = optimizers.momentum(0.1, 0.9, use_nesterov=nesterov)
    _agree(_steps(ours), _steps(optax.sgd(0.1, 0.9, nesterov)), rtol=1e-6)


def _epsilon_of_adagrad():
  ours, theirs = (_steps(x(0.1)) for x in (optimizers.adagrad, optax.adagrad))
  first = _GRADS[0]
  want = _START - 0.1 * first / np.sqrt(0.1 + first**2 + 1e-7)
  _agree(theirs[0], want, rtol=1e-6)
  _agree(ours, _steps(optax.adagrad(0.1, eps=0.0)), rtol=1e-6)


def _defaults_of_adadelta():
  parameters = inspect.signature(optax.adadelta).parameters
  assert (parameters["rho"].default, parameters["eps"].default) == (0.9, 1e-6)
  theirs = _steps(optax.adadelta(1.0, rho=0.95, eps=1e-8))
  _agree(_steps(optimizers.adadelta(1.0)), theirs, rtol=1e-5)
  _differ(_steps(optimizers.adadelta(1.0)), _steps(optax.adadelta(1.0)))


def _start_of_rmsprop():
  # The first step is g / sqrt(0.1 g^2) from 0, and g / sqrt(0.9 + 0.1 g^2) from 1.
  tx, one = optax.rmsprop(0.1, decay=0.9, eps=1e-10), np.ones(1)
  _agree(_steps(tx, [one], one), [[1 - 0.1 / np.sqrt(0.1)]], rtol=1e-6)
  _agree(_steps(optimizers.rmsprop(0.1), [one], one), [[0.9]], rtol=1e-6)
  theirs = optax.rmsprop(0.1, decay=0.9, eps=1e-10, initial_scale=1.0)
  _agree(_steps(optimizers.rmsprop(0.1)), _steps(theirs), rtol=1e-5)
  # The buffers of momentum: ours is what was subtracted.
  ours = optimizers.rmsprop(0.1, momentum=0.5)
  theirs = optax.rmsprop(0.1, eps=1e-10, initial_scale=1.0, momentum=0.5)
  _agree(_steps(ours), _steps(theirs), rtol=1e-5)
  buffers = []
  for tx in (ours, theirs):
    state = tx.init(jnp.ones(4))
    updates, state = tx.update(jnp.float32(_GRADS[0]), state)
    buffers += [
      x for x in jax.tree.leaves(state) if np.allclose(abs(x), abs(updates))
    ]
  assert len(buffers) == 2
  _agree(buffers[0], -buffers[1], rtol=1e-5)


def _bias_of_amsgrad():
  parameters = inspect.signature(optax.amsgrad).parameters
  assert (parameters["b2"].default, parameters["eps"].default) == (0.999, 1e-8)
  # Ours begins with 0.1 g / sqrt(0.01 g^2) = sign(g), as theirs with corrections;
  # then, without them, it is faster.
  grads = np.ones((2, 1))
  ours = _steps(optimizers.amsgrad(0.1, epsilon=1e-8), grads, np.ones(1))
  theirs = _steps(optax.amsgrad(0.1, b2=0.99), grads, np.ones(1))
  _agree(theirs, [[0.9], [0.8]], rtol=1e-5)
  second = 0.19 / np.sqrt(0.0199)
  _agree(ours, [[0.9], [0.9 - 0.1 * second]], rtol=1e-5)


def _epsilon_of_adam():
  for make in (optimizers.adam, optimizers.custom_adam):
    first = _steps(make(0.1, epsilon=0.01))[0]
    theirs = _steps(optax.adam(0.1, eps=0.01 / np.sqrt(1 - 0.999)))[0]
    _agree(first, theirs, rtol=1e-5)
    _differ(first, _steps(optax.adam(0.1, eps=0.01))[0], rtol=1e-2)
  # After 1000 steps a product of float32 numbers is not their power.
  product = np.multiply.accumulate(np.full(1000, 0.999, np.float32))[-1]
  tx = optimizers.adam(0.1)
  state = tx.init(jnp.ones(1))
  step = lambda state, _: (tx.update(jnp.ones(1), state)[1], None)
  state, _ = jax.jit(lambda s: jax.lax.scan(step, s, length=999))(state)
  power = optax.tree.get(state, "beta2_power")
  assert float(power) == product


def _bias_of_nadam():
  ours = _steps(optimizers.nadam(0.1), np.ones((1, 1)), np.ones(1))
  theirs = _steps(optax.nadam(0.1), np.ones((1, 1)), np.ones(1))
  # 0.9 * 0.1 + 0.1 without corrections of its own, over 1 - 0.9.
  _agree(ours, [[1 - 0.1 * 0.19 / 0.1]], rtol=1e-5)
  _agree(theirs, [[1 - 0.1 * (0.9 * 0.1 / 0.19 + 0.1 / 0.1)]], rtol=1e-5)


def _epsilon_of_adamax():
  one = np.ones(1)
  ours = optimizers.keras("Adamax", learning_rate=0.1, epsilon=0.5)
  theirs = optax.adamax(0.1, eps=0.5)
  grads = [[1.0], [0.1]]
  m, v = 0.1 * 0.9 + 0.1 * 0.1, 0.999
  ours, theirs = _steps(ours, grads, one), _steps(theirs, grads, one)
  _agree(ours[0], theirs[0], rtol=1e-6)
  want = ours[0] - 0.1 * m / ((1 - 0.9**2) * (v + 0.5))
  _agree(ours[1], want, rtol=1e-5)
  # There, epsilon decays with the maximum.
  want = theirs[0] - 0.1 * m / (1 - 0.9**2) / (0.999 * 1.5)
  _agree(theirs[1], want, rtol=1e-5)
  _differ(ours[1], theirs[1], rtol=1e-6)


def _norm_of_leaves():
  params = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
  ours = optimizers.normalized_sgd(1.0)
  updates, _ = ours.update(params, ours.init(params), params)
  assert [float(x[0]) for x in updates.values()] == [-1.0, -1.0]
  theirs = optax.chain(optax.normalize_by_update_norm(), optax.scale(-1.0))
  updates, _ = theirs.update(params, theirs.init(params), params)
  _agree([updates["a"][0], updates["b"][0]], [-0.6, -0.8], rtol=1e-5)


def _not_in_optax():
  for name in (
    *("adagrad_da", "ftrl", "proximal_adagrad", "proximal_gradient_descent"),
    *("neural_optimizer1", "grad_variance_scaled"),
  ):
    assert not hasattr(optax, name)
    assert not hasattr(optax.contrib, name)


_PROGRAMS = {
  "`gradient_descent`, `momentum`": _same_as_sgd,
  "`adagrad`": _epsilon_of_adagrad,
  "`adadelta`": _defaults_of_adadelta,
  "`rmsprop`": _start_of_rmsprop,
  "`amsgrad`": _bias_of_amsgrad,
  "`adam`, `custom_adam`": _epsilon_of_adam,
  "`nadam`": _bias_of_nadam,
  '`keras("Adamax")`': _epsilon_of_adamax,
  "`normalized_sgd`": _norm_of_leaves,
  "`adagrad_da`, `ftrl`, `proximal_*`, `neural_optimizer1`,"
  " `grad_variance_scaled`": _not_in_optax,
}


def test_every_difference_has_a_program():
  assert set(_PROGRAMS) == set(_DIFFERENCES)


@jax.numpy_dtype_promotion("standard")  # As optax's own rules need it.
@pytest.mark.parametrize("row", _PROGRAMS)
def test_documented_differences_from_optax_hold(row):
  _PROGRAMS[row]()


def test_numbers_on_the_page_are_reproduced():
  """Those of float32 and of bfloat16 in the text."""
  said = float(re.search(r"0\.999 it differs by ([\d.e-]*\d)", _PAGE)[1])
  exact = np.float64(np.float32(1) - np.float32(0.999)) / 0.001 - 1
  np.testing.assert_allclose(abs(exact), said, rtol=0.02)
  assert 1 - jnp.bfloat16(0.999) == 0


def test_keras_learning_rates_decay_as_documented():
  """The rate is divided by 1 + decay (t - 1), except for Nadam."""
  for name in set(KERAS_NAMES) - {"Nadam"}:
    tx = optimizers.keras(name, learning_rate=0.1, decay=0.5)
    plain = optimizers.keras(
      name, learning_rate=lambda count: 0.1 / (1 + 0.5 * jnp.float32(count))
    )
    _agree(_steps(tx), _steps(plain), rtol=1e-5)
  assert "decay" not in keras_arguments("Nadam")
