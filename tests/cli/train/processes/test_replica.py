"""The training loop of a replica, with a coordinator that a test plays."""

import errno
import fractions
import os
import pathlib
import types

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_dist.cli.train import digits, model
from optax_dist.cli.train.processes import checkpoints, replica
from optax_dist.coordinator.outcome import Outcome

CONFIG = {"commits": 6, "local_steps": 6, "steps_per_epoch": 2}


class Joined:
  """A `coordinator.Replica` whose outcomes are told in advance."""

  def __init__(self, outcomes, global_step=0, finished=False):
    self.outcomes, self.global_step = list(outcomes), global_step
    self.finished, self.ended = finished, False
    self.params = self.center = jnp.float32(0.0)
    self.keys = []

  def step(self, grads, batch):
    self.keys.append((float(grads), batch))
    outcome = self.outcomes.pop(0)
    self.global_step, self.finished = outcome.global_step, outcome.finished
    # As many are right as there were steps.
    self.center = jnp.float32(outcome.global_step)
    return outcome

  def finish(self):
    self.ended = True

  def fingerprint(self):
    return "print"

  def stats(self):
    return {"gradients": {"applied": 1}}


class Channel:
  def __init__(self):
    self.said = []

  def say(self, event, **fields):
    self.said.append({"event": event} | fields)


def commit(step, **fields):
  return Outcome(True, "", step, members=(0,), **fields)


def alone(step):
  """A gradient that was not sent yet."""
  return Outcome(True, "", step)


def stale(step):
  return Outcome(False, "stale", step)


@pytest.fixture
def train(monkeypatch):
  """Trains with these outcomes; returns what was said, and the replica."""
  monkeypatch.setattr(model, "count_correct", lambda params, test: params)

  def run(outcomes, every=0, config=CONFIG, **start):
    joined, channel = Joined(outcomes, **start), Channel()
    told = {"config": config, "checkpoints": "saved", "checkpoint_every": every}
    test = digits.Batch(jnp.zeros(8), jnp.zeros(8))
    losses = iter(range(1, 99))

    def gradient(params, key):
      return next(losses), 10.0 * key[2]

    loop = replica._Training(joined, channel, told, test, gradient)
    loop.run(4, 7)
    return channel.said, joined

  return run


def test_each_gradient_has_a_key_of_its_own(train):
  _, joined = train([commit(1), stale(1), alone(1), commit(6)])
  assert joined.keys == [(10.0 * i, [4, 7, i]) for i in range(4)]
  assert not joined.outcomes
  assert joined.ended


@pytest.mark.parametrize("start", [{"global_step": 6}, {"finished": True}])
def test_a_run_that_is_over_computes_nothing(train, start):
  said, joined = train([], **start)
  assert [event["event"] for event in said] == ["finished"]
  assert joined.keys == []
  assert joined.ended


def test_it_stops_when_the_run_does(train):
  said, joined = train([commit(1), commit(2, finished=True), commit(3)])
  assert len(joined.keys) == 2
  assert said[-1] == {
    "event": "finished",
    "step": 2,
    "accuracy": 2 / 8,
    "fingerprint": "print",
    "gradients": {"applied": 1},
  }


def test_the_loss_is_the_mean_since_it_was_last_told(train):
  outcomes = [commit(1), alone(1), alone(1), commit(2), stale(2), commit(6)]
  said, _ = train(outcomes)
  steps = [e for e in said if e["event"] == "step"]
  # What was not sent is not told, but its loss is.
  assert [(e["step"], e["accepted"]) for e in steps] == [
    *((1, True), (2, True)),
    *((2, False), (6, True)),
  ]
  assert [e["loss"] for e in steps] == [1.0, (2 + 3 + 4) / 3, 5.0, 6.0]
  assert [e["reason"] for e in steps] == ["", "", "stale", ""]


def test_an_epoch_is_evaluated_when_its_end_is_passed(train):
  # Epochs end at steps 2, 4 and 6; this replica does not see step 4.
  outcomes = [commit(1), commit(2), stale(2), commit(3), commit(5), commit(6)]
  said, _ = train(outcomes)
  found = {
    e["step"]: e["accuracy"]
    for e in said
    if e["event"] == "step" and "accuracy" in e
  }
  assert found == {2: 2 / 8, 5: 5 / 8, 6: 6 / 8}
  steps = [e for e in said if e.get("step") == 2]
  assert ["accuracy" in e for e in steps] == [True, False]


def test_epochs_before_a_checkpoint_are_not_evaluated_again(train):
  said, _ = train([commit(5), commit(6)], global_step=4)
  found = [e["step"] for e in said if "accuracy" in e and e["event"] == "step"]
  assert found == [6]


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 60), st.data())
def test_every_epoch_has_one_end(epochs, steps_per_epoch, commits, data):
  """Also where steps are rounds, of which there are fewer or more."""
  config = {
    "local_steps": epochs * steps_per_epoch,
    "steps_per_epoch": steps_per_epoch,
    "commits": commits,
  }
  loop = types.SimpleNamespace(_config=config)
  before = data.draw(st.integers(0, commits - 1))
  step = data.draw(st.integers(before + 1, commits))
  share = fractions.Fraction(epochs, commits)
  assert replica._Training._ends_epoch(loop, before, step) == (
    before * share // 1 < step * share // 1
  )


@pytest.mark.parametrize(
  ("every", "saved"), [(2, {2, 3, 6}), (3, {3, 6}), (0, set()), (100, {3})]
)
def test_it_saves_when_it_is_time_and_when_all_do(
  train, monkeypatch, every, saved
):
  found = set()
  monkeypatch.setattr(
    checkpoints,
    "save",
    lambda folder, one: found.add((folder, one.global_step)),
  )
  outcomes = [stale(0), commit(2), stale(2), commit(3, save=3), commit(6)]
  train(outcomes, every=every)
  assert found == {(pathlib.Path("saved"), step) for step in saved}


@pytest.mark.parametrize(("local_steps", "first"), [(6, 4), (60, 40)])
def test_a_resumed_one_takes_the_batches_after_its_step(
  train, local_steps, first
):
  config = CONFIG | {"local_steps": local_steps}
  _, joined = train([commit(5), commit(6)], config=config, global_step=4)
  assert [key for _, key in joined.keys] == [[4, 7, first], [4, 7, first + 1]]


def test_a_full_disk_is_told_in_a_line(train, monkeypatch):
  def save(folder, one):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(checkpoints, "save", save)
  with pytest.raises(SystemExit) as ended:
    train([commit(1), commit(2)], every=2)
  assert ended.value.code == (
    "the checkpoint of step 2 can't be written in saved: No space left on"
    " device."
  )
