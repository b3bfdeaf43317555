"""Each row of the tables for RETURNN's users has a program that is run.

What `from_returnn_config` reads is compared with recordings of RETURNN; the other
calls are taken from the page itself.
"""

import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist import optimizers

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PAGE = (_ROOT / "docs/returnn.md").read_text("utf-8")
_GOLDEN = _ROOT / "tests/golden/returnn"
_TENSORFLOW = json.loads((_GOLDEN / "tensorflow.json").read_text())
_JAX = json.loads((_GOLDEN / "jax.json").read_text())
_TORCH = json.loads((_GOLDEN / "torch.json").read_text())
_RATES = json.loads((_GOLDEN / "learning_rates.json").read_text())
_SGD = {"class": "GradientDescent"}


def _tables():
  """The rows of each table, as lists of cells, by the header's first cells."""
  result = {}
  for block in re.findall(r"(?:^\|.*\n)+", _PAGE, re.MULTILINE):
    header, _, *rows = [
      [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
      for line in block.splitlines()
    ]
    result.setdefault(tuple(header), []).extend(rows)
  return result


_TABLES = _tables()
_HEADER = ("RETURNN", "what it does there", "here")


def _row(first, header=_HEADER):
  """The cells of the row that begins with a code."""
  rows = [r for r in _TABLES[header] if r[0].startswith(f"`{first}")]
  assert len(rows) == 1, first
  return rows[0]


def _call(row, start):
  """The code in a row that begins so."""
  codes = [c for c in re.findall(r"`([^`]+)`", row[-1]) if c.startswith(start)]
  assert len(codes) == 1, (start, row)
  return codes[0]


def _recorded():
  """The options of all recordings, and the classes of PyTorch's."""
  cases = _TENSORFLOW["cases"] + _TORCH["cases"] + _RATES["cases"]
  options = {key for case in cases for key in case["config"]}
  classes = {case["config"]["optimizer"]["class"] for case in _TORCH["cases"]}
  return options, classes


def _names(cells):
  return {
    re.match(r"[\w.]+", code)[0].lower()
    for code in re.findall(r"`([^`]+)`", cells)
    if code[0] not in '{"'
  }


#: Rows with a program below, or in tests/optimizers/test_returnn_config.py.
_WITH_TESTS = """use_horovod horovod_reduce_type horovod_avg_grad
horovod_param_sync_step horovod_param_sync_time_diff maximize_grad_norm
gradient_noise gradient_clip_global_norm_tag global_norm_tag updater_opts
extra_updates horovod_scale_lr learning_rate_control_error_measure amsgrad dampening
adafactor asgd lbfgs muon rprop sparseadam returnn.torch.optim.lion.lion nadam
num_allowed_consec_invalid_gradient_steps grad_clip param_groups_custom
torch_distributed torch_amp grad_scaler reset_updater_vars_mod_step pretrain
pretrain_learning_rate""".split()  # noqa: SIM905


def test_every_row_has_a_program():
  options, classes = _recorded()
  rows = [row for table in _TABLES.values() for row in table]
  named = set().union(*(_names(row[0]) for row in rows)) - {"l2"}
  assert len(rows) > 45
  assert named - set(_WITH_TESTS) <= options | classes
  # Each entry of the list is still used.
  assert set(_WITH_TESTS) <= named


@pytest.mark.parametrize("option", sorted(_recorded()[0]))
def test_every_recorded_option_is_on_the_page(option):
  assert re.search(rf"`\"?{option}\b", _PAGE), option


def _start():
  return {k: np.float32(x) for k, x in _TENSORFLOW["start"].items()}


def _given(kind="normal"):
  return [
    {key: np.float32(x) for key, x in step.items()}
    for step in _TENSORFLOW["gradients"][kind]
  ]


def _compare(tx, recorded, grad=lambda params, given: given, before=None):
  params = {key: _start()[key] for key in recorded["trajectory"]}
  state = tx.init(params)
  update = jax.jit(tx.update)
  for step, given in enumerate(_given()):
    given = {key: given[key] for key in params}
    state = before(step, state, params) if before else state
    updates, state = update(grad(params, given), state, params)
    params = optax.apply_updates(params, updates)
    for key, steps in recorded["trajectory"].items():
      np.testing.assert_allclose(params[key], steps[step], rtol=2e-6, atol=2e-6)


def test_program_for_maximize_grad_norm_works():
  recorded = _TENSORFLOW["maximized"]
  code = _call(_row("maximize_grad_norm"), "jax.grad")

  def grad(params, given):
    loss = lambda p: sum(jnp.sum(p[k] * p[k] * given[k]) / 2 for k in p)
    names = {"jax": jax, "optax": optax, "loss": loss, "c": recorded["factor"]}
    return eval(code, names)(params)

  tx = optimizers.from_returnn_config({"optimizer": _SGD}, 0.1)
  _compare(tx, recorded, grad)


def test_program_that_resets_the_state_works():
  recorded = _TENSORFLOW["reset"]
  code = _call(_row("reset_updater_vars_mod_step"), "state = ")
  tx = optimizers.from_returnn_config("adam", 0.1)

  def before(step, state, params):
    names = {"tx": tx, "params": params, "state": state}
    if step % recorded["steps"] == 0:
      exec(code, names)
    return names["state"]

  _compare(tx, recorded, before=before)


def test_program_for_updater_opts_of_a_layer_works():
  recorded = _TENSORFLOW["of_layers"]
  code = _call(_row("updater_opts"), "optax.partition")
  make = functools.partial(
    optimizers.from_returnn_config, learning_rate=_TENSORFLOW["learning_rate"]
  )
  names = {
    "optax": optax,
    "from_returnn_config": make,
    "config": {"optimizer": _SGD, "gradient_clip_norm": 1.0},
    "updater_opts": recorded["layer"],
    "labels": {"w": "layer", "b": "others"},
  }
  _compare(eval(code, names), recorded)


def test_program_for_decouple_constraints_before_2022_works():
  """With its schedule; the row has the constant one."""
  recorded = _TENSORFLOW["decay_of_2021"]
  rates = np.float32(recorded["rates"])
  code = _call(_row("decouple_constraints` before"), "optax.chain")
  assert "0.05 * l2" in code
  names = {"optax": optax}
  params = {"w": _start()["w"]}
  # Adam with an injected rate, and the page's decay with that of each step.
  make = lambda rate: optimizers.from_returnn_config("adam", rate)
  adam = optax.inject_hyperparams(make)(rate=1.0)
  state = adam.init(params)
  for step, inputs in enumerate(_given()):
    state = optax.tree.set(state, rate=jnp.float32(rates[step]))
    l2 = recorded["l2"] * float(rates[step] / rates[0])
    updates, state = adam.update({"w": inputs["w"]}, state, params)
    # The last of the chain, after the optimizer.
    tx = eval(code, names | {"l2": l2, "tx": optax.identity()})
    updates, _ = tx.update(updates, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    want = recorded["trajectory"]["w"][step]
    np.testing.assert_allclose(params["w"], want, rtol=2e-6, atol=2e-6)


def _on_replicas(tx, given, start):
  """The parameters of each of two replicas after their gradients."""

  def run(given, params):
    state = tx.init(params)
    for grad in given:
      updates, state = tx.update(grad, state, params)
      params = optax.apply_updates(params, updates)
    return params

  args = given, jnp.stack([start, start])
  return maps.mapped("shard_map_vma", run, args, 2)(*args)


def _horovod(first, n=None):
  row = _row(first)
  start = "optax_dist" if n else "optax.chain"
  names = {
    "optax": optax,
    "optax_dist": optax_dist,
    "tx": optimizers.from_returnn_config({"optimizer": _SGD}, 0.1),
    "n": n,
  }
  return eval(_call(row, start), names)


def test_program_for_horovod_works():
  inputs = np.random.RandomState(1).randn(2, 6, 3).astype("float32")
  start = jnp.ones(3)
  total = inputs.sum(axis=(0, 1))
  for row, scale in (("use_horovod", 0.1), ("horovod_avg_grad", 0.05)):
    got = _on_replicas(_horovod(row), inputs, start)
    for params in got:
      np.testing.assert_allclose(params, 1 - scale * total, rtol=1e-5)
  # Parameters are averaged after steps 2, 4 and 6, so that it is their mean.
  tx = _horovod('horovod_reduce_type = "param"', n=2)
  got = _on_replicas(tx, inputs, start)
  np.testing.assert_allclose(got[0], 1 - 0.05 * total, rtol=1e-5)
  np.testing.assert_array_equal(got[0], got[1])
  after_five = _on_replicas(tx, inputs[:, :5], start)
  mean = 1 - 0.05 * inputs[:, :4].sum(axis=(0, 1))
  np.testing.assert_allclose(after_five, mean - 0.1 * inputs[:, 4], rtol=1e-5)


def test_program_for_distributed_pytorch_works():
  header = ("RETURNN", "what its PyTorch backend does", "here")
  code = _call(_row("torch_distributed", header), "optax.chain")
  tx = optimizers.from_returnn_config({"class": "sgd"}, 0.1, backend="torch")
  tx = eval(code, {"optax": optax, "optax_dist": optax_dist, "tx": tx})
  inputs = np.random.RandomState(1).randn(2, 3, 3).astype("float32")
  for params in _on_replicas(tx, inputs, jnp.ones(3)):
    want = 1 - 0.1 * inputs.mean(axis=0).sum(axis=0)
    np.testing.assert_allclose(params, want, rtol=1e-5)


def test_program_for_accumulation_by_sync_replicas_works():
  """A step for every two gradients of each replica, with the mean of the four."""
  code = _call(_row("accum_grad_multiple_step = n"), "optax_dist.sync")
  tx = optimizers.from_returnn_config({"optimizer": _SGD}, 0.1)
  tx = eval(code, {"optax_dist": optax_dist, "tx": tx, "n": 2, "N": 2})
  inputs = np.random.RandomState(1).randn(2, 4, 3).astype("float32")
  total = inputs.sum(axis=(0, 1))
  for params in _on_replicas(tx, inputs, jnp.ones(3)):
    np.testing.assert_allclose(params, 1 - 0.1 * total / 4, rtol=1e-5)


@jax.numpy_dtype_promotion("standard")  # As optax's own rules need it.
@pytest.mark.parametrize("recorded", _JAX["cases"])
def test_program_for_the_jax_backend_works(recorded):
  """The calls that the page names, against RETURNN's own backend."""
  arguments = dict(recorded["config"]["optimizer"])
  name = arguments.pop("class")
  learning_rate = _TENSORFLOW["learning_rate"]
  assert f"`optax.{name}" in _PAGE
  tx = getattr(optax, name)(learning_rate, **arguments)
  if limit := recorded["config"].get("gradient_clip_global_norm"):
    tx = optax.chain(optax.clip_by_global_norm(limit), tx)
  _compare(tx, recorded)


def test_program_for_a_table_of_learning_rates_works():
  """The page's schedule: RETURNN's rates, in a program of the same size."""
  code = _call(_row("learning_rates", ("RETURNN", "here")), "jnp.asarray")
  listed = {5: 0.1 * np.arange(1, 6), 500: np.linspace(0.1, 1.0, 500)}
  sizes = {}
  for epochs, rates in listed.items():
    config = {"optimizer": _SGD, "learning_rates": rates.tolist()}
    names = {
      "jnp": jnp,
      "optimizers": optimizers,
      "config": config,
      "epochs": epochs + 2,
    }
    table = eval(code, names)
    schedule = lambda step: table[  # noqa: B023
      jnp.minimum(step // 3, len(table) - 1)  # noqa: B023
    ]
    tx = optimizers.from_returnn_config(config, schedule)
    state = tx.init(jnp.ones([]))
    update = jax.jit(tx.update)
    sizes[epochs] = len(update.trace(jnp.ones([]), state).jaxpr.eqns)
    if epochs == 5:
      for step in range(3 * 9):
        updates, state = update(jnp.ones([]), state)
        # The last of the list stays.
        want = rates[min(step // 3, 4)]
        np.testing.assert_allclose(-updates, want, rtol=1e-6)
  assert sizes[5] == sizes[500]


def test_program_for_dynamic_learning_rate_mapping_works():
  row = _row('dynamic_learning_rate = {"interval"', ("RETURNN", "here"))
  code = _call(row, "lambda")
  schedule = eval(code, {"jnp": jnp, "rate": 0.1, "d": 0.5, "n": 3})
  recorded = next(
    case
    for case in _TENSORFLOW["cases"]
    if case["name"] == "dynamic_learning_rate_dict_GradientDescent"
  )
  _compare(optimizers.from_returnn_config(_SGD, schedule), recorded)


def test_program_for_newbob_works():
  """Where RETURNN ends, which one rule for all would miss."""
  recorded = _RATES["cases"][0]
  assert recorded["config"]["newbob_multi_num_epochs"] == 6
  row = _row('learning_rate_control = "newbob"', ("RETURNN", "here"))
  code = _call(row, "optimizers.")
  names = {"optimizers": optimizers, "config": recorded["config"]}
  for epochs in range(len(recorded["scores"]) + 1):
    rate = eval(code, names | {"scores": recorded["scores"][:epochs]})
    np.testing.assert_allclose(rate, recorded["rates"][epochs], rtol=1e-12)


def test_program_for_pretraining_works():
  """The page's list: the rates of two epochs, and of the first after them."""
  row = _row("pretrain`", ("RETURNN", "here"))
  config = eval("{" + _call(row, '"learning_rates"') + "}")
  config |= {"learning_rate": 0.001, "learning_rate_control": "newbob"}
  rates = optimizers.returnn_learning_rates(config, [2.0, 2.0, 2.0])
  np.testing.assert_allclose(rates, [0.0001, 0.0001, 0.001, 0.0005])
  config |= {"pretrain": "default", "use_learning_rate_control_always": True}
  assert optimizers.returnn_learning_rates(config, [2.0, 2.0, 2.0]) == rates


def test_a_decay_may_be_a_function():
  config = {
    "learning_rate": 1.0,
    "learning_rate_control": "newbob",
    "learning_rate_decay": lambda rate: rate / (1 + rate),
    "min_learning_rate": 0.3,
  }
  rates = optimizers.returnn_learning_rates(config, [1.0] * 5)
  np.testing.assert_allclose(rates, [1, 1, 1 / 2, 1 / 3, 0.3, 0.3])


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"learning_rate_control": "new"}, "must be one of constant, newbob"),
    ({"newbob_multi_num_epochs": 0}, "at least 1, got 0 and 1"),
    ({"newbob_relative_error_grow_threshold": 0.1}, "must be at most"),
    ({"learning_rates": "[0.1]"}, "a list or a mapping by epoch"),
    ({"learning_rate_control": "newbob_rel"}, "scores must not be 0"),
    ({"pretrain": "default"}, "list the rate of each of its epochs"),
  ],
)
def test_learning_rate_options_are_checked(change, message):
  config = {
    "learning_rate_control": "newbob_multi_epoch",
    "newbob_multi_update_interval": 1,
  }
  with pytest.raises(ValueError, match=message):
    optimizers.returnn_learning_rates(config | change, [1.0, 0.0, 0.0])


@pytest.mark.parametrize(
  "row", _TABLES["RETURNN", "`optimizer` today"], ids=lambda row: row[0]
)
def test_old_names_are_accepted(row):
  """The value in the page is what the old names stand for."""
  today = eval(re.search(r"`(\{[^`]+\})`", row[1])[1])
  old = re.search(r"`([^`]+)`", row[0])
  if old is None:  # None of them.
    old, learning_rate = {"optimizer": today}, 0.1
  else:
    name, value = old[1].split(" = ")
    old, learning_rate = {name: eval(value)}, 0.1
  got, want = (
    optimizers.from_returnn_config(config, learning_rate)
    for config in (old, {"optimizer": today})
  )
  params, grads = _start(), _given()[0]
  got, want = (
    tx.update(grads, tx.init(params), params)[0] for tx in (got, want)
  )
  jax.tree.map(np.testing.assert_array_equal, got, want)


@jax.numpy_dtype_promotion("standard")  # As optax.scale_by_adam needs it.
def test_first_steps_of_nadam_are_those_of_returnn():
  """The page's two numbers."""
  match = re.search(
    r"is ([\d.e-]+) in TensorFlow and ([\d.e-]+) in PyTorch",
    (" ".join(_PAGE.split())),
  )
  for backend, want in zip(
    ("tensorflow", "torch"), match.groups(), strict=True
  ):
    tx = optimizers.from_returnn_config("nadam", 1e-3, backend=backend)
    updates, _ = tx.update(jnp.ones([]), tx.init(jnp.ones([])))
    np.testing.assert_allclose(-updates, float(want), rtol=1e-3)


@pytest.mark.parametrize(
  "option", ["num_allowed_consec_invalid_gradient_steps", "torch_amp"]
)
def test_nonfinite_steps_are_skipped(option):
  header = ("RETURNN", "what its PyTorch backend does", "here")
  row = _row(option, header)
  config = {"optimizer": {"class": "sgd"}, "backend": "torch"}
  config |= {"torch_amp": "float16", "grad_scaler": {}}  # Not read.
  tx = optimizers.from_returnn_config(config, 0.1)
  tx = eval(_call(row, "optax."), {"optax": optax, "tx": tx, "n": 2})
  params = jnp.ones(2)
  state = tx.init(params)
  for grad, want in ((1.0, -0.1), (jnp.nan, 0.0), (jnp.inf, 0.0), (1.0, -0.1)):
    updates, state = tx.update(jnp.full(2, grad), state, params)
    np.testing.assert_allclose(updates, want)
