"""Samples that are leased to replicas with local steps."""

import collections
import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import waiting

from optax_dist import coordinator, ledger

PERIOD = 2
PARAMS = jnp.zeros(4)


class Rounds:
  """What replicas compute on, and which rounds count."""

  def __init__(self, replicas, slow=None):
    self.slow = slow
    self.lock = threading.Lock()
    self.together = threading.Barrier(replicas, timeout=60.0)
    # Set when the slow replica, if there is one, has computed its first round.
    self.computed = threading.Event()
    self.counted = collections.Counter()
    self.reasons = collections.Counter()

  def train(self, replica):
    result = []
    # Or some could be done before all are in.
    self.together.wait()
    slow = replica.replica == self.slow
    if self.slow is not None and not slow:
      # Or they could be done before it has any samples.
      assert self.computed.wait(60.0)
    for indices in replica.batches():
      assert len(indices) == 2
      result += indices.tolist()
      if slow and len(result) == 2 * PERIOD:
        # Between the last local step and its exchange others take a step.
        self.computed.set()
        waiting.until(lambda: replica.is_stale or replica.finished)
      outcome = replica.step(jnp.ones(4))
      # At the end of the data two may compute on the same: the first one counts,
      # and the run ends amid the other's round. The others may take a step amid a
      # round of the slow one, too.
      late = slow and outcome.reason == "stale"
      if len(result) < 2 * PERIOD and not outcome.finished and not late:
        assert outcome.accepted
        assert not outcome.members
        continue
      with self.lock:
        self.reasons[outcome.reason] += 1
        if outcome.accepted:
          self.counted.update(result)
      result = []
    return replica.report_data()


def run(train, n, strategy, data, **arguments):
  return coordinator.run_embedded(
    train, n, optax.sgd(0.1), PARAMS, strategy=strategy, data=data, **arguments
  )


@pytest.mark.parametrize(
  ("strategy", "samples"),
  [
    (coordinator.local_updates(communication_period=PERIOD), 12),
    (
      coordinator.elastic_average(moving_rate=0.3, communication_period=PERIOD),
      4,
    ),
  ],
  ids=["local updates", "elastic"],
)
@pytest.mark.parametrize("mode", ["exact", "streaming"])
def test_each_sample_is_in_one_accepted_exchange(strategy, samples, mode):
  data = coordinator.Batches(52, samples, seed=3, epochs=2, mode=mode)
  rounds = Rounds(3)
  result = run(rounds.train, 3, strategy, data)
  assert result[0] == result[1] == result[2]
  left = collections.Counter(range(52)) + collections.Counter(range(52))
  for epoch in result[0]:
    assert epoch.skipped == ()
    left.subtract((*epoch.left_out, *epoch.open))
  assert rounds.counted == +left
  assert sum(e.committed for e in result[0]) == rounds.counted.total()


def test_a_round_that_is_dropped_returns_its_samples():
  """Two of three are enough; the third is slow, and its rounds are stale."""
  data = coordinator.Batches(80, 8, seed=3)
  rounds = Rounds(3, slow=2)
  run(
    rounds.train,
    3,
    coordinator.local_updates(communication_period=PERIOD),
    data,
    replicas_to_aggregate=2,
  )
  assert rounds.counted == dict.fromkeys(range(80), 1)
  assert rounds.reasons["stale"]


@pytest.mark.parametrize(
  "strategy",
  [coordinator.local_updates, coordinator.elastic_average],
)
def test_rejected_local_steps_are_undone(strategy):
  """If they are not finite, others get the samples, and the local steps are undone."""
  rate = {"moving_rate": 0.5} if "elastic" in strategy.__name__ else {}
  data = coordinator.Batches(8, 4, seed=3)
  seen = []

  def train(replica):
    for number, indices in enumerate(replica.batches()):
      bad = number == 1
      outcome = replica.step(jnp.full(4, jnp.nan if bad else 1.0))
      seen.append((indices.tolist(), outcome.reason))
      if bad:
        np.testing.assert_array_equal(replica.params, replica.center)
        np.testing.assert_array_equal(replica.params, PARAMS)
    return replica.report_data()

  ((report,),) = run(
    train, 1, strategy(communication_period=PERIOD, **rate), data
  )
  assert [reason for _, reason in seen] == ["", "non_finite", "", "", "", ""]
  assert report == ledger.EpochReport(0, 8, (), (), ())
  counted = [i for indices, _ in seen[2:] for i in indices]
  assert sorted(counted) == list(range(8))


def test_sample_count_must_be_a_multiple_of_the_local_steps():
  strategy = coordinator.local_updates(communication_period=3)
  with pytest.raises(ValueError, match="a multiple of the 6 local steps"):
    run(lambda replica: None, 2, strategy, coordinator.Batches(40, 8))
  with pytest.raises(ValueError, match="one for each fragment"):
    run(
      lambda replica: None,
      1,
      coordinator.decoupled_diloco(fragments=1),
      coordinator.Batches(40, 8),
    )
  slots = coordinator.Batches(24, 12, micro_batch=2, deterministic=True)
  with pytest.raises(ValueError, match="replicas have states"):
    run(
      lambda replica: None,
      1,
      coordinator.local_updates(communication_period=2),
      slots,
    )
