"""The rows of docs/ordering.md: before or after the aggregation."""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest

import optax_dist

N = 4
GRADIENTS = np.array(
  [[3.0, 4.0], [0.3, 0.4], [-1.0, 0.0], [0.0, 12.0]], np.float32
)
PARAMS = np.array([1.0, -2.0], np.float32)
MEAN = GRADIENTS.mean(0)

some_maps = pytest.mark.parametrize(
  "map_name", ["vmap", "pmap", "shard_map", "shard_map_vma"]
)


def _aggregate(**kwargs):
  return optax_dist.cross_shard(maps.AXIS, **kwargs)


def _run(map_name, *chain, gradients=GRADIENTS, params=PARAMS):
  tx = optax.chain(*chain)

  def step(g, params):
    return tx.update(g, tx.init(params), params)[0]

  out = maps.run(map_name, step, gradients, maps.Replicated(params), size=N)
  for i in range(1, N):
    np.testing.assert_array_equal(out[i], out[0])
  return out[0]


def _clip(x, bound):
  return x * min(1.0, bound / np.linalg.norm(x))


@some_maps
def test_clipping_before_and_after_the_mean_differs(map_name):
  clip = optax.clip_by_global_norm(1.0)
  before = _run(map_name, clip, _aggregate())
  behind = _run(map_name, _aggregate(), clip)
  own = np.stack([_clip(g, 1.0) for g in GRADIENTS])
  np.testing.assert_allclose(before, own.mean(0), rtol=1e-6)
  np.testing.assert_allclose(behind, _clip(MEAN, 1.0), rtol=1e-6)
  assert np.linalg.norm(before) < 0.9 < np.linalg.norm(behind)


@some_maps
def test_clipping_before_the_mean_needs_local_gradients(map_name):
  """If the gradient arrives summed, the sum is clipped and then divided."""
  tx = optax.chain(optax.clip_by_global_norm(1.0), _aggregate())

  def step(g, params, local):
    at = optax_dist.local_params(params, maps.AXIS) if local else params
    grad = jax.grad(lambda p: jnp.sum(p * g))(at)
    return tx.update(grad, tx.init(params), params)[0]

  own = np.mean([_clip(g, 1.0) for g in GRADIENTS], axis=0)
  for local in (False, True):
    got = maps.run(
      map_name,
      functools.partial(step, local=local),
      GRADIENTS,
      maps.Replicated(PARAMS),
      size=N,
    )[0]
    summed = map_name in maps.TRACKED and not local
    expected = _clip(GRADIENTS.sum(0), 1.0) / N if summed else own
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def _count_psums(jaxpr, conds):
  total = 0
  for eqn in jaxpr.eqns:
    total += eqn.primitive.name.startswith("psum")
    if conds or eqn.primitive.name != "cond":
      total += sum(
        _count_psums(sub, conds)
        for sub in jax.extend.core.jaxprs_in_params(eqn.params)
      )
  return total


@pytest.mark.parametrize("map_name", ["shard_map", "shard_map_vma"])
@jax.numpy_dtype_promotion("standard")  # optax.MultiSteps is not strict.
def test_accumulation_has_the_same_numbers_in_every_place(map_name):
  """The same numbers; only sync_replicas is silent between two steps."""
  inner = optax.sgd(1.0, momentum=0.9)
  candidates = {
    "around": optax.MultiSteps(optax.chain(_aggregate(), inner), 2),
    "behind": optax.chain(
      _aggregate(), optax.MultiSteps(inner, 2).gradient_transformation()
    ),
    "sync_replicas": optax_dist.sync_replicas(
      inner, maps.AXIS, replicas_to_aggregate=2 * N, total_num_replicas=N
    ),
  }
  results, unconditional = {}, {}
  for name, tx in candidates.items():
    state = tx.init(PARAMS)
    if name == "around":  # The sums of MultiSteps belong to one replica.
      sums = optax_dist.PerReplica(np.zeros((N, 2), np.float32))
      state = state._replace(acc_grads=sums)

    def step(state, g, tx=tx, name=name):
      if name != "around":
        return tx.update(g, state, PARAMS)
      own = state._replace(acc_grads=state.acc_grads.value.reshape(2))
      updates, new = tx.update(g, own, PARAMS)
      sums = new.acc_grads.reshape(state.acc_grads.value.shape)
      return updates, new._replace(acc_grads=optax_dist.PerReplica(sums))

    run = maps.stepper(map_name, step, state, N)
    jaxpr = jax.make_jaxpr(run)(state, GRADIENTS).jaxpr
    unconditional[name] = _count_psums(jaxpr, conds=False)
    if name == "around":  # Its cond is on skipping, which never happens.
      unconditional[name] = _count_psums(jaxpr, conds=True)
    results[name] = []
    for scale in (1.0, 3.0, -2.0, 1.0):
      updates, state = run(state, np.float32(scale) * GRADIENTS)
      results[name].append(updates[0])
  first, second = -2.0 * MEAN, -0.9 * 2.0 * MEAN + 0.5 * MEAN
  for got in results.values():
    np.testing.assert_allclose(
      got, [0 * MEAN, first, 0 * MEAN, second], rtol=1e-5
    )
  assert unconditional["around"] >= 1
  assert unconditional["behind"] >= 1
  assert unconditional["sync_replicas"] == 0


@jax.numpy_dtype_promotion("standard")  # optax.MultiSteps is not strict.
def test_accumulation_around_the_mean_needs_sums_of_each_replica():
  """Types show that the sums differ from replica to replica; JAX refuses P()."""
  tx = optax.MultiSteps(optax.chain(_aggregate(), optax.sgd(1.0)), 2)
  run = maps.stepper(
    "shard_map_vma",
    lambda state, g: tx.update(g, state, PARAMS),
    tx.init(PARAMS),
    N,
  )
  with pytest.raises(TypeError, match="acc_grads"):
    run(tx.init(PARAMS), GRADIENTS)


def _freezing(frozen):
  trained = optax.chain(_aggregate(), optax.sgd(1.0))
  labels = {"head": "trained", "body": "frozen"}
  return optax.partition({"trained": trained, "frozen": frozen}, labels)


_FREEZING = {
  "behind": optax.chain(
    _aggregate(),
    optax.partition(
      {"trained": optax.sgd(1.0), "frozen": optax.set_to_zero()},
      {"head": "trained", "body": "frozen"},
    ),
  ),
  "inside": _freezing(optax.chain(_aggregate(), optax.set_to_zero())),
}


def _frozen_step(tx, check_vma):
  def step(g, params):
    own = {"head": g[0], "body": 2 * g[0]}
    return optax.apply_updates(
      params, tx.update(own, tx.init(params), params)[0]
    )

  return jax.jit(
    jax.shard_map(
      step,
      mesh=maps.mesh(N),
      in_specs=(jax.P(maps.AXIS), jax.P()),
      out_specs=jax.P(),
      check_vma=check_vma,
    )
  )


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("name", _FREEZING)
def test_frozen_parameters_do_not_change(name, check_vma):
  params = {"head": PARAMS, "body": PARAMS}
  run = _frozen_step(_FREEZING[name], check_vma)
  got = run(GRADIENTS, params)
  np.testing.assert_allclose(got["head"], PARAMS - MEAN, rtol=1e-6)
  np.testing.assert_array_equal(got["body"], PARAMS)
  if name == "inside":
    # What is set to zero is not sent.
    text = run.lower(GRADIENTS, params).compile().as_text()
    assert text.count("all-reduce(") == 1
    assert "f32[4]{0} all-reduce" not in text


def test_frozen_parameters_without_aggregation_are_not_replicated():
  """The zeros are of the type of each replica's own gradient."""
  run = _frozen_step(_freezing(optax.set_to_zero()), check_vma=True)
  with pytest.raises(ValueError, match="replicated"):
    run(GRADIENTS, {"head": PARAMS, "body": PARAMS})


@some_maps
def test_nonfinite_guard_after_the_mean_skips_the_step(map_name):
  bad = GRADIENTS.copy()
  bad[2, 1] = np.nan
  guarded = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=5)
  skipped = _run(map_name, _aggregate(), guarded, gradients=bad)
  np.testing.assert_array_equal(skipped, 0)
  passed = _run(map_name, _aggregate(), guarded)
  np.testing.assert_allclose(passed, -MEAN, rtol=1e-6)
  tx = optax_dist.sync_replicas(
    optax.sgd(1.0), maps.AXIS, replicas_to_aggregate=3, total_num_replicas=N
  )
  run = maps.stepper(map_name, lambda s, g: tx.update(g, s), tx.init(PARAMS), N)
  updates, _ = run(tx.init(PARAMS), bad)
  expected = -np.delete(GRADIENTS, 2, axis=0).mean(0)
  np.testing.assert_allclose(updates[0], expected, rtol=1e-6)


@some_maps
def test_zero_nans_before_the_mean_keeps_other_replicas(map_name):
  bad = GRADIENTS.copy()
  bad[2, 1] = np.nan
  before = _run(map_name, optax.zero_nans(), _aggregate(), gradients=bad)
  behind = _run(map_name, _aggregate(), optax.zero_nans(), gradients=bad)
  np.testing.assert_allclose(before, np.nan_to_num(bad).mean(0), rtol=1e-6)
  np.testing.assert_allclose(behind, [MEAN[0], 0.0], rtol=1e-6)


@some_maps
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_scaling_commutes_with_aggregation(map_name, reduction):
  total = getattr(GRADIENTS, reduction)(0)
  aggregate = _aggregate(reduction=reduction)
  for chain in [(optax.scale(0.5), aggregate), (aggregate, optax.scale(0.5))]:
    np.testing.assert_allclose(_run(map_name, *chain), 0.5 * total, rtol=1e-6)


@some_maps
def test_weight_decay_before_a_sum_counts_once_per_replica(map_name):
  decay = optax.add_decayed_weights(0.1)
  for chain, expected in [
    ((decay, _aggregate()), MEAN + 0.1 * PARAMS),
    ((_aggregate(), decay), MEAN + 0.1 * PARAMS),
    ((decay, _aggregate(reduction="sum")), N * (MEAN + 0.1 * PARAMS)),
    ((_aggregate(reduction="sum"), decay), N * MEAN + 0.1 * PARAMS),
  ]:
    np.testing.assert_allclose(_run(map_name, *chain), expected, rtol=1e-5)


@maps.tracked_map
def test_weight_decay_before_a_summed_gradient_is_divided(map_name):
  tx = optax.chain(optax.add_decayed_weights(0.1), _aggregate())

  def step(g, params):
    grad = jax.grad(lambda p: jnp.sum(p * g))(params)
    return tx.update(grad, tx.init(params), params)[0]

  got = maps.run(map_name, step, GRADIENTS, maps.Replicated(PARAMS), size=N)
  np.testing.assert_allclose(got[0], MEAN + 0.1 * PARAMS / N, rtol=1e-5)


@some_maps
@jax.numpy_dtype_promotion("standard")  # optax.add_noise is not strict.
def test_noise_is_equal_on_all_replicas(map_name):
  noise = optax.add_noise(eta=1.0, gamma=0.0, key=0)
  before = _run(map_name, noise, _aggregate())
  behind = _run(map_name, _aggregate(), noise)
  np.testing.assert_allclose(before, behind, rtol=1e-5)
  assert np.abs(behind - MEAN).max() > 0.1


@some_maps
@jax.numpy_dtype_promotion("standard")  # optax.scale_by_adam is not strict.
def test_preconditioning_before_and_after_the_mean_differs(map_name):
  adam = optax.scale_by_adam(eps=0.0)
  # The first update of Adam is the sign of what it sees.
  gradients = GRADIENTS + np.float32(0.01)
  before = _run(map_name, adam, _aggregate(), gradients=gradients)
  behind = _run(map_name, _aggregate(), adam, gradients=gradients)
  np.testing.assert_allclose(before, np.sign(gradients).mean(0), rtol=1e-4)
  np.testing.assert_allclose(behind, np.sign(gradients.mean(0)), rtol=1e-4)
  assert before[0] != behind[0]
