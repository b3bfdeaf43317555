"""Learners on wires of few bits, which keep of each fragment what they left out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist import compression
from optax_dist.coordinator import strategies
from optax_dist.coordinator.aggregation import encoder as encoders
from optax_dist.coordinator.aggregation.error_feedback import ErrorFeedback
from optax_dist.coordinator.extras.decoupled_diloco import fragments as parts
from optax_dist.coordinator.extras.decoupled_diloco import (
  strategy as decoupled_diloco,
)

# A fragment is a block, so that the transform's chunks are the same.
BLOCK = 4032
PARAMS = {"a": jnp.ones(BLOCK), "b": jnp.ones((BLOCK // 2, 2))}
INNER, OUTER = optax.sgd(0.1), optax.sgd(0.7, momentum=0.5, nesterov=True)
PERIOD = 4


def made(n=2, outer=OUTER, params=PARAMS, **options):
  options = {"fragments": 2, "period": PERIOD, "merge": "mean"} | options
  factory = decoupled_diloco.decoupled_diloco(outer, **options)
  found = factory(INNER, strategies.Quorum(n, n))
  return found, found.shared(params)


class Learner:
  """A learner's part of a round, without a coordinator."""

  def __init__(self, found, shared, wire, decay=1.0):
    self.strategy, self.local = found, found.local(shared)
    self.feedback = ErrorFeedback(decay)
    exchanged = found.exchanged(shared.params)
    self.encoder = encoders.Encoder(exchanged, wire, None)

  def give(self, shared, number):
    """What it gives, as the others hear it."""
    fragment = self.strategy.fragment(self.local)
    owed = self.feedback.owed(self.strategy.size(fragment), fragment)
    given, _, self.local = self.strategy.contribute(
      shared, self.local, True, owed
    )
    raw = np.zeros(self.encoder.place.nbytes, np.uint8)
    assert self.encoder.write(given, raw)
    heard = self.encoder.decoded(raw)[0]
    payload, kept = self.strategy.sent(fragment, given, heard, owed)
    for index, leaf in enumerate(payload[1:], 1):
      self.encoder.correct(index, leaf, raw)
    self.feedback.left_out(np.asarray(kept), number, fragment)
    return [x.copy() for x in self.encoder.decoded(raw)]

  def train(self, gradients):
    self.local = self.strategy.train(self.local, gradients, 1)

  def take_in(self, shared, number, merged=True):
    self.feedback.settle(number, merged)
    self.local = self.strategy.merge(shared, self.local, merged)


def merged(found, shared, heard):
  mean = tuple(
    np.mean(np.stack(rows), 0, dtype=np.float32)
    for rows in zip(*heard, strict=True)
  )
  return found.apply(shared, mean)


def gradient(seed):
  rng = np.random.default_rng(seed)
  draw = lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32)
  return jax.tree.map(draw, PARAMS)


METHODS = {
  "top_k": lambda decay: compression.top_k(
    0.03, chunk=BLOCK, bits=2, error_feedback=decay
  ),
  "int4": lambda decay: compression.quantize(
    4, block=BLOCK, error_feedback=decay
  ),
}


@pytest.mark.parametrize(
  ("wire", "decay", "alpha"),
  [("top_k", 0.9, 0.0), ("int4", 1.0, 0.0), ("top_k", 0.9, 0.25)],
)
def test_the_same_contributions_have_the_same_outcome_as_streaming_updates(
  wire, decay, alpha
):
  found, shared = made(alpha=alpha)
  learners = [Learner(found, shared, wire, decay) for _ in range(2)]
  tx = optax_dist.streaming_updates(
    INNER,
    OUTER,
    "data",
    communication_period=PERIOD,
    fragments=lambda p: parts.balanced_fragments(p, 2),
    mix=alpha,
    compression=METHODS[wire](decay),
    num_replicas=2,
  )
  state = tx.init(PARAMS)
  axes = optax_dist.states.state_axes(state)

  def update(gradients, state, params):
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  update = jax.jit(
    jax.vmap(
      update,
      axis_name="data",
      in_axes=(0, axes, 0),
      out_axes=(0, axes),
    )
  )
  params = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
  rounds = 0
  for step in range(4 * PERIOD):
    gradients = [gradient(10 * step + i) for i in range(2)]
    both = jax.tree.map(lambda *rows: jnp.stack(rows), *gradients)
    params, state = update(both, state, params)
    for learner, own in zip(learners, gradients, strict=True):
      learner.train(own)
    if step % 2:
      heard = [learner.give(shared, rounds) for learner in learners]
      shared = merged(found, shared, heard)
      for learner in learners:
        learner.take_in(shared, rounds)
      rounds += 1
      center = optax_dist.center_params(state)
      for name, theirs in center.items():
        # Rarely, a number is in the middle between two levels.
        close = np.isclose(shared.params[name], theirs, rtol=1e-4, atol=1e-5)
        assert close.mean() > 0.998
  assert rounds == 8


@pytest.mark.parametrize(
  ("wire", "rule", "alpha"),
  [("top_k", "mean", 0.25), ("int2", "radial", 0.25), ("sign", "mean", 0.0)],
)
def test_all_that_was_learned_arrives_once(wire, rule, alpha):
  """Also where a learner's own parameters keep some of what was left out."""
  found, shared = made(1, optax.sgd(1.0), merge=rule, alpha=alpha, fragments=1)
  learner = Learner(found, shared, wire)
  learner.train(gradient(0))
  goal = learner.local.params
  for number in range(300):
    heard = learner.give(shared, number)
    shared = merged(found, shared, [heard])
    learner.take_in(shared, number)
    far = optax.tree.norm(optax.tree.sub(goal, shared.params))
    if far < 0.02 * optax.tree.norm(optax.tree.sub(goal, PARAMS)):
      break
  else:
    raise AssertionError(f"{float(far)} from what was learned")


@pytest.mark.parametrize("rule", ["mean", "radial"])
def test_a_short_fragment_is_not_made_smaller_by_its_padding(rule):
  params = {"a": jnp.ones(2 * BLOCK), "b": jnp.ones(30), "c": jnp.ones(7)}
  found, shared = made(1, merge=rule, params=params)
  learner = Learner(found, shared, "sign")
  learner.local = learner.local._replace(round=1)  # The one of b and c.
  assert learner.strategy.fragment(learner.local) == 1
  ones = jax.tree.map(jnp.ones_like, params)
  learner.train(ones)
  heard = learner.give(shared, 0)[0][:37]
  # All have moved by the same, and directions are as long as they have numbers.
  moved = 1.0 if rule == "radial" else 0.1
  np.testing.assert_allclose(heard, moved, rtol=1e-5)


@pytest.mark.parametrize("rule", ["mean", "radial"])
def test_a_contribution_that_does_not_count_keeps_its_residual(rule):
  found, shared = made(merge=rule)
  learner, other = (Learner(found, shared, "top_k") for _ in range(2))
  for one in (learner, other):
    one.train(gradient(1))
    one.train(gradient(2))
  # One was merged, the other one failed, and gives the same again.
  first = learner.give(shared, 0)
  learner.feedback.settle(0, False)
  again = learner.give(shared, 1)
  for got, expected in zip(again, first, strict=True):
    np.testing.assert_array_equal(got, expected)
  # Without the error of what failed, it owes what one that never failed owes.
  other.give(shared, 0)
  after = merged(found, shared, [first])
  learner.take_in(after, 1)
  other.take_in(after, 0)
  np.testing.assert_array_equal(
    learner.feedback.owed(BLOCK, 0), other.feedback.owed(BLOCK, 0)
  )
  assert learner.feedback.owed(BLOCK, 0).any()


def test_the_norm_is_of_received_changes():
  """So that the merge is that of the rules, of what was heard."""
  found, shared = made(1, optax.sgd(1.0), merge="radial", fragments=1)
  learner = Learner(found, shared, "top_k")
  learner.train(gradient(3))
  heard = learner.give(shared, 0)
  after = merged(found, shared, [heard])
  at = 0
  for number, name in enumerate(PARAMS):
    direction = heard[0][at : at + BLOCK]
    at += BLOCK
    moved = np.ravel(PARAMS[name] - after.params[name])
    length = np.linalg.norm(moved)
    np.testing.assert_allclose(length, heard[1][number], rtol=1e-5)
    cosine = moved @ direction / length / np.linalg.norm(direction)
    assert cosine == pytest.approx(1.0, abs=1e-5)
    whole = learner.local.params[name] - PARAMS[name]
    assert length < np.linalg.norm(whole)
