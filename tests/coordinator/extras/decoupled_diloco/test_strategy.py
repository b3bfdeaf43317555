"""Tests of a learner's contributions and merges, against manual computation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from averages import average

from optax_dist.coordinator import strategies
from optax_dist.coordinator.aggregation import layout, means
from optax_dist.coordinator.extras.decoupled_diloco import fragments as parts
from optax_dist.coordinator.extras.decoupled_diloco import (
  strategy as decoupled_diloco,
)

PARAMS = {"a": jnp.ones((4, 3)), "b": jnp.ones(10), "c": jnp.ones(5)}
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
# The largest first: "a" alone, then "b" and "c".
FRAGMENTS = (("a",), ("b", "c"))


def made(n=2, k=2, **options):
  """A strategy, and the state that its learners share."""
  options = {"fragments": 2, "period": 4} | options
  factory = decoupled_diloco.decoupled_diloco(OUTER, **options)
  strategy = factory(optax.sgd(0.1), strategies.Quorum(k, n))
  return strategy, strategy.shared(PARAMS)


def gradient(seed):
  rng = np.random.default_rng(seed)
  draw = lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32)
  return jax.tree.map(draw, PARAMS)


class Given(NamedTuple):
  payload: Any
  work: Any


def give(found, shared, local, called=True):
  payload, work, local = found.contribute(shared, local, called)
  return Given(payload, work), local


def trained(found, local, steps, seed=0, tokens=8):
  for number in range(steps):
    local = found.train(local, gradient(100 * seed + number), tokens)
  return local


def merged(found, shared, payloads, shares):
  """The shared state after a round, with the coordinator's own arithmetic."""
  place = layout.layout(found.exchanged(PARAMS))
  raw = []
  for payload in payloads:
    out = np.zeros(place.nbytes, np.uint8)
    assert means.write(payload, place, out)
    raw.append(out.tobytes())
  n = len(raw)
  mean = average(place, raw, [n * share for share in shares])
  return found.apply(shared, tuple(means.read(place, mean)))


def only(tree, fragment):
  return tuple(tree[name] for name in FRAGMENTS[fragment])


def close(got, expected):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    got,
    expected,
  )


def by_hand(gaps, shares, rule):
  """The outer gradient: norms and directions averaged apart, or the mean."""
  outer = []
  for rows in zip(*gaps, strict=True):
    rows = np.stack([np.asarray(row) for row in rows])
    mean = np.einsum("i,i...->...", shares, rows)
    if rule == "radial":
      norms = [np.linalg.norm(row) for row in rows]
      units = [row / norm for row, norm in zip(rows, norms, strict=True)]
      along = np.einsum("i,i...->...", shares, np.stack(units))
      mean = np.dot(shares, norms) * along / np.linalg.norm(along)
    outer.append(mean)
  return tuple(outer)


@pytest.mark.parametrize("rule", ["radial", "mean"])
def test_rounds_are_merged_and_mixed_as_the_rules_say(rule):
  strategy, shared = made(merge=rule)
  locals_ = [
    trained(strategy, strategy.local(shared), 2, seed=i) for i in range(2)
  ]
  states = [OUTER.init(only(PARAMS, f)) for f in range(2)]
  center = dict(PARAMS)
  shares = [0.75, 0.25]
  for round_ in range(3):
    fragment = round_ % 2
    start = only(center, fragment)
    gaps = []
    for local in locals_:
      own = only(local.params, fragment)
      gaps.append(tuple(b - o for b, o in zip(start, own, strict=True)))
    outer = by_hand(gaps, shares, rule)
    updates, states[fragment] = OUTER.update(outer, states[fragment], start)
    new = optax.apply_updates(start, updates)
    center |= dict(zip(FRAGMENTS[fragment], new, strict=True))
    contribution = [give(strategy, shared, local) for local in locals_]
    shared = merged(
      strategy, shared, [g.payload for g, _ in contribution], shares
    )
    close(shared.params, center)
    assert int(shared.opt_state.round) == round_ + 1
    # They train on, and mix the merge with their parameters of that time.
    locals_ = [
      trained(strategy, local, 2, seed=10 * round_ + i)
      for i, (_, local) in enumerate(contribution)
    ]
    for i, local in enumerate(locals_):
      took = strategy.merge(shared, local, merged=True)
      mixed = parts.mix(
        only(local.params, fragment), only(center, fragment), 0.25
      )
      close(only(took.params, fragment), mixed)
      other = 1 - fragment
      close(only(took.params, other), only(local.params, other))
      locals_[i] = took


def dues(found, local, steps):
  """Whether it is due after each of these steps, and its state after the last."""
  due = []
  for number in range(steps):
    local = trained(found, local, 1, seed=number)
    due.append(found.is_due(local, called=False))
  return due, local


def test_a_learner_contributes_by_its_own_clock():
  strategy, shared = made(period=8)
  due, local = dues(strategy, strategy.local(shared), 8)
  assert due == [False] * 3 + [True] * 5  # It stays due until it has given.
  contribution, local = give(strategy, shared, local)
  assert (
    contribution.work.tokens,
    contribution.work.steps,
    contribution.work.late,
  ) == (64, 8, 0)
  shared = merged(strategy, shared, [contribution.payload], [1.0])
  # The merge has taken three steps; the turn counts from when it has given.
  local = strategy.merge(shared, trained(strategy, local, 3), merged=True)
  assert dues(strategy, local, 2)[0] == [True, True]
  assert local.begins_at == 12


def test_called_learner_contributes_its_progress():
  strategy, shared = made(period=8)
  local = strategy.local(shared)
  assert not strategy.is_due(local, called=True)  # There is nothing yet.
  local = trained(strategy, local, 1)
  assert not strategy.is_due(local, called=False)
  assert strategy.is_due(local, called=True)
  assert give(strategy, shared, local)[0].work.steps == 1


def test_merge_without_a_learner_postpones_its_turn():
  """Otherwise a fragment would be merged more than once in a period."""
  strategy, shared = made(period=8)
  local = trained(strategy, strategy.local(shared), 3)
  contribution, _ = give(
    strategy, shared, trained(strategy, strategy.local(shared), 4)
  )
  shared = merged(strategy, shared, [contribution.payload], [1.0])
  local = strategy.merge(shared, local, merged=False)
  assert dues(strategy, local, 5)[0] == [False] * 3 + [True] * 2


def test_progress_is_counted_from_the_shared_parameters():
  """Merges of other learners are not applied twice."""
  strategy, shared = made(merge="mean", fragments=1, period=2)
  local = trained(strategy, strategy.local(shared), 2)
  contribution, _ = give(strategy, shared, local)
  shared = merged(strategy, shared, [contribution.payload], [1.0])
  late = strategy.merge(shared, local, merged=False)
  close(late.params, local.params)
  again, _ = give(strategy, shared, late)
  assert again.work.late == 1
  gap = lambda tree: np.concatenate(
    [np.ravel(np.asarray(x)) for x in jax.tree.leaves(tree)]
  )
  expected = gap(shared.params) - gap(local.params)
  np.testing.assert_allclose(again.payload[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("max_staleness", "kept"), [(1, True), (0, False)])
def test_progress_that_missed_its_round_is_kept_within_max_staleness(
  max_staleness, kept
):
  strategy, shared = made(max_staleness=max_staleness)
  slow, fast = strategy.local(shared), strategy.local(shared)
  contribution, _ = give(strategy, shared, trained(strategy, fast, 2))
  shared = merged(strategy, shared, [contribution.payload], [1.0])
  slow = trained(strategy, slow, 3, seed=7)
  took = strategy.merge(shared, slow, merged=False)
  assert took.round == 1
  if kept:
    close(took.params, slow.params)
    assert took.steps.tolist() == [3, 3]
  else:
    mixed = parts.mix(only(slow.params, 0), only(shared.params, 0), 0.25)
    close(only(took.params, 0), mixed)
    assert took.steps.tolist() == [0, 3]
  # Fragment 0 has its turn again after fragment 1.
  contribution, _ = give(
    strategy, shared, trained(strategy, fast, 2)._replace(round=1)
  )
  shared = merged(strategy, shared, [contribution.payload], [1.0])
  took = strategy.merge(shared, took, merged=False)
  contribution, _ = give(strategy, shared, trained(strategy, took, 1))
  assert (contribution.work.late, contribution.work.steps) == (
    (1, 4) if kept else (0, 1)
  )


def test_a_late_contribution_is_dropped():
  strategy, shared = made(fragments=1, period=2, max_staleness=1)
  slow = trained(strategy, strategy.local(shared), 3)
  for expected in (3, 0):
    contribution, _ = give(
      strategy, shared, trained(strategy, strategy.local(shared), 2)
    )
    shared = merged(strategy, shared, [contribution.payload], [1.0])
    slow = strategy.merge(shared, slow, merged=False)
    assert slow.steps.tolist() == [expected]


def test_slow_learner_contributes_at_its_turn_without_beginning_a_round():
  strategy, shared = made(period=16)
  slow = trained(strategy, strategy.local(shared), 1)
  due = []
  for round_ in range(3):
    due.append(strategy.is_due(slow, called=False))
    fast = trained(strategy, strategy.local(shared), 2)._replace(round=round_)
    contribution, _ = give(strategy, shared, fast)
    assert contribution.work.begins
    shared = merged(strategy, shared, [contribution.payload], [1.0])
    slow = strategy.merge(shared, slow, merged=False)
    slow = trained(strategy, slow, 1)
  assert due == [False, False, True]
  # It does not begin the round for the others, as its turn is not yet.
  contribution, slow = give(strategy, shared, slow, called=False)
  assert not contribution.work.begins
  shared = merged(strategy, shared, [contribution.payload], [1.0])
  slow = trained(strategy, strategy.merge(shared, slow, merged=True), 1)
  assert not strategy.is_due(slow, called=False)


def test_a_late_learner_begins_at_the_open_round():
  strategy, shared = made()
  for _ in range(3):
    local = trained(strategy, strategy.local(shared), 2)
    contribution, _ = give(strategy, shared, local)
    assert contribution.work.late == 0
    shared = merged(strategy, shared, [contribution.payload], [1.0])
  assert strategy.local(shared).taken.tolist() == [2, 1]


def test_fragments_keep_the_dtypes_of_their_arrays():
  factory = decoupled_diloco.decoupled_diloco(fragments=2, period=2)
  strategy = factory(optax.sgd(0.1, momentum=0.9), strategies.Quorum(1, 2))
  params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones((2, 2))}
  shared = strategy.shared(params)
  local = strategy.train(strategy.local(shared), params, 1)
  contribution, local = give(strategy, shared, local)
  raw = tuple(np.asarray(x) for x in contribution.payload)
  after = strategy.apply(shared, raw)
  local = strategy.merge(after, local, merged=True)
  for tree in (after.params, local.params):
    assert [x.dtype for x in jax.tree.leaves(tree)] == [
      jnp.bfloat16,
      jnp.float32,
    ]


@pytest.mark.parametrize(
  ("options", "quorum", "message"),
  [
    ({"fragments": 4}, {}, "fragments must be from 1 to 3"),
    ({"fragments": 3, "period": 2}, {}, "period must be at least fragments=3"),
    ({"alpha": 1.0}, {}, "alpha must be below 1"),
    ({"merge": "sum"}, {}, "`merge` must be"),
    ({"max_staleness": -1}, {}, "`max_staleness` must be"),
    ({"safety": 2.0}, {}, "`safety` must be"),
    ({"fragments": 0}, {}, "`fragments` must be a positive integer"),
    ({}, {"replicas_to_aggregate": 3}, "replicas_to_aggregate, its quorum"),
    ({}, {"max_staleness": 1}, "for what is late"),
    ({}, {"weight": "inverse"}, "for what is late"),
  ],
)
def test_arguments_out_of_range_are_refused(options, quorum, message):
  numbers = {"replicas_to_aggregate": 2, "total_num_replicas": 2} | quorum

  def make():
    factory = decoupled_diloco.decoupled_diloco(**({"period": 4} | options))
    return factory(optax.sgd(0.1), strategies.Quorum(**numbers))

  with pytest.raises(ValueError, match=message):
    make().shared(PARAMS)
