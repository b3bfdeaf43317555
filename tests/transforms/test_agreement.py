"""Shared state is equal on all replicas, or the step is refused by name."""

import every_optimizer
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optax import contrib

import optax_dist

N = 4
AXIS = maps.AXIS
PARAMS = {
  "w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
  "b": np.linspace(0, 1, 4, dtype=np.float32),
}
BATCH = {
  "x": np.random.default_rng(0).normal(size=(2 * N, 3)).astype(np.float32),
  "y": np.random.default_rng(1).normal(size=(2 * N, 4)).astype(np.float32),
}
cross_shard = optax_dist.cross_shard


def _loss(params, batch):
  out = batch["x"] @ params["w"] + params["b"]
  return jnp.mean((out - batch["y"]) ** 2)


def _reduced(**kwargs):
  return optax.chain(cross_shard(AXIS, **kwargs), optax.sgd(0.1))


def _from(update):
  """A stateless transformation from a function of each gradient."""
  return optax.stateless(lambda updates, _: jax.tree.map(update, updates))


@pytest.fixture(autouse=True)
def _as_optax_needs():
  """Some of its transformations promote dtypes and ranks."""
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


@jax.custom_jvp
def _with_rule(x):
  return 2 * x


_with_rule.defjvp(lambda xs, ts: (2 * xs[0], 2 * ts[0]))


def _delayed(x):
  """A scan in which the gradient reaches the result after two iterations."""

  def body(carry, _):
    old, new = carry
    return (new, x), old

  (old, _), _ = jax.lax.scan(body, (jnp.zeros_like(x),) * 2, None, length=3)
  return old


def _counted(x):
  """A loop whose number of iterations is a replica's own."""
  _, out = jax.lax.while_loop(
    lambda c: c[0] < x.sum(),
    lambda c: (c[0] + 1.0, c[1] + 1.0),
    (jnp.float32(0), jnp.zeros_like(x)),
  )
  return out


_LABELS = {"w": "train", "b": "rest"}
_GRADIENT_OF_ALL = lambda x: jax.lax.psum(x, AXIS)

#: By name: a transformation, and what the error names.
REFUSED = {
  "nothing": (lambda: optax.sgd(0.1), r"parameters \['b'\], \['w'\] differ"),
  "adam": (lambda: optax.adam(0.1), r"parameters \['b'\], \['w'\] differ"),
  "masked": (
    lambda: optax.chain(
      optax.masked(cross_shard(AXIS), {"w": True, "b": False}), optax.sgd(0.1)
    ),
    r"parameters \['b'\] differ",
  ),
  "partition": (
    lambda: optax.partition(
      {"train": _reduced(), "rest": optax.sgd(0.1)}, _LABELS
    ),
    r"parameters \['b'\] differ",
  ),
  "sometimes": (
    lambda: optax.chain(
      optax.conditionally_transform(cross_shard(AXIS), lambda step: step < 2),
      optax.sgd(0.1),
    ),
    "parameters .* differ",
  ),
  "groups": (
    lambda: _reduced(axis_index_groups=[[0, 1], [2, 3]]),
    r"parameters .*`axis_index_groups` makes only the replicas of a group",
  ),
  "momentum before": (
    lambda: optax.chain(optax.trace(0.9), _reduced()),
    r"state \[0\].trace\['b'\].*per_replica\(..., 'data', 'trace'\)",
  ),
  "MultiSteps around": (
    lambda: optax.MultiSteps(_reduced(), 2),
    r"state .acc_grads\['b'\].*per_replica\(..., 'data', 'acc_grads'\)",
  ),
  "apply_if_finite around": (
    lambda: optax.apply_if_finite(_reduced(), 3),
    r"communication over axis 'data' \(psum\) in a branch or a loop",
  ),
  "line search before": (
    lambda: optax.chain(
      optax.scale_by_backtracking_linesearch(3), cross_shard(AXIS)
    ),
    "in a branch or a loop",
  ),
  "SAM around": (
    lambda: contrib.sam(_reduced(), optax.sgd(0.1)),
    "parameters .* differ",
  ),
  "mechanize around": (
    lambda: contrib.mechanize(_reduced()),
    "parameters .* differ",
  ),
  "index": (
    lambda: optax.chain(
      _reduced(), _from(lambda x: x + jax.lax.axis_index(AXIS))
    ),
    "parameters .* differ",
  ),
  "part": (
    lambda: _from(
      lambda x: jnp.resize(
        jax.lax.psum_scatter(x, AXIS, scatter_dimension=x.ndim - 1, tiled=True),
        x.shape,
      )
    ),
    "parameters .* differ",
  ),
  "neighbour": (
    lambda: _from(
      lambda x: jax.lax.ppermute(
        _GRADIENT_OF_ALL(x), AXIS, [(i, i + 1) for i in range(N - 1)]
      )
    ),
    "parameters .* differ",
  ),
  "host": (
    lambda: _from(lambda x: io_callback(np.asarray, x, _GRADIENT_OF_ALL(x))),
    "parameters .* differ",
  ),
  "scan": (lambda: _from(_delayed), "parameters .* differ"),
  "while": (lambda: _from(_counted), "parameters .* differ"),
  "call": (lambda: _from(jax.jit(_with_rule)), "parameters .* differ"),
  "remat": (
    lambda: _from(lambda x: _GRADIENT_OF_ALL(x) + jax.checkpoint(jnp.sin)(x)),
    "parameters .* differ",
  ),
  "choice": (
    lambda: _from(
      lambda x: jax.lax.cond(
        x.sum() > 0, jnp.ones_like, jnp.zeros_like, _GRADIENT_OF_ALL(x)
      )
    ),
    "parameters .* differ",
  ),
}


def _by_train_step(tx, mesh, axis=AXIS):
  step = optax_dist.train_step(_loss, tx, mesh, axis)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    state = jax.eval_shape(tx.init, PARAMS)
  jax.eval_shape(step, PARAMS, state, BATCH)


def _by_under_jit(tx, mesh, axis=AXIS):
  tx = optax_dist.under_jit(tx, axis, mesh=mesh)
  state = jax.eval_shape(tx.init, PARAMS)
  gradients = jax.tree.map(lambda x: np.stack([x] * N), PARAMS)
  jax.eval_shape(tx.update, gradients, state, PARAMS)


@pytest.mark.parametrize("name", REFUSED)
def test_step_after_which_replicas_would_differ_is_refused(name):
  make, message = REFUSED[name]
  with pytest.raises(ValueError, match=f"train_step: .*{message}"):
    _by_train_step(make(), maps.mesh(N))
  if name != "line search before":  # It would have to be given a function.
    with pytest.raises(ValueError, match=f"under_jit: .*{message}"):
      _by_under_jit(make(), maps.mesh(N))


_OF_SHARDS = {
  "nothing": (lambda: optax.sgd(0.1), r"parameters .* along axis 'data'"),
  "apply_if_finite around": (
    lambda: optax.apply_if_finite(_reduced(), 3),
    r"branch or a loop mixes.*optax\.chain\(optax_dist\.cross_shard",
  ),
  "frozen": (
    lambda: optax.partition(
      {"train": _reduced(), "rest": optax.set_to_zero()}, _LABELS
    ),
    "as far as JAX can tell: reduce all",
  ),
  "norm of a shard": (
    lambda: optax.chain(_reduced(), optax.clip_by_global_norm(1.0)),
    r"along axis 'model'.*optax_dist\.clip_by_global_norm over all axes",
  ),
}


@pytest.mark.parametrize("name", _OF_SHARDS)
def test_check_covers_parameters_sharded_over_a_model_axis(name):
  make, message = _OF_SHARDS[name]
  mesh = jax.make_mesh((2, 2), (AXIS, "model"), axis_types=(AxisType.Auto,) * 2)
  specs = {"w": P(None, "model"), "b": P()}
  tx = optax_dist.under_jit(make(), AXIS, mesh=mesh, param_specs=specs)
  gradients = jax.tree.map(lambda x: np.stack([x] * 2), PARAMS)
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(tx.update, gradients, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("name", ["nothing", "momentum before"])
def test_check_precedes_all_computation_on_explicit_axes(name):
  make, message = REFUSED[name]
  step = optax_dist.train_step(_loss, make(), maps.mesh(N, True), AXIS)
  params, state = step.init(PARAMS)
  with pytest.raises(ValueError, match=message):
    step(params, state, BATCH)
  jax.tree.map(np.testing.assert_array_equal, params, PARAMS)


def test_each_of_several_axes_must_be_reduced():
  mesh = jax.make_mesh(
    (2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2
  )
  names = ("data", "fsdp")
  message = r"differ between replicas along axis 'fsdp'.*\('data', 'fsdp'\)"
  with pytest.raises(ValueError, match=message):
    _by_train_step(_reduced(), mesh, names)
  both = optax.chain(cross_shard("fsdp"), _reduced())
  _by_train_step(both, mesh, names)
  _by_train_step(optax.chain(cross_shard(names), optax.adam(0.1)), mesh, names)


_AFTER = {
  "adafactor": lambda: optax.adafactor(0.1),
  "adam": lambda: optax.adam(0.1),
  "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
  "cocob": contrib.cocob,
  "conditionally_mask": lambda: optax.conditionally_mask(
    optax.adam(0.1), lambda step: step < 2
  ),
  "dadapt_adamw": lambda: contrib.dadapt_adamw(0.1),
  "dog": lambda: contrib.dog(0.1),
  "galore": lambda: contrib.galore(0.1),
  "inject": lambda: optax.inject_hyperparams(optax.adam)(
    optax.cosine_decay_schedule(0.1, 9)
  ),
  "lamb": lambda: optax.lamb(0.1),
  "lars": lambda: optax.lars(0.1),
  "lbfgs": optax.lbfgs,
  "backtracking": lambda: optax.chain(
    optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)
  ),
  "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
  "mechanize": lambda: contrib.mechanize(optax.adam(0.1)),
  "momo": lambda: contrib.momo(0.1),
  "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
  "muon": lambda: contrib.muon(0.1),
  "noise": lambda: optax.add_noise(0.1, 0.5, 0),
  "novograd": lambda: optax.novograd(0.1),
  "plateau": lambda: optax.chain(optax.adam(0.1), contrib.reduce_on_plateau()),
  "polyak_sgd": optax.polyak_sgd,
  "prodigy": contrib.prodigy,
  "rprop": lambda: optax.rprop(0.1),
  "sam": lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
  "schedule_free": lambda: contrib.schedule_free_adamw(0.1),
  "sm3": lambda: optax.sm3(0.1),
  "zero_nans": optax.zero_nans,
}
_BEFORE = {
  "clip": lambda: optax.clip_by_global_norm(1.0),
  "adaptive clip": lambda: optax.adaptive_grad_clip(0.1),
  "decay": lambda: optax.add_decayed_weights(0.1),
  "noise": lambda: optax.add_noise(0.1, 0.5, 0),
  "sgd": lambda: optax.sgd(0.1),
  "centralize": optax.centralize,
}
_OWN = {
  "MultiSteps": lambda: optax_dist.per_replica(
    optax.MultiSteps(_reduced(), 2), AXIS, "acc_grads"
  ),
  "momentum": lambda: optax.chain(
    optax_dist.per_replica(optax.trace(0.9), AXIS), _reduced()
  ),
  "frozen": lambda: optax.partition(
    {"train": _reduced(), "rest": optax.set_to_zero()}, _LABELS
  ),
  "by group": lambda: optax.chain(
    cross_shard(AXIS, axis_index_groups=[[0, 1], [2, 3]]),
    cross_shard(AXIS, axis_index_groups=[[0, 2], [1, 3]]),
    cross_shard(AXIS),
  ),
  "averages": lambda: optax.chain(_reduced(), optax_dist.params_ema(0.9)),
  "adasum": lambda: _reduced(reduction="adasum"),
  "compressed": lambda: _reduced(
    compression=optax_dist.compression.top_k(0.3, bits=4)
  ),
  "power_sgd": lambda: _reduced(
    compression=optax_dist.compression.power_sgd(1)
  ),
  "sync_replicas": lambda: optax_dist.sync_replicas(
    optax.adam(0.1), AXIS, replicas_to_aggregate=6, max_staleness=1
  ),
  "sharded": lambda: optax_dist.sharded(
    optax.chain(optax_dist.clip_by_global_norm(1.0, AXIS), optax.adam(0.1)),
    AXIS,
  ),
  "loop from zeros": lambda: optax.chain(
    optax_dist.per_replica(
      _from(
        lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c + x, jnp.zeros_like(x))
      ),
      AXIS,
    ),
    _reduced(),
  ),
  "custom": lambda: _from(lambda x: _counted(_GRADIENT_OF_ALL(x))),
}


@pytest.mark.parametrize("name", _OWN)
def test_step_after_which_replicas_agree_is_accepted(name):
  _by_train_step(_OWN[name](), maps.mesh(N))
  _by_under_jit(_OWN[name](), maps.mesh(N))


def test_optimizers_are_accepted_after_the_reduction():
  ours = {
    name: lambda make=make: make(0.1)
    for name, make in every_optimizer.BY_NAME.items()
  }
  for name, make in {**_AFTER, **ours}.items():
    inner = make()
    if isinstance(inner, optax.MultiSteps):
      inner = inner.gradient_transformation()
    try:
      _by_train_step(optax.chain(cross_shard(AXIS), inner), maps.mesh(N))
    except ValueError as error:
      raise AssertionError(name) from error
  for make in _BEFORE.values():
    _by_train_step(optax.chain(make(), _reduced()), maps.mesh(N))


@pytest.mark.parametrize("method", ["elastic", "local", "streaming"])
def test_replicas_with_their_own_parameters_may_differ(method):
  inner = optax.chain(optax.trace(0.9), optax.adam(0.1))
  tx = {
    "elastic": lambda: optax_dist.elastic_average(
      inner, AXIS, communication_period=2, rho=0.1
    ),
    "local": lambda: optax_dist.local_sgd(inner, AXIS, communication_period=2),
    "streaming": lambda: optax_dist.streaming_updates(
      inner, optax.sgd(0.7), AXIS, communication_period=2, fragments=2
    ),
  }[method]()
  step = optax_dist.train_step(_loss, tx, maps.mesh(N), AXIS)
  jax.eval_shape(step, *step.init(PARAMS), BATCH)


@pairwise.every_value(reach=["plateau", "scale"], explicit=[False, True])
def test_argument_of_each_replica_may_not_reach_shared_values(reach, explicit):
  def scale(updates, state, params=None, *, value, **_):
    return jax.tree.map(lambda x: x * value, updates), state

  after = {
    "plateau": contrib.reduce_on_plateau(),
    "scale": optax.GradientTransformationExtraArgs(
      optax.init_empty_state, scale
    ),
  }[reach]
  tx = optax.chain(cross_shard(AXIS), after)
  step = optax_dist.train_step(_loss, tx, maps.mesh(N, explicit), AXIS)
  params, state = step.init(PARAMS)
  values = optax_dist.PerReplica(jnp.arange(4.0))
  with pytest.raises(ValueError, match="because of argument `value` of each"):
    step(params, state, BATCH, value=values)
  step(params, state, BATCH, value=jnp.float32(2))


def test_rate_traced_outside_of_the_map_is_accepted():
  step = lambda rate: optax_dist.train_step(
    _loss, optax.chain(cross_shard(AXIS), optax.sgd(rate)), maps.mesh(N), AXIS
  )
  params, state = step(0.1).init(PARAMS)
  by_rate = jax.jit(lambda rate: step(rate)(params, state, BATCH)[0])
  grads = jax.grad(_loss)(PARAMS, BATCH)
  expected = jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, grads)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5),
    by_rate(0.1),
    expected,
  )


def test_apply_if_finite_after_the_reduction_is_accepted():
  """The remedy that the error names: the wrapper after the reduction."""
  tx = optax.chain(cross_shard(AXIS), optax.apply_if_finite(optax.sgd(0.1), 3))
  step = optax_dist.train_step(_loss, tx, maps.mesh(N), AXIS)
  bad = BATCH | {
    "x": np.where(np.arange(2 * N)[:, None] < 2, np.nan, BATCH["x"])
  }
  params, state, loss = step(*step.init(PARAMS), bad)
  jax.tree.map(np.testing.assert_array_equal, params, PARAMS)
  assert np.isnan(loss)
  assert state[1].total_notfinite == 1
