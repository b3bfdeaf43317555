"""Each row for users of `pmean` gives the numbers of the code that they have."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_dist

_PAGE = pathlib.Path(__file__).resolve().parents[2] / (
  "docs/coming_from_pmean_optax.md"
)
N, M = 4, 2
_mesh = jax.make_mesh((N,), ("data",), devices=jax.devices()[:N])
_START = jnp.linspace(-1.0, 1.0, 3)
_BATCHES = np.random.default_rng(0).normal(size=(6, N, 4, 3))
_BATCHES = jnp.asarray(_BATCHES * np.linspace(0.2, 2, N)[:, None, None], "f")
_SGD = optax.sgd(0.1, momentum=0.9)
_NAMES = {
  "axis": "data",
  "a": "x",
  "groups": [[0, 3], [1, 2]],
  "tx": _SGD,
  "m": M,
  "N": N,
  "H": 3,
  "b": 1,
  "specs": {"w": P("data"), "b": P()},
  "chain": optax.chain,
  "MultiSteps": optax.MultiSteps,
  "clip": optax.clip_by_global_norm(0.5),
  "jax": jax,
  "optax_dist": optax_dist,
} | {
  name: getattr(optax_dist, name)
  for name in ("cross_shard", "sync_replicas", "local_sgd", "local_updates")
}


def _rows():
  text = _PAGE.read_text("utf-8").split("## Common code around it")[1]
  table = text.split("\n\n")[1].splitlines()[2:]
  return [[x.strip() for x in row.strip("|").split(" | ")] for row in table]


def _here(start, at=0, names=()):
  """The transformation that the row with these words says to write."""
  (row,) = (row for row in _rows() if row[0].startswith(start))
  return eval(re.findall("`([^`]+)`", row[1])[at], _NAMES | dict(names))


def _loss(params, batch):
  return jnp.mean((batch @ params - 1.0) ** 2)


def _own(params, batch):
  return jax.grad(_loss)(optax_dist.local_params(params, "data"), batch)


def _train(
  tx,
  gradient=_own,
  before=lambda g, _: g,
  masks=((False,) * N,) * 6,
  is_arrived=False,
  **kwargs,
):
  """The shared parameters after each step, under shard_map.

  Each replica's part of a mask goes to `before`, or says whether it has arrived.
  """

  def step(params, state, batch, mask):
    grads = before(gradient(params, batch[0]), mask[0])
    more = {"arrived": mask[0]} if is_arrived else {}
    updates, state = tx.update(grads, state, params, **more)
    return optax.apply_updates(params, updates), state

  with jax.set_mesh(_mesh):
    params, state = _START, tx.init(_START)
  specs = optax_dist.states.state_specs(state, "data")
  step = jax.jit(
    jax.shard_map(
      step,
      mesh=_mesh,
      in_specs=(P(), specs, P("data"), P("data")),
      out_specs=(P(), specs),
      **kwargs,
    )
  )
  params, state = optax_dist.states.place((params, state), _mesh, (P(), specs))
  seen = []
  for batch, mask in zip(_BATCHES, np.asarray(masks), strict=False):
    batch, mask = optax_dist.states.place((batch, mask), _mesh, P("data"))
    params, state = step(params, state, batch, mask)
    seen.append(np.asarray(params))
  return np.stack(seen)


def _by_hand(reduce, tx=_SGD, **kwargs):
  """The same with a collective, where JAX sums nothing by itself."""
  return _train(tx, before=reduce, check_vma=False, **kwargs)


def _same(got, expected):
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


_mean = lambda g, _: jax.lax.pmean(g, "data")
_both = pytest.mark.parametrize("check_vma", [False, True])


@_both
@pytest.mark.parametrize("gradient", [_own, jax.grad(_loss)])
@pytest.mark.parametrize("name", ["pmean", "psum"])
def test_cross_shard_replaces_pmean_and_psum(name, gradient, check_vma):
  reduce = getattr(jax.lax, name)
  by_hand = _by_hand(lambda g, _: reduce(g, "data"))
  tx = optax.chain(_here(f"`lax.{name}(grads, axis)`"), _SGD)
  _same(_train(tx, gradient, check_vma=check_vma), by_hand)


def test_cross_shard_averages_within_groups():
  groups = _NAMES["groups"]
  mean = lambda g, _: jax.lax.pmean(g, "data", axis_index_groups=groups)
  tx = optax.chain(_here("`lax.pmean(..., axis_index_groups"), _SGD)
  # Each group goes on with the parameters of its own mean; the first is seen.
  _same(_train(tx, check_vma=False), _by_hand(mean))


def test_cross_shard_averages_over_two_axes():
  batch = _BATCHES[0].reshape(2, 2, 4, 3)
  tx = _here("`lax.pmean(grads, (a, b))`", names={"b": "y"})
  here = lambda g: tx.update(g, tx.init(g))[0]
  mean = lambda g: jax.lax.pmean(g, ("x", "y"))
  got, expected = (
    jax.vmap(
      jax.vmap(lambda b, f=f: f(jax.grad(_loss)(_START, b)), axis_name="y"),
      axis_name="x",
    )(batch)
    for f in (here, mean)
  )
  _same(got, expected)


def test_the_gradient_of_a_mean_loss_is_final():
  loss = lambda p, batch: jax.lax.pmean(_loss(p, batch), "data")
  for tx in (_SGD, optax.chain(_here("the gradient of a `lax.pmean`"), _SGD)):
    _same(_train(tx, jax.grad(loss)), _by_hand(_mean))


def test_single_replica_needs_no_map():
  """The compiler takes the mean over the whole batch."""
  params, state, seen = _START, _SGD.init(_START), []
  for batch in _BATCHES:
    params, whole = optax_dist.states.place(
      (params, batch.reshape(-1, 3)), _mesh, (P(), P("data"))
    )
    grads = jax.jit(jax.grad(_loss))(params, whole)
    updates, state = _SGD.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    seen.append(params)
  _same(np.stack(seen), _by_hand(_mean))


@_both
def test_replicas_clip_before_the_mean(check_vma):
  clip = lambda g: _NAMES["clip"].update(g, ())[0]
  expected = _by_hand(lambda g, _: jax.lax.pmean(clip(g), "data"))
  tx = _here("clip each replica's gradient")
  _same(_train(tx, check_vma=check_vma), expected)
  assert np.abs(expected - _by_hand(_mean)).max() > 1e-2


@jax.numpy_dtype_promotion("standard")  # As MultiSteps needs.
@_both
@pytest.mark.parametrize("at", [0, 1])
def test_gradients_are_accumulated(at, check_vma):
  expected = _by_hand(_mean, optax.MultiSteps(_SGD, M))
  tx = _here("`optax.MultiSteps(tx, m)`", at)
  _same(_train(tx, check_vma=check_vma), expected)


@_both
def test_a_gradient_that_is_not_finite_is_left_out(check_vma):
  """The mean is over the finite gradients; the other replicas continue."""

  def mean(g, spoiled):
    g = jnp.where(spoiled, jnp.nan, g)
    fine = jnp.all(jnp.isfinite(g))
    total = jax.lax.psum(jnp.where(fine, g, 0), "data")
    return total / jax.lax.psum(fine.astype(g.dtype), "data")

  spoiled = np.arange(6 * N).reshape(6, N) % 7 == 0
  assert spoiled.sum(1).max() == _NAMES["b"]
  expected = _by_hand(mean, masks=spoiled)
  tx = _here("`optax.apply_if_finite`")
  spoil = lambda g, spoiled: jnp.where(spoiled, jnp.nan, g)
  _same(_train(tx, before=spoil, masks=spoiled, check_vma=check_vma), expected)


@_both
def test_a_replica_without_a_batch_is_left_out_once(check_vma):
  """It comes back with its next gradient, also after a step without any."""
  here = np.array(
    [[1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1]], bool
  )

  def mean(g, arrived):
    weight = arrived.astype(g.dtype)
    count = jax.lax.psum(weight, "data")
    return jax.lax.psum(weight * g, "data") / jnp.maximum(count, 1)

  # Without a momentum, a step of zeros changes nothing either.
  sgd = optax.sgd(0.1)
  expected = _by_hand(mean, sgd, masks=here)
  tx = _here("`psum(mask * grads, axis)", names={"tx": sgd})
  got = _train(tx, masks=here, is_arrived=True, check_vma=check_vma)
  _same(got, expected)
  late = optax_dist.sync_replicas(sgd, "data", replicas_to_aggregate=1)
  late = _train(late, masks=here, is_arrived=True, check_vma=check_vma)
  _same(late[:2], expected[:2])
  assert np.abs(late[2] - expected[2]).max() > 1e-2


def test_parameters_are_averaged_every_few_steps():
  tx = _here("`pmean(params)` every H", names={"tx": optax.sgd(0.1)})

  def train(params, batches):
    state = tx.init(params)
    for batch in batches:
      updates, state = tx.update(jax.grad(_loss)(params, batch), state, params)
      params = optax.apply_updates(params, updates)
    return params

  def by_hand(params, batches):
    for t, batch in enumerate(batches):
      params = params - 0.1 * jax.grad(_loss)(params, batch)
      if (t + 1) % _NAMES["H"] == 0:
        params = jax.lax.pmean(params, "data")
    return params

  params = jnp.stack([_START] * N)
  for steps in (5, 6):
    batches = jnp.swapaxes(_BATCHES[:steps], 0, 1)
    got, expected = (
      jax.jit(jax.vmap(f, axis_name="data"))(params, batches)
      for f in (train, by_hand)
    )
    _same(got, expected)


@_both
def test_shards_of_a_sum_are_divided_into_a_mean(check_vma):
  tx = _here("parameters sharded over the data axis")
  params = {"w": jnp.linspace(0, 1, 2 * N), "b": jnp.ones(2)}

  def loss(params, x):
    whole = jax.lax.all_gather(params["w"], "data", tiled=True)
    return jnp.sum(whole * x) + jnp.sum(params["b"]) * x[0]

  def gradient(params, x):
    own = params | {"b": optax_dist.local_params(params["b"], "data")}
    grads = jax.grad(loss)(own, x[0])
    return tx.update(grads, tx.init(grads), own)[0]

  specs = {"w": P("data"), "b": P()}
  x = np.arange(N * 2 * N, dtype=np.float32).reshape(N, 2 * N)
  params, placed = optax_dist.states.place(
    (params, x), _mesh, (specs, P("data"))
  )
  got = jax.jit(
    jax.shard_map(
      gradient,
      mesh=_mesh,
      in_specs=(specs, P("data")),
      out_specs=specs,
      check_vma=check_vma,
    )
  )(params, placed)
  _same(got["w"], x.mean(0))
  _same(got["b"], [x[:, 0].mean()] * 2)


@_both
def test_mean_of_a_mean_is_the_mean(check_vma):
  tx = optax.chain(
    _here("`pmean` here, and again", names={"axis": "data"}), _SGD
  )
  _same(_train(tx, before=_mean, check_vma=check_vma), _by_hand(_mean))


def test_every_row_of_the_page_has_a_test():
  text = pathlib.Path(__file__).read_text("utf-8")
  named = re.findall(r'_here\(\n?\s*f?"([^"{]+)', text)
  others = ("a plain `jax.jit`", "`pmean` of metrics")
  for row, *_ in _rows():
    assert any(row.startswith(x) for x in (*named, *others)), row
