"""The programs of a training, chunk by chunk, against plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist.simulate import training_programs as programs

N, PERIOD, RATE = 3, 2, 0.25
SGD = optax.sgd(0.5, momentum=0.5)
OUTER = optax.sgd(1.0)
KEY = jax.random.key(7)


def gradient(params, key):
  """That of half the squares, with noise as large as is told."""
  noise = params["noise"] * jax.random.normal(key)
  return {
    "w": params["w"] + noise,
    "b": params["b"] + noise,
    "noise": jnp.zeros_like(params["noise"]),
  }


def start(noise=0.0):
  return {
    "w": np.array([1.0, -2.0], np.float32),
    "b": np.float32(3.0),
    "noise": np.float32(noise),
  }


def _int32(*rows):
  return np.array(rows, np.int32)


def _gradients():
  tx = programs.sync_replicas_of(SGD, 2, N, 1, None)
  run = functools.partial(programs.run_gradients, tx, gradient)
  return run, lambda params: programs.start_gradients(tx, params, N)


def _exchanges():
  run = functools.partial(programs.run_exchanges, SGD, gradient, PERIOD, RATE)
  return run, lambda params: programs.start_exchanges(SGD, params, N)


def _changes():
  tx = programs.local_updates_of(SGD, OUTER, PERIOD, N)
  run = functools.partial(programs.run_changes, tx, gradient, PERIOD)
  return run, lambda params: programs.start_changes(tx, params, N)


# Two chunks of each: who takes part, of which step, and who begins anew.
INPUTS = {
  _gradients: (
    _int32(0, 1, 2, 3),
    _int32([0, 1], [0, 2], [1, 2], [0, 2]),
    _int32([0, 0], [1, 0], [1, 2], [2, 3]),
    np.array([[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]], bool),
  ),
  _exchanges: (
    _int32(0, 1, 2, 3),
    _int32([0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 1, 2]),
    np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]], bool),
    np.array([[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0]], bool),
  ),
  _changes: (_int32(0, 1, 2, 3),),
}


def _chunks(make):
  return [tuple(x[at : at + 2] for x in INPUTS[make]) for at in (0, 2)]


def _ran(make, chunks, noise=0.0, key=KEY):
  run, begin = make()
  carry = begin(start(noise))
  for chunk in chunks:
    carry = run(key, carry, chunk)
  return carry


def _trained(b, trace, steps=1):
  """Gradient descent with momentum on half the square."""
  for _ in range(steps):
    trace = b + 0.5 * trace
    b -= 0.5 * trace
  return b, trace


def test_a_gradient_is_of_what_its_replica_holds():
  params, held, _ = _ran(_gradients, _chunks(_gradients))
  b, trace, own = 3.0, 0.0, [3.0] * N
  for _, members, _, restarts in zip(*INPUTS[_gradients], strict=True):
    own = [b if anew else x for x, anew in zip(own, restarts, strict=True)]
    trace = sum(own[m] for m in members) / 2 + 0.5 * trace
    b -= 0.5 * trace
    for member in members:
      own[member] = b
  assert params["b"] == pytest.approx(b)
  np.testing.assert_allclose(held["b"], own, rtol=1e-5)
  np.testing.assert_allclose(held["w"].shape, (N, 2))


def test_a_gradient_that_is_too_old_does_not_count():
  number, members, local_steps, restarts = _chunks(_gradients)[0]
  local_steps = _int32([0, 0], [1, -1])
  chunk = (number, members, local_steps, restarts)
  params, _, state = _ran(_gradients, [chunk])
  # The second step lacks a gradient.
  assert params["b"] == 1.5
  assert optax.tree.get(state, "global_step") == 1


def test_exchanges_of_a_wave_are_one_after_the_other():
  center, own, _ = _ran(_exchanges, _chunks(_exchanges))
  c, found, traces = 3.0, [3.0] * N, [0.0] * N
  for _, order, on, restarts in zip(*INPUTS[_exchanges], strict=True):
    found = [c if anew else x for x, anew in zip(found, restarts, strict=True)]
    for r, meets in zip(order, on, strict=True):
      if meets:
        found[r], traces[r] = _trained(found[r], traces[r], PERIOD)
        pull = RATE * (found[r] - c)
        found[r], c = found[r] - pull, c + pull
  assert center["b"] == pytest.approx(c, rel=1e-5)
  np.testing.assert_allclose(own["b"], found, rtol=1e-5)


def test_changes_are_averaged_at_the_end_of_a_round():
  own, _ = _ran(_changes, _chunks(_changes))
  b, _ = _trained(3.0, 0.0, 4 * PERIOD)
  np.testing.assert_allclose(own["b"], [b] * N, rtol=1e-5)
  # With noise, replicas differ within a round, and not after it.
  own, _ = _ran(_changes, _chunks(_changes), noise=1.0)
  assert len(set(np.asarray(own["b"]).tolist())) == 1
  assert own["b"][0] != pytest.approx(b, rel=0.01)


@pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)
def test_chunks_and_seeds_share_one_program(make):
  program = make()[0].func
  _ran(make, _chunks(make))
  size = program._cache_size()
  one, same, other = (
    _ran(make, _chunks(make), 1.0, jax.random.key(seed)) for seed in (1, 1, 2)
  )
  b = lambda carry: np.asarray(carry[0]["b"])
  np.testing.assert_array_equal(b(one), b(same))
  assert not np.array_equal(b(one), b(other))
  # The same chunk with other numbers has other batches.
  first, *rest = _chunks(make)[0]
  later = _ran(make, [(first + 5, *rest)], 1.0)
  assert not np.array_equal(b(later), b(_ran(make, [(first, *rest)], 1.0)))
  assert program._cache_size() == size


def test_each_replica_and_step_has_a_key_of_its_own():
  keys = [
    key
    for step in range(3)
    for key in programs._keys(KEY, jnp.int32(step), jnp.arange(N))
  ]
  assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == 9


def test_a_transform_of_the_same_arguments_is_the_same_object():
  """Programs are cached by it, so that another seed does not compile again."""
  one, same, other = (
    programs.sync_replicas_of(SGD, k, N, 1, None) for k in (2, 2, 1)
  )
  assert one is same is not other
  one, same, other = (
    programs.local_updates_of(SGD, OUTER, period, N) for period in (2, 2, 3)
  )
  assert one is same is not other
