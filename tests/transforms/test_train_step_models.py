"""Models with variables that are not trained, in train_step: against plain Flax."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest
from flax import nnx

import optax_dist

N = 4
STEPS = 4
AXIS = maps.AXIS
# Weight decay would change a variance that it got. The sums of few numbers that Adam
# divides would amplify the last bits, so its epsilon is large.
INNER = optax.adamw(0.05, eps=1e-2, weight_decay=0.1)
SHARED = optax.chain(optax_dist.cross_shard(AXIS), INNER)
BATCHES = [
  {
    "x": np.random.default_rng(i).normal(size=(4 * N, 3)).astype(np.float32),
    "y": np.random.default_rng(9 - i)
    .normal(size=(4 * N, 4))
    .astype(np.float32),
  }
  for i in range(STEPS)
]


class Net(nnx.Module):
  """A module with batch normalization, dropout and a layer that is used twice."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.first = nnx.Linear(3, 8, use_bias=False, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.dropout = nnx.Dropout(0.3, rngs=rngs)
    self.middle = nnx.Linear(8, 8, rngs=rngs)
    self.again = self.middle
    self.last = nnx.Linear(8, 4, rngs=rngs)

  def __call__(self, x):
    x = self.dropout(nnx.relu(self.norm(self.first(x))))
    return self.last(self.again(nnx.relu(self.middle(x))))


def _loss(model, batch):
  return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def _rows(i, batch):
  return jax.tree.map(lambda x: x[4 * i : 4 * i + 4], batch)


def _replica(model, i):
  """A replica's copy of a module, which draws from streams of its own."""
  model = nnx.clone(model)
  if i:
    key = model.dropout.rngs.key
    key[...] = jax.random.fold_in(key[...], i)
  return model


def _mean(trees):
  return jax.tree.map(lambda *x: sum(x) / len(x), *trees)


@functools.cache
def _plain_nnx(count):
  """The loop that nnx's documentation shows, for replicas one after the other."""
  model = Net()
  optimizer = nnx.Optimizer(model, INNER, wrt=nnx.Param)
  losses = []
  for batch in BATCHES:
    each = [_replica(model, i) for i in range(count)]
    shares = [batch] if count == 1 else [_rows(i, batch) for i in range(count)]
    results = [
      nnx.value_and_grad(_loss)(m, b) for m, b in zip(each, shares, strict=True)
    ]
    losses.append(np.mean([value for value, _ in results]))
    nnx.update(model, nnx.state(each[0], nnx.RngCount))
    nnx.update(model, _mean([nnx.state(m, nnx.BatchStat) for m in each]))
    optimizer.update(model, _mean([grads for _, grads in results]))
  return model, losses


def _floats(model):
  return nnx.state(model, nnx.filterlib.Any(nnx.Param, nnx.BatchStat))


@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize(
  ("count", "explicit"),
  [(1, True), (N, False), pytest.param(N, True, marks=pytest.mark.nightly)],
)
def test_a_module_trains_as_in_plain_nnx(count, explicit):
  step = optax_dist.train_step(_loss, SHARED, maps.mesh(count, explicit), AXIS)
  start = Net()
  model, state = step.init(start)
  losses = []
  for batch in BATCHES:
    model, state, value = step(model, state, batch)
    losses.append(float(value))
  expected, expected_losses = _plain_nnx(count)
  np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
  chex.assert_trees_all_close(
    nnx.to_pure_dict(_floats(model)),
    nnx.to_pure_dict(_floats(expected)),
    rtol=1e-3,
    atol=1e-5,
  )
  assert model.again is model.middle
  streams = nnx.state(model, nnx.RngState)
  assert streams.dropout.rngs.count[...] == STEPS
  assert streams.dropout.rngs.key[...] == start.dropout.rngs.key[...]
  x = BATCHES[0]["x"]
  for each in (model, expected):
    each.eval()
  np.testing.assert_allclose(model(x), expected(x), rtol=1e-2, atol=1e-3)


@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
def test_replicas_with_their_own_parameters_share_the_statistics():
  tx = optax_dist.diloco(INNER, AXIS, communication_period=2)
  step = optax_dist.train_step(_loss, tx, maps.mesh(N), AXIS)
  model, state = step.init(Net())
  means = np.mean(
    [
      (BATCHES[0]["x"][4 * i : 4 * i + 4] @ Net().first.kernel[...]).mean(0)
      for i in range(N)
    ],
    axis=0,
  )
  model, state, _ = step(model, state, BATCHES[0])
  np.testing.assert_allclose(model.norm.mean[...], 0.01 * means, rtol=1e-4)
  assert model.first.kernel.shape == (N, 3, 8)
  for batch in BATCHES[1:]:
    model, state, _ = step(model, state, batch)
  nnx.update(model, optax_dist.center_params(state))
  model.eval()
  assert model(BATCHES[0]["x"]).shape == (4 * N, 4)


@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
def test_statistics_of_a_nonfinite_replica_are_left_out():
  tx = optax_dist.sync_replicas(INNER, AXIS, replicas_to_aggregate=N - 1)
  step = optax_dist.train_step(_loss, tx, maps.mesh(N), AXIS)
  bad = BATCHES[0] | {"x": BATCHES[0]["x"].copy()}
  bad["x"][5] = np.nan
  model, state, value = step(*step.init(Net()), bad)
  good = [_replica(Net(), i) for i in (0, 2, 3)]
  losses = [
    _loss(m, _rows(i, bad)) for m, i in zip(good, (0, 2, 3), strict=True)
  ]
  np.testing.assert_allclose(value, np.mean(losses), rtol=1e-5)
  np.testing.assert_allclose(
    model.norm.var[...],
    np.mean([m.norm.var[...] for m in good], axis=0),
    rtol=1e-5,
  )
  assert state.global_step == 1


class LinenNet(nn.Module):
  """The same kind of model in linen."""

  @nn.compact
  def __call__(self, x, train=True):
    x = nn.Dense(8, use_bias=False)(x)
    x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
    return nn.Dense(4)(nn.relu(x))


NET = LinenNet()


def _linen_loss(variables, batch):
  out, updates = NET.apply(variables, batch["x"], mutable=["batch_stats"])
  return jnp.mean((out - batch["y"]) ** 2), updates


@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("has_aux", [False, True])
def test_collections_of_a_linen_module_are_trained(has_aux):
  start = NET.init(jax.random.key(0), BATCHES[0]["x"])

  def with_aux(variables, batch):
    value, updates = _linen_loss(variables, batch)
    return value, (updates, {"rows": jnp.int32(batch["x"].shape[0])})

  loss = with_aux if has_aux else _linen_loss
  step = optax_dist.train_step(
    loss, SHARED, maps.mesh(N), AXIS, has_aux=has_aux
  )
  variables, state = step.init(start)
  params, stats = start["params"], start["batch_stats"]
  opt_state = INNER.init(params)
  gradient = jax.jit(
    jax.value_and_grad(
      lambda p, s, b: _linen_loss({"params": p, "batch_stats": s}, b),
      has_aux=True,
    )
  )
  for batch in BATCHES:
    variables, state, value = step(variables, state, batch)
    results = [gradient(params, stats, _rows(i, batch)) for i in range(N)]
    stats = _mean([out[1]["batch_stats"] for out, _ in results])
    updates, opt_state = INNER.update(
      _mean([grads for _, grads in results]), opt_state, params
    )
    params = optax.apply_updates(params, updates)
  chex.assert_trees_all_close(
    variables, {"params": params, "batch_stats": stats}, rtol=1e-3, atol=1e-5
  )
  if has_aux:
    assert value[1]["rows"].tolist() == [4] * N


@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
def test_unsuitable_models_are_refused():
  make = lambda loss: optax_dist.train_step(loss, SHARED, maps.mesh(N), AXIS)
  with pytest.raises(
    ValueError, match="kinds BatchStat, RngCount, RngKey, which"
  ):
    make(_loss).init(nnx.state(Net()))

  step = make(lambda variables, batch: _linen_loss(variables, batch)[0])
  start = step.init(NET.init(jax.random.key(0), BATCHES[0]["x"]))
  with pytest.raises(
    ValueError, match="collections 'batch_stats' are not trained"
  ):
    step(*start, BATCHES[0])

  class Counter(nnx.Module):
    def __init__(self):
      self.weight = nnx.Param(jnp.ones(()))
      self.rows = nnx.Variable(jnp.zeros((), jnp.int32))
      self.key = nnx.RngKey(jax.random.key(0), tag="")

  def by_row(model, batch):
    model.rows[...] += (batch["x"] > 0).sum()
    return (model.weight[...] * batch["x"]).mean()

  step = make(by_row)
  with pytest.raises(
    ValueError, match=r"variables \['rows'\].value differ between"
  ):
    step(*step.init(Counter()), BATCHES[0])

  def rekey(model, batch):
    model.key[...] = jax.random.split(model.key[...])[0]
    return (model.weight[...] * batch["x"]).mean()

  step = make(rekey)
  with pytest.raises(ValueError, match="the loss replaces the random key"):
    step(*step.init(Counter()), BATCHES[0])

  def grow(model, batch):
    model.new = nnx.Variable(jnp.zeros(()))
    return (model.weight[...] * batch["x"]).mean()

  step = make(grow)
  with pytest.raises(ValueError, match="other variables after the loss"):
    step(*step.init(Counter()), BATCHES[0])
