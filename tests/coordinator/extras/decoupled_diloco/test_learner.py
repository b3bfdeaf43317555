"""A learner's view of its contributions; an event loop that the test plays."""

import copy

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist.coordinator import strategies
from optax_dist.coordinator.extras.decoupled_diloco import (
  strategy as decoupled_diloco,
)
from optax_dist.coordinator.extras.decoupled_diloco.rounds import WORK
from optax_dist.coordinator.extras.groups.group import Group
from optax_dist.coordinator.options import Options
from optax_dist.coordinator.protocol.effects import Resolved
from optax_dist.coordinator.replica import Replica
from optax_dist.coordinator.runtime import endpoint, states
from optax_dist.coordinator.training.participant import Participant

PARAMS = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
RATE = 0.5
OPT = optax.sgd(RATE)
ONES = {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
_compiled = {}


def strategy(opt=OPT, fragments=2):
  """Its fragments take turns every other step."""
  if (opt, fragments) not in _compiled:
    make = decoupled_diloco.decoupled_diloco(
      optax.sgd(1.0),
      fragments=fragments,
      period=2 * fragments,
      merge="mean",
      alpha=0.0,
    )
    made = _compiled[opt, fragments] = make(opt, strategies.Quorum(1, 2))
    made.shared(PARAMS)
  return copy.copy(_compiled[opt, fragments])


class Driven:
  """A learner; what it submits is written down."""

  def __init__(self, opt=OPT, fragments=2, **options):
    self.given = []
    self.participant = Participant(
      endpoint.World().connect("0"),
      strategy(opt, fragments),
      PARAMS,
      replica=0,
      settings=Options(**options),
    )
    self.participant.inbox.joined.incarnation = 0
    self.participant.resume()
    self.one = Replica(self.participant)
    self.one._calls.loop.begin()
    self.participant.driver.submit = self._submit
    self.seen = self.participant.inbox
    self.states = [self.seen.published]

  def _submit(self, submitted, memory, writer=None):
    self.given.append(submitted)

  def step(self, times=1, grads=ONES, **options):
    for _ in range(times):
      outcome = self.one.step(grads, **options)
    return outcome

  def commit(self, computed=True):
    """The open round is merged, with all gradients -1."""
    before = self.states[-1]
    mean = (jnp.full(5, -1.0),)
    after = states.State(before.step + 1)
    work = lambda: self.participant.strategy.apply(before.get(), mean)
    self.states.append(after)
    self.seen.published = after
    if computed:
      after.compute(work)
    return lambda: after.compute(work)

  def resolve(self, reason="", sequence=None):
    """The outcome of its last contribution, or of this one."""
    number = self.given[-1].sequence if sequence is None else sequence
    members = () if reason else (0, 1)
    step = 0 if reason else self.states[-1].step
    resolved = Resolved(number, reason, step, members)
    self.seen.notify(resolved)

  def numbers(self):
    return {k: np.asarray(v).tolist() for k, v in self.one.params.items()}

  @property
  def counts(self):
    return self.one.stats()["gradients"]


@pytest.fixture
def drive():
  made = []

  def drive(**options):
    made.append(Driven(**options))
    return made[-1]

  yield drive
  for driven in made:
    driven.one.close()


def test_batch_labels_too_large_for_a_record_are_left_out(drive):
  driven = drive()
  text = "x" * (driven.participant.most_text - 2)
  driven.step(batch=text)
  driven.step(batch=text)
  (sent,) = driven.given
  assert sent.batches == "[null]"
  driven.commit()
  driven.resolve()
  driven.step(2, batch=1)
  assert driven.given[-1].batches == "[1,1]"


def test_a_learner_trains_on_until_its_contribution_is_resolved(drive):
  driven = drive()
  driven.step(batch="first", tokens=3)
  assert driven.given == []
  driven.step(batch=2, tokens=5)
  (sent,) = driven.given
  assert sent.batches == '["first",2]'
  work = WORK.decode(sent.work)
  assert (work.tokens, work.steps) == (8, 2)
  assert (work.late, work.begins) == (0, True)
  assert (sent.count, sent.finite) == (1, True)
  # It has one round to contribute to, and the others are not asked to wait.
  assert driven.step(5)[:4] == (True, "", 0, ())
  assert len(driven.given) == 1
  driven.commit()
  driven.resolve()
  notified = driven.step()
  assert notified[:4] == (True, "", 1, (0, 1))
  assert notified.committed == 1
  assert driven.counts == {"applied": 1}
  # The merge is reported once; the next turn is for the other fragment.
  assert driven.step().members == ()
  assert WORK.decode(driven.given[1].work).steps == 8
  assert driven.given[1].batches == f"[{','.join(['null'] * 6)}]"


def test_merge_replaces_only_its_fragment(drive):
  """Of its own steps since, `alpha` would be kept; here it is 0."""
  driven = drive()
  driven.step(2)
  driven.commit()
  driven.resolve()
  driven.step()
  merged = [name for name, x in driven.numbers().items() if x[0] == 1.0]
  assert len(merged) == 1
  (other,) = {"a", "b"} - {*merged}
  assert driven.numbers()[other][0] == -3 * RATE


def test_a_learner_does_not_wait_for_a_state(drive):
  driven = drive()
  driven.step(2)
  compute = driven.commit(computed=False)
  driven.resolve()
  assert driven.step().members == ()
  assert driven.numbers()["a"] == [-3 * RATE] * 3
  compute()
  assert driven.step().members == (0, 1)
  assert driven.counts == {"applied": 1}


def test_a_learner_is_never_stale(drive):
  driven = drive()
  for _ in range(5):
    driven.commit()
  assert not driven.one.is_stale
  assert driven.step().global_step == 5


def test_call_counts_only_for_the_open_round(drive):
  driven = drive()
  driven.seen.called = 1  # The one after it, of which it knows nothing yet.
  driven.step()
  assert driven.given == []
  driven = drive()
  driven.seen.called = 0
  driven.step()
  assert len(driven.given) == 1
  assert WORK.decode(driven.given[0].work).begins


def test_a_suspended_learner_trains_on_and_contributes_later(drive):
  driven = drive()
  driven.seen.joined.suspended = True
  assert driven.step(4).accepted
  assert driven.given == []
  driven.seen.joined.suspended = False
  driven.step()
  assert WORK.decode(driven.given[0].work).steps == 5


@pytest.mark.parametrize("known", [None, "", "stale"])
def test_a_readmitted_learner_keeps_its_steps(drive, known):
  """Its contribution is lost, unless its outcome has come before."""
  driven = drive()
  driven.step(2)
  if known is not None:
    driven.resolve(known)
  driven.seen.joined.incarnation = 1
  driven.step()
  outcome = {None: "lost", "": "applied"}.get(known, known)
  assert driven.counts == {"applied": 0} | {outcome: 1}
  assert driven.numbers()["b"] == [-3 * RATE] * 2
  # It contributes what it has, as the member that it is now.
  assert [g.incarnation for g in driven.given] == [0, 1]
  # An outcome that comes after all is that of a contribution given up.
  driven.resolve("", sequence=0)
  assert driven.step().members == ()
  assert driven.counts == {"applied": 0} | {outcome: 1}


def test_nonfinite_learner_restarts_from_the_center(drive):
  driven = drive(opt=optax.sgd(RATE, momentum=0.9))
  driven.step()
  spoilt = {"a": np.full(3, np.nan, np.float32), "b": ONES["b"]}
  driven.step(1, spoilt)
  (sent,) = driven.given
  assert (sent.finite, sent.payload) == (False, b"")
  driven.resolve("non_finite")
  outcome = driven.step()
  assert (outcome.accepted, outcome.reason) == (False, "non_finite")
  assert driven.counts == {"applied": 0, "non_finite": 1}
  # Its momentum has none of it, either.
  assert driven.numbers() == {"a": [0.0] * 3, "b": [0.0] * 2}
  driven.step()
  assert driven.numbers()["a"] == [-RATE] * 3


@pytest.mark.parametrize("open_", [False, True])
def test_only_an_unresolved_contribution_is_counted_as_finished(drive, open_):
  """Steps that were part of none are no contributions."""
  driven = drive()
  driven.step(2 if open_ else 1)
  driven.seen.finished = "enough"
  outcome = driven.step()
  assert (outcome.finished, outcome.reason) == (True, "finished")
  assert driven.counts == {"applied": 0} | ({"finished": 1} if open_ else {})
  # All end with the same parameters.
  assert driven.numbers() == {"a": [0.0] * 3, "b": [0.0] * 2}


def test_a_learner_keeps_its_optimizer_state_at_each_contribution(drive):
  """A count that is no array is made one: the layout of what is served needs it."""
  count = optax.GradientTransformation(
    lambda params: 0, lambda g, n, params=None: (g, n + 1)
  )
  driven = drive(opt=optax.chain(count, OPT))
  driven.step(2)
  assert len(driven.given) == 1
  assert driven.participant.driver.arrays.states.inner[0] == 2


def test_a_learner_of_several_processes_is_refused():
  """Before it says anything to the others: cause and remedy."""
  place = endpoint.World().connect("0")
  asked = []
  group = Group(0, 2, lambda text: asked.append(text) or [text] * 2)
  with pytest.raises(ValueError, match="one process, got one of 2"):
    Participant(
      place,
      strategy(),
      PARAMS,
      replica=0,
      settings=Options(),
      processes=group,
    )
  place.close()
  assert not asked


def test_tokens_are_for_learners_and_a_number_in_bounds(drive):
  driven = drive()
  for wrong in (-1, 0.5, "8", 10**12 + 1, 1 << 64):
    with pytest.raises(ValueError, match=rf"tokens=.* got {wrong!r}"):
      driven.step(tokens=wrong)
  assert driven.numbers()["a"] == [0.0] * 3
  assert driven.step(tokens=0).accepted
  sync = strategies.SyncReplicas(OPT, strategies.Quorum(1, 1))
  place = endpoint.World().connect("0")
  one = Replica(Participant(place, sync, PARAMS, replica=0, settings=Options()))
  with pytest.raises(ValueError, match=r"tokens=.* got 4 with 'sync_replicas'"):
    one.step(ONES, tokens=4)
  one.close()
