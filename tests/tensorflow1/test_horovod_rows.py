"""The rows for Horovod's users give the numbers of its rules, in NumPy.

Those of `horovod.tensorflow`, whose optimizers for TensorFlow 1 reduce gradients in
`compute_gradients`, and add up those of several passes without dividing them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import porting_page
import pytest

import optax_dist

N, PASSES = 4, 3
_RATE, _MU, _CLIP = 0.1, 0.9, 0.7
_GRADIENTS = np.random.default_rng(0).normal(size=(6, N, 3)).astype(np.float32)


def _here(start, **names):
  modules = {"optax": optax, "optax_dist": optax_dist, "N": N}
  names = {"opt": optax.sgd(_RATE, momentum=_MU), "c": _CLIP} | names
  return eval(porting_page.code(start), modules | names)


def _train(tx, gradients=_GRADIENTS):
  """The parameters after each gradient, which are the same on all replicas."""
  params = jnp.zeros(gradients.shape[2:])
  state = tx.init(params)
  axes = optax_dist.states.state_axes(state)
  update = jax.jit(
    jax.vmap(
      tx.update, in_axes=(0, axes, None), out_axes=(0, axes), axis_name="data"
    )
  )
  seen = []
  for gradient in gradients:
    updates, state = update(gradient, state, params)
    np.testing.assert_allclose(updates, np.stack([updates[0]] * N), rtol=1e-6)
    params = params + updates[0]
    seen.append(np.asarray(params))
  return np.stack(seen)


def _momentum(directions, rate=lambda t: _RATE):
  """The parameters after each step on what has been reduced."""
  w, trace, seen = 0.0, 0.0, []
  for t, g in enumerate(directions):
    trace = _MU * trace + g
    w = w - rate(t) * trace
    seen.append(w)
  return np.stack(seen)


def _clipped(g):
  return g * min(1, _CLIP / np.linalg.norm(g))


@pytest.mark.parametrize(
  ("start", "reduce"),
  [
    ("hvd.DistributedOptimizer(opt), minimize", lambda g: g.mean(0)),
    (
      "compute_gradients(loss), tf.clip_by_global_norm(grads, c), apply_gradients"
      " | optax",
      lambda g: _clipped(g.mean(0)),
    ),
    ("op=hvd.Sum", lambda g: g.sum(0)),
  ],
)
def test_gradients_are_reduced_first(start, reduce):
  expected = _momentum([reduce(g) for g in _GRADIENTS])
  np.testing.assert_allclose(_train(_here(start)), expected, rtol=1e-5)


def _adasum(rows):
  """Each pair of neighbours, then of pairs."""
  if len(rows) == 1:
    return rows[0]
  pairs = []
  for a, b in zip(rows[::2], rows[1::2], strict=True):
    dot = np.dot(a, b)
    pairs.append(
      (1 - dot / (2 * np.dot(a, a))) * a + (1 - dot / (2 * np.dot(b, b))) * b
    )
  return _adasum(pairs)


def test_changes_are_combined_by_adasum():
  """Each worker's momentum is of its own gradients."""
  w, traces, expected = 0.0, np.zeros((N, 3)), []
  for g in _GRADIENTS:
    traces = _MU * traces + g
    w = w + _adasum(list(-_RATE * traces))
    expected.append(w)
  np.testing.assert_allclose(
    _train(_here("op=hvd.Adasum")), expected, rtol=1e-4, atol=1e-6
  )


@jax.numpy_dtype_promotion("standard")  # As where the page is read.
@pytest.mark.parametrize("is_mean", [False, True])
def test_gradients_of_several_passes_are_summed(is_mean):
  start = "backward_passes_per_step=n, which"
  rate = lambda t: _RATE / (1 + t)
  code = porting_page.row(start).split("`")[-2]
  schedule = eval(code, {"n": PASSES, "rate": rate})
  opt = optax.chain(optax.trace(_MU), optax.scale_by_learning_rate(schedule))
  tx = _here(start, n=PASSES, opt=opt)
  if is_mean:
    assert porting_page.row("average_aggregated").endswith(
      "the same without `optax.scale(n)`"
    )
    tx = optax_dist.sync_replicas(
      opt, "data", replicas_to_aggregate=PASSES * N, total_num_replicas=N
    )
  sums = _GRADIENTS.reshape(2, PASSES, N, 3).sum(1).mean(1)
  expected = _momentum(
    sums / PASSES if is_mean else sums,
    lambda t: rate(PASSES * t + PASSES - 1),
  )
  got = _train(tx)
  np.testing.assert_allclose(got[PASSES - 1 :: PASSES], expected, rtol=1e-5)
  np.testing.assert_array_equal(got[: PASSES - 1], np.zeros((PASSES - 1, 3)))


def test_sparse_gradients_become_dense():
  tx = _here("sparse_as_dense")
  rows = np.arange(N * 2.0, dtype=np.float32).reshape(N, 1, 2)

  def update(values, index):
    table = jnp.zeros((3, 2))
    g = optax_dist.IndexedSlices(values, index[None], table.shape)
    return tx.update(g, tx.init(table), table)[0]

  got = jax.vmap(update, axis_name="data")(rows, jnp.array([0, 1, 0, 2]))
  expected = np.zeros((3, 2))
  np.add.at(expected, [0, 1, 0, 2], rows[:, 0] / N)
  np.testing.assert_allclose(got[0], -_RATE * expected, rtol=1e-6)
