"""Tests of streaming_updates against NumPy, under vmap, pmap and shard_map."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise
import pytest
from jax.sharding import PartitionSpec as P
from own_params import normal, stack, take_step

from optax_dist.states import state_axes, state_specs
from optax_dist.states.center import center_params
from optax_dist.transforms.local_updates import local_updates
from optax_dist.transforms.streaming import streaming_updates

N = 4
LR = 0.1
PERIOD = 4


def _start():
  return {"a": normal(0, 3), "b": normal(1, 2, 2), "c": np.float32([1, 2])}


def _fragment_of(params):
  # c belongs to the first, as does a; its gradient is None.
  return {k: "acb".index(k) // 2 for k in params}


def _gradients(seed):
  return {"a": normal(seed, N, 3), "b": normal(seed + 9, N, 2, 2), "c": None}


class Oracle:
  """By NumPy: a is sent at steps 2, 6, ..., and b at steps 4, 8, ..."""

  def __init__(self, start, delay, mix):
    self.center = jax.tree.map(np.float64, start)
    self.params = jax.tree.map(np.float64, stack(start))
    self.trace = jax.tree.map(np.zeros_like, self.center)
    self.pending, self.sent, self.step = {}, {"a": 0, "b": 0}, 0
    self.args = delay, mix

  def update(self, gradients):
    delay, mix = self.args
    self.step += 1
    for k, end in (("a", 2), ("b", 4)):
      self.params[k] = self.params[k] - LR * gradients[k]
      if self.step % PERIOD == end % PERIOD:
        self.sent[k] += 1
        moved = self.center[k] - self.params[k].mean(0)
        self.pending[self.step + delay, k] = moved
      moved = self.pending.get((self.step, k))
      if moved is not None:
        self.trace[k] = 0.9 * self.trace[k] + moved
        self.center[k] = self.center[k] - 0.7 * (moved + 0.9 * self.trace[k])
        self.params[k] = mix * self.params[k] + (1 - mix) * self.center[k]


@pairwise.every_value(map_name=maps.NAMES, delay=[0, 3])
def test_numbers_are_the_same_in_and_out_of_the_map(map_name, delay):
  mix = 0.5 if delay else 0.0
  tx = streaming_updates(
    optax.sgd(LR),
    optax.sgd(0.7, momentum=0.9, nesterov=True),
    maps.AXIS,
    communication_period=PERIOD,
    fragments=_fragment_of,
    delay=delay,
    mix=mix,
    num_replicas=N,
  )
  start, traces = _start(), []
  oracle = Oracle(start, delay, mix)

  def step(*args):
    traces.append(None)
    return take_step(tx, *args)

  params, state = stack(start), tx.init(start)
  run = maps.stepper(map_name, step, state, N)
  for i in range(12):
    gradients = _gradients(i)
    params, new_state = run(state, params, gradients)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    state = new_state
    oracle.update(gradients)
    chex.assert_trees_all_close(params, oracle.params, rtol=1e-4, atol=1e-5)
    center = jax.device_get(center_params(state))
    chex.assert_trees_all_close(center, oracle.center, rtol=1e-4, atol=1e-5)
    sent = [oracle.sent["a"], oracle.sent["b"]]
    assert state.syncs.tolist() == sent
  # pmap tells the state of the first call, on one device, from the next.
  assert len(traces) <= 1 + (map_name == "pmap")


@jax.numpy_dtype_promotion("standard")  # optax.adam is not strict.
def test_one_fragment_equals_local_updates():
  arguments = {"communication_period": 3, "num_replicas": N}
  make = functools.partial(
    lambda fun, **kwargs: fun(
      optax.adam(LR),
      optax.sgd(0.7, momentum=0.9),
      maps.AXIS,
      **arguments,
      **kwargs,
    )
  )
  start = {k: _start()[k] for k in "ab"}
  results = []
  for tx in (make(local_updates), make(streaming_updates, fragments=1)):
    params, state = stack(start), tx.init(start)
    run = maps.stepper("vmap", functools.partial(take_step, tx), state, N)
    for i in range(7):
      gradients = {k: _gradients(i)[k] for k in "ab"}
      params, state = run(state, params, gradients)
    results.append((params, center_params(state)))
  chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("delay", [0, 2])
def test_each_fragment_has_one_collective(delay):
  tx = streaming_updates(
    optax.sgd(LR),
    optax.sgd(1.0),
    maps.AXIS,
    communication_period=6,
    fragments=3,
    delay=delay,
    num_replicas=N,
  )
  params = [np.ones((N, 2), np.float32)] * 5
  state = tx.init(jax.tree.map(lambda x: x[0], params))
  specs = state_specs(state, maps.AXIS)

  def step(state, params):
    own = jax.tree.map(lambda x: x[0], params)
    updates, state = tx.update(own, state, own)
    new = optax.apply_updates(own, updates)
    return jax.tree.map(lambda x: x[None], new), state

  run = jax.jit(
    jax.shard_map(
      step,
      mesh=maps.mesh(N),
      in_specs=(specs, P(maps.AXIS)),
      out_specs=(P(maps.AXIS), specs),
    )
  )
  text = run.lower(state, params).compile().as_text()
  collective = r"= .*\ball-(?:reduce|gather|to-all)(?:-start)?\("
  assert len(re.findall(collective, text)) == 3
  assert not re.findall(collective, text[text.index("\nENTRY ") :])
  params, state = run(state, params)
  for _ in range(11):
    params, state = run(state, jax.tree.map(np.asarray, params))
  assert state.syncs.tolist() == [2, 2, 2]


def test_dtypes_are_kept():
  tx = streaming_updates(
    optax.sgd(0.5),
    optax.sgd(1.0),
    "i",
    communication_period=2,
    fragments=1,
    delay=1,
    mix=0.5,
    num_replicas=2,
  )
  state = tx.init(jnp.ones(3, jnp.bfloat16))
  axes = state_axes(state)
  step = jax.vmap(
    tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name="i"
  )
  ones = jnp.ones((2, 3), jnp.bfloat16)
  for _ in range(3):
    updates, new_state = step(ones, state, ones)
    assert updates.dtype == jnp.bfloat16
    chex.assert_trees_all_equal_shapes_and_dtypes(state, new_state)
    state = new_state


@pytest.mark.parametrize(
  ("fragments", "what"),
  [
    (4, "`fragments` is 4, but there are 3 parameters"),
    (lambda params: {"a": 0, "b": 2, "c": 0}, "numbered from 0 without gaps"),
    (lambda params: [0, 1], "the fragment of each of 3 parameters"),
  ],
)
def test_invalid_fragments_are_refused(fragments, what):
  tx = streaming_updates(
    optax.sgd(1.0),
    optax.sgd(1.0),
    "i",
    communication_period=4,
    fragments=fragments,
    num_replicas=2,
  )
  with pytest.raises(ValueError, match=what):
    tx.init(_start())


def test_state_of_other_fragments_is_refused():
  make = lambda fragments: streaming_updates(
    optax.sgd(1.0),
    optax.sgd(1.0),
    "i",
    communication_period=4,
    fragments=fragments,
    num_replicas=1,
  )
  state = make(2).init(_start())
  with pytest.raises(
    ValueError, match="made with 2 fragments, but there are 3"
  ):
    jax.vmap(
      lambda s: make(3).update(_start(), s, _start())[0],
      in_axes=None,
      axis_size=1,
      axis_name="i",
    )(state)
