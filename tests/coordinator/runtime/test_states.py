"""States that the training loop computes, one after the other, when it gets them."""

import weakref

import jax.numpy as jnp
import numpy as np

from optax_dist.coordinator.extras.groups.inbox import GroupInbox
from optax_dist.coordinator.extras.groups.shards import LocalShards
from optax_dist.coordinator.runtime import states
from optax_dist.coordinator.runtime.inbox import Published


class Deferred:
  """States whose event loop is a list."""

  def __init__(self):
    self.posted, self.computed = [], []
    initial = {"w": jnp.zeros(3)}
    shards = LocalShards([initial["w"]])
    self.states = states.States(
      initial, 0, self.apply, None, self.posted.append, shards
    )

  def apply(self, state, leaves):
    self.computed.append(float(leaves[0][0]))
    return {"w": state["w"] + leaves[0]}

  def commit(self, number):
    mean = [np.full(3, number, np.float32)]
    self.states.apply(lambda: mean)
    self.states.publish(self.states.published.step + 1)

  def loop(self):
    while self.posted:
      self.posted.pop(0)()


def test_states_are_computed_in_order():
  result = Deferred()
  seen = GroupInbox(
    result.states.published, lambda order: None, True, 5.0, print
  )
  for number in range(1, 1500):  # More than could be nested.
    result.commit(number)
    seen.notify(Published(result.states.published, False))
  assert not result.computed
  seen.sync()
  value = seen.published.get()
  assert result.computed == list(range(1, 1500))
  np.testing.assert_array_equal(value["w"], np.full(3, 1500 * 1499 / 2))
  assert result.states.published.get() is value


def test_requests_for_a_state_wait_until_it_is_computed():
  result, seen = Deferred(), []
  result.commit(1)
  state = result.states.published
  state.then(lambda: seen.append("then"))
  result.loop()
  assert not seen
  state.get()
  assert not seen  # It is for the event loop.
  result.loop()
  state.then(lambda: seen.append("at once"))
  assert seen == ["then", "at once"]


def test_a_request_that_was_answered_does_not_keep_its_state():
  state, posted = states.State(1), []
  state.defer(lambda: "computed", posted.append)
  state.then(state.get)
  state.get()
  posted.pop()()
  kept = weakref.ref(state)
  del state
  assert kept() is None


def test_a_large_state_waits_for_its_commit(monkeypatch):
  """Until then the replica keeps the gradient that is in it."""
  monkeypatch.setattr(states, "_LARGE", 0)
  monkeypatch.setattr(states, "_QUICK", 0.0)
  computed, background = [], lambda work, done: work()

  def apply(state, leaves):
    computed.append(leaves)
    return state

  initial = {"w": jnp.zeros(states._SMALL)}
  made = states.States(initial, 0, apply, background, lambda action: action())
  made.apply(lambda: ["dropped"])
  made.apply(lambda: ["mean"])
  assert not computed
  made.publish(1)
  assert computed == [["mean"]]
  made.apply(lambda: ["before a snapshot"])
  made.restore(7, np.zeros(made.nbytes, np.uint8))
  assert computed == [["mean"]]
