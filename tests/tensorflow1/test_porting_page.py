"""Chains on the page for TensorFlow's users have TensorFlow's numbers.

The page's blocks run one after the other, as a reader would run them, and what they
define is used here. `golden/tensorflow1/cross_shard.json` has what scripts with a
CrossShardOptimizer compute in TensorFlow 2.21, on 8 shards. The optimizers that
scripts bring along are in no TensorFlow; their rules are written here in NumPy.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import porting_page
import pytest

import optax_dist
from optax_dist import coordinator

_TESTS = pathlib.Path(__file__).resolve().parents[1]
_RECORDED = json.loads(
  (_TESTS / "golden" / "tensorflow1" / "cross_shard.json").read_text("utf-8")
)
_BATCHES = np.asarray(_RECORDED["batches"], np.float32)
N = 8
#: What the code in the page's tables uses.
_MODULES = {
  "coordinator": coordinator,
  "jnp": jnp,
  "optax": optax,
  "optax_dist": optax_dist,
}


def _case(name, what="w"):
  return np.asarray(_RECORDED["cases"][name][what], np.float32)


@pytest.fixture(scope="module")
def page():
  """The names that the page's blocks define."""
  return porting_page.blocks()[-1][1]


@pytest.fixture(scope="module")
def after():
  """Returns a function: what was defined after the block with these words."""
  blocks = porting_page.blocks()
  return lambda words: next(space for text, space in blocks if words in text)


def _placed(page, batch):
  return optax_dist.states.place(batch, page["mesh"], page["P"]("data"))


def _run(page, tx):
  """The parameters after each step of the page's own training step."""
  step, params = page["train_step_of"](tx), page["params"]
  state, seen = tx.init(params), []
  for batch in _BATCHES:
    params, state = step(params, state, _placed(page, batch))
    seen.append(np.asarray(params["w"]))
  return np.stack(seen), params, state


# --- CrossShardOptimizer ------------------------------------------------------


@pytest.mark.parametrize(
  ("name", "case"),
  [
    ("minimized", "minimize"),
    ("minimized_clipped", "compute_clip_apply"),
    ("summed", "gradients_apply"),
    ("summed_clipped", "gradients_clip_apply"),
    ("summed", "minimize_sum"),
    ("summed_clipped", "compute_clip_apply_sum"),
  ],
)
def test_each_sequence_of_calls_has_its_chain(page, name, case):
  assert page["N"] == N
  assert page["c"] == _RECORDED["bound"]
  expected = _case(case)
  got, *_ = _run(page, page[name])
  np.testing.assert_allclose(got, expected[:, 0], rtol=1e-5, atol=2e-7)


def test_the_sequences_differ():
  """They differ by more than the tolerance, so that a wrong chain would be found."""
  names = ("minimize", "compute_clip_apply", "gradients_apply")
  ends = [_case(name)[-1, 0] for name in (*names, "gradients_clip_apply")]
  for i, a in enumerate(ends):
    for b in ends[:i]:
      assert np.abs(a - b).max() > 1e-3


def test_the_first_example_trains_as_tensorflow_does(after):
  space = after('optax_dist.cross_shard("data"), optax_dist.optimizers.adam')
  got, *_ = _run(space, space["tx"])
  expected = _case("minimize_adam")[:, 0]
  np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-7)


def test_averages_use_num_updates(page):
  *_, params, state = _run(page, page["averaging"])
  got = optax_dist.averaged_params(state, params)["w"]
  expected = _case("minimize_averages", "average")[-1, 0]
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
  ("case", "size", "clips"),
  [
    ("minimize_groups", None, False),
    ("compute_clip_apply_groups", 4, True),
  ],
)
def test_groups_are_averaged(page, case, size, clips):
  """The page's rule: N is the size of a group."""
  tx = optax.chain(
    optax.clip_by_global_norm(size * page["c"]) if clips else optax.identity(),
    optax_dist.cross_shard(
      "data", axis_index_groups=[[0, 3, 5, 6], [1, 2, 4, 7]]
    ),
    page["sgd"],
  )

  def step(w, batch):
    grads = jax.grad(page["loss"])({"w": w}, batch)
    updates, _ = tx.update(grads, tx.init(grads))
    return w + updates["w"]

  step = jax.jit(jax.vmap(step, axis_name="data"))
  w = jnp.zeros((N, 3))
  for batch, expected in zip(_BATCHES, _case(case), strict=True):
    w = step(w, batch.reshape(N, 4, 3))
    np.testing.assert_allclose(w, expected, rtol=1e-5, atol=2e-7)


def test_grad_loss_is_a_cotangent(page):
  tx, params = page["minimized"], page["params"]["w"]

  def step(w, batch):
    _, pull = jax.vjp(lambda w: page["loss"]({"w": w}, batch), w)
    (grads,) = pull(jnp.float32(3))
    updates, _ = tx.update(grads, tx.init(w))
    return w + updates

  step = jax.jit(jax.vmap(step, axis_name="data"))
  w = jnp.stack([params] * N)
  for batch in _BATCHES:
    w = step(w, batch.reshape(N, 4, 3))
  np.testing.assert_allclose(w, _case("grad_loss")[-1], rtol=1e-5, atol=2e-7)


def test_parameters_outside_of_var_list_do_not_change(page):
  """With None as their gradient, or left out of the differentiated ones."""
  params = {"w": jnp.ones(3), "frozen": jnp.ones(2)}
  for tx in (page["minimized"], page["averaging"]):
    grads = {"w": jnp.ones((N, 3)), "frozen": None}
    state = tx.init(params)
    update = jax.vmap(
      lambda g, tx=tx, state=state: tx.update(g, state, params)[0],
      axis_name="data",
    )
    updates = update(grads)
    assert updates["frozen"] is None
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-6)


def test_slots_and_the_step_are_read_from_the_state(after):
  space = after('optax_dist.cross_shard("data"), optax_dist.optimizers.adam')
  *_, state = _run(space, space["tx"])
  assert optax_dist.states.slot_names(state) == ["m", "v"]
  assert optax.tree.get(state, "global_step") == len(_BATCHES)
  assert optax_dist.states.get_slot(state, "w", "m").shape == (3,)


# --- Optimizers that scripts bring along --------------------------------------

_START = {
  "dense": {
    "kernel": np.array([[1, -2, 0.5], [0.25, -1, 2]], np.float32),
    "bias": np.array([0.5, -0.25, 0], np.float32),
  },
  "LayerNorm": {"gamma": np.array([1, 2, 1], np.float32)},
  "zeros": np.zeros(2, np.float32),
}
_STEPS = 6


def _gradients():
  rng = np.random.default_rng(3)
  return [
    jax.tree.map(
      lambda x: (rng.normal(size=(N, *x.shape)) * 0.3).astype(np.float32),
      _START,
    )
    for _ in range(_STEPS)
  ]


@jax.numpy_dtype_promotion("standard")  # As where the page is read.
def _train(tx):
  """The parameters after some steps, of one replica: all are equal."""

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  step = jax.jit(
    jax.vmap(step, in_axes=(None, None, 0), axis_name="data", out_axes=0)
  )
  params, state = _START, tx.init(_START)
  for grads in _gradients():
    params, state = step(params, state, grads)
    for x in jax.tree.leaves((params, state)):
      np.testing.assert_allclose(x, np.broadcast_to(x[:1], x.shape), rtol=1e-6)
    params, state = jax.tree.map(lambda x: x[0], (params, state))
  return params


def _reference(rule, combine):
  """The same in NumPy: `rule(path, t, gradient, parameter, slots)`."""
  params = jax.tree.map(np.float64, _START)
  slots = jax.tree.map(lambda x: {}, _START)
  for t, grads in enumerate(_gradients()):
    grads = combine(jax.tree.map(np.float64, grads))
    params = jax.tree_util.tree_map_with_path(
      lambda path, w, g, s, t=t: (
        w + rule(jax.tree_util.keystr(path), t, g, w, s)
      ),
      params,
      grads,
      slots,
      is_leaf=lambda x: isinstance(x, np.ndarray),
    )
  return params


def _mean(grads):
  return jax.tree.map(lambda g: g.mean(0), grads)


def _sum_of_clipped(grads):
  squares = sum(
    np.sum(g**2, axis=tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads)
  )
  factor = 1 / np.maximum(np.sqrt(squares), 1.0)
  return jax.tree.map(lambda g: np.tensordot(factor, g, (0, 0)), grads)


def _close(got, expected):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_bert_has_no_bias_correction(page):
  """Clipped by each shard, summed, and decayed but for LayerNorm and bias."""
  rate = page["bert_rate"](0.1, num_train_steps=10, num_warmup_steps=3)

  def rule(path, t, g, w, slots):
    m = slots["m"] = 0.9 * slots.get("m", 0) + 0.1 * g
    v = slots["v"] = 0.999 * slots.get("v", 0) + 0.001 * g**2
    decay = 0 if "LayerNorm" in path or "bias" in path else 0.01
    eta = 0.1 * t / 3 if t < 3 else 0.1 * (1 - t / 10)
    return -eta * (m / (np.sqrt(v) + 1e-6) + decay * w)

  tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax_dist.cross_shard("data", reduction="sum"),
    page["adam_weight_decay"](rate),
  )
  _close(_train(tx), _reference(rule, _sum_of_clipped))
  assert optax.tree.get(tx.init(_START), "global_step") == 0


def test_optax_adamw_is_another_rule(page):
  """So the test above would find it."""
  others = [
    page["adam_weight_decay"](0.1),
    optax.adamw(0.1, eps=1e-6, weight_decay=0.01),
  ]
  mine, theirs = (
    _train(optax.chain(optax_dist.cross_shard("data"), tx)) for tx in others
  )
  assert np.abs(mine["dense"]["kernel"] - theirs["dense"]["kernel"]).max() > 0.1


@pytest.mark.parametrize(
  ("momentum", "nesterov"), [(0.9, False), (0.9, True), (0.0, False)]
)
def test_lars_follows_its_rule(page, momentum, nesterov):
  def rule(path, t, g, w, slots):
    of_w, of_g = np.linalg.norm(w), np.linalg.norm(g)
    if "bias" not in path:
      ratio = 1.0
      if of_w > 0 and of_g > 0:
        ratio = 0.02 * of_w / (of_g + 0.05 * of_w + 0.1)
      g = ratio * (g + 0.05 * w)
    a = slots["momentum"] = momentum * slots.get("momentum", 0) + 0.5 * g
    return -(0.5 * g + momentum * a) if nesterov else -a

  tx = page["lars"](
    0.5,
    momentum=momentum,
    weight_decay=0.05,
    eeta=0.02,
    epsilon=0.1,
    skip_list=["bias"],
    use_nesterov=nesterov,
  )
  tx = optax.chain(optax_dist.cross_shard("data"), tx)
  _close(_train(tx), _reference(rule, _mean))


def test_adafactor_follows_its_rule(page):
  root = lambda x: np.sqrt(np.mean(x**2))

  def rule(path, t, g, w, slots):
    decay = 1 - (t + 1.0) ** -0.8
    square = g**2 + 1e-30
    mix = lambda name, x: slots.__setitem__(
      name, decay * slots.get(name, 0) + (1 - decay) * x
    )
    if g.ndim == 2:
      mix("vr", square.mean(1))
      mix("vc", square.mean(0))
      rows = 1 / np.sqrt(slots["vr"] / slots["vr"].mean())
      x = g * rows[:, np.newaxis] / np.sqrt(slots["vc"])
    else:
      mix("v", square)
      x = g / np.sqrt(slots["v"])
    x = x / max(1.0, root(x))
    return -min((t + 1.0) ** -0.5, 0.01) * max(root(w), 1e-3) * x

  tx = optax.adafactor(page["t2t_rate"], min_dim_size_to_factor=1)
  tx = optax.chain(optax_dist.cross_shard("data"), tx)
  _close(_train(tx), _reference(rule, _mean))


def test_adamw_follows_its_rule():
  """The decay is not multiplied by the learning rate."""

  def rule(path, t, g, w, slots):
    m = slots["m"] = 0.9 * slots.get("m", 0) + 0.1 * g
    v = slots["v"] = 0.999 * slots.get("v", 0) + 0.001 * g**2
    rate = 0.1 * np.sqrt(1 - 0.999 ** (t + 1)) / (1 - 0.9 ** (t + 1))
    return -0.05 * w - rate * m / (np.sqrt(v) + 1e-8)

  names = {"rate": 0.1, "weight_decay": 0.05}
  tx = eval(porting_page.code("AdamWOptimizer"), names | _MODULES)
  tx = optax.chain(optax_dist.cross_shard("data"), tx)
  _close(_train(tx), _reference(rule, _mean))


def test_contrib_adams_follow_their_rules():
  """Dense, by the rules of their sources."""

  def rule(name):
    def step(path, t, g, w, slots):
      m = slots["m"] = 0.9 * slots.get("m", 0) + 0.1 * g
      if name == "adamax":
        v = slots["v"] = np.maximum(0.999 * slots.get("v", 0), np.abs(g))
        return -0.001 / (1 - 0.9 ** (t + 1)) * m / (v + 1e-8)
      v = slots["v"] = 0.999 * slots.get("v", 0) + 0.001 * g**2
      m = 0.9 * m + 0.1 * g if name == "nadam" else m
      rate = 0.001 * np.sqrt(1 - 0.999 ** (t + 1)) / (1 - 0.9 ** (t + 1))
      return -rate * m / (np.sqrt(v) + 1e-8)

    return step

  _, lazy, nadam, adamax = porting_page.row("LazyAdamOptimizer").split("`")[
    1::2
  ]
  for name, code in {"lazy": lazy, "nadam": nadam, "adamax": adamax}.items():
    tx = eval(f"optax_dist.optimizers.{code}", dict(_MODULES))
    tx = optax.chain(optax_dist.cross_shard("data"), tx)
    _close(_train(tx), _reference(rule(name), _mean))


def test_model_averages_follow_their_rule():
  names = {"opt": optax.sgd(1.0), "num_worker": 2}
  code = porting_page.code("ModelAverageOptimizer")
  tx = eval(code.replace("=100", "=3"), names | _MODULES)
  params = jnp.zeros(2)
  state = tx.init(params[0])
  axes = optax_dist.states.state_axes(state)

  def step(gradient, state, params):
    updates, state = tx.update(gradient, state, params)
    return params + updates, state

  step = jax.jit(
    jax.vmap(step, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name="data")
  )
  seen = []
  for _ in range(6):
    params, state = step(jnp.array([-1.0, -3.0]), state, params)
    seen.append(params.tolist())
  alone = [[1, 3], [2, 6]]
  together = [6, 6]
  expected = [*alone, together, [7, 9], [8, 12], [12, 12]]
  np.testing.assert_allclose(seen, expected, rtol=1e-6)


# --- The other two ------------------------------------------------------------


def _own_gradients(batch):
  """Each replica's gradient of the page's loss, at zero."""
  batch = np.float64(batch).reshape(N, -1, 3)
  return -2 * batch.mean(1)


def test_sync_replicas_averages_arrived_gradients(after):
  space = after("replicas_to_aggregate=max(1, N - 2)")
  g = _own_gradients(space["batch"])[: N - 1].mean(0)
  # Adam's first step.
  m, v = 0.1 * g, 0.001 * g**2
  rate = 1e-3 * np.sqrt(1 - 0.999) / (1 - 0.9)
  expected = -rate * m / (np.sqrt(v) + 1e-8)
  np.testing.assert_allclose(space["trained"]["w"], expected, rtol=1e-4)
  assert optax.tree.get(space["state"], "global_step") == 1


def test_each_gradient_counts_without_sync_replicas():
  """`docs/porting_a_parameter_server_job.md` has the two arguments."""
  page = porting_page.PATH.with_name("porting_a_parameter_server_job.md")
  arguments = "replicas_to_aggregate=1, max_staleness=None"
  assert page.read_text("utf-8").count(f", {arguments}\n") == 1

  def work(replica):
    accepted = [replica.step(np.float32(-1)).accepted for _ in range(5)]
    return accepted, replica.global_step, float(replica.params)

  results = eval(
    f"coordinator.run_embedded(work, 3, opt, jnp.float32(0), {arguments})",
    {"work": work, "opt": optax.sgd(1.0)} | _MODULES,
  )
  for accepted, step, param in results:
    assert all(accepted)
    assert param == step  # Of gradients that are all equal.


def test_elastic_averages_start_at_the_center(after):
  space = after("optax_dist.elastic_average(")
  expected = -0.1 * _own_gradients(space["batch"])
  np.testing.assert_allclose(space["replicas"]["w"], expected, rtol=1e-5)
  np.testing.assert_array_equal(space["evaluated"]["w"], np.zeros(3))


def test_total_num_replicas_defaults_to_the_size_of_the_axis():
  """TensorFlow takes `replicas_to_aggregate`: no backup replicas."""

  def step(gradient):
    tx = optax_dist.sync_replicas(
      optax.sgd(1.0), "data", replicas_to_aggregate=2
    )
    updates, state = tx.update(gradient, tx.init(gradient), gradient)
    return updates, state.global_step

  updates, steps = jax.vmap(step, axis_name="data")(jnp.arange(4.0))
  np.testing.assert_array_equal(updates, [-1.5] * 4)
  np.testing.assert_array_equal(steps, [1] * 4)


def test_variables_of_the_graph_are_in_the_state(after):
  space = after("replicas_to_aggregate=max(1, N - 2)")
  own = space["state"].replica.value
  late = np.arange(N) == N - 1
  np.testing.assert_array_equal(own.local_step, np.where(late, 0, 1))
  np.testing.assert_array_equal(own.gradient_sum["w"], np.zeros((N, 3)))
  np.testing.assert_array_equal(own.absent, late)
  restored = optax_dist.states.resize_replicas(
    space["state"], N + 1, departed="fold"
  )
  assert restored.replica.value.local_step[-1] == 1


def test_variables_of_the_custom_getter_are_in_the_state(after):
  space = after("optax_dist.elastic_average(")
  state = space["state"]
  np.testing.assert_array_equal(state.replica.value.local_step, [1] * N)
  np.testing.assert_array_equal(state.center["w"], np.zeros(3))
  local_center = state.replica.value.local_center["w"]
  np.testing.assert_array_equal(local_center, np.zeros((N, 3)))
  assert optax.tree.get(state, "global_step") == 0


@pytest.mark.parametrize("inner", ["optax", "optimizers"])
def test_global_step_is_found_in_any_chain(inner):
  """Of `sync_replicas` and `elastic_average`, whatever is in them."""
  opt = {
    "optax": optax.adam(0.1),
    "optimizers": optax_dist.optimizers.adam(0.1),
  }[inner]
  wrapped = [
    optax_dist.sync_replicas(
      opt, "data", replicas_to_aggregate=2, total_num_replicas=2
    ),
    optax_dist.elastic_average(
      opt, "data", num_replicas=2, learning_rate=0.1, communication_period=1
    ),
  ]
  for tx in wrapped:
    tx = optax.chain(optax.clip(1.0), tx)
    params = jnp.ones((2, 3))
    state = tx.init(params[0])
    axes = optax_dist.states.state_axes(state)
    update = jax.vmap(
      tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name="data"
    )
    with jax.numpy_dtype_promotion("standard"):
      for _ in range(2):
        _, state = update(params, state, params)
    assert optax.tree.get(state, "global_step") == 2
