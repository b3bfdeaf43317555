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
  seen = GroupInbox(result.states.published, lambda order: None, 5.0, print)
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


def test_a_snapshot_takes_the_place_of_what_was_not_computed():
  result, raw = Deferred(), np.zeros(64, np.uint8)
  result.commit(7)
  raw = np.zeros(result.states.nbytes, np.uint8)
  raw[:12].view(np.float32)[:] = 5.0
  result.states.restore(4, raw)
  np.testing.assert_array_equal(result.states.published.get()["w"], [5, 5, 5])
  assert not result.computed


def test_the_inner_state_travels_with_a_snapshot():
  own = {"count": jnp.zeros([], jnp.int32), "mean": jnp.zeros(5)}
  initial = {"w": jnp.zeros(3)}
  made = lambda: states.States(
    initial, 0, lambda *args: None, None, lambda action: None, None, own
  )
  lender, borrower = made(), made()
  alone = states.States(initial, 0, None, None, None)
  assert lender.nbytes > alone.nbytes
  inner = {"count": jnp.asarray(7, jnp.int32), "mean": jnp.arange(5.0)}
  raw = np.zeros(lender.nbytes, np.uint8)
  lender.write(states.State(4, {"w": jnp.ones(3)}, inner), raw)
  borrower.restore(4, raw)
  result = borrower.published
  assert result.step == 4
  assert list(result.get()) == ["w"]
  np.testing.assert_array_equal(result.get()["w"], np.ones(3))
  borrowed = result.inner
  assert borrowed["count"].dtype == jnp.int32
  assert int(borrowed["count"]) == 7
  np.testing.assert_array_equal(borrowed["mean"], np.arange(5.0))
  # It is a copy: the memory of the snapshot is used again.
  raw[:] = 255
  np.testing.assert_array_equal(borrowed["mean"], np.arange(5.0))


def test_a_replica_that_has_an_inner_state_keeps_it_after_a_snapshot():
  inner = {"mean": jnp.zeros(5)}
  made = states.States(
    {"w": jnp.zeros(3)}, 0, None, None, lambda action: None, None, inner
  )
  own = {"mean": jnp.ones(5)}
  made.keep(own)
  made.restore(9, np.zeros(made.nbytes, np.uint8))
  assert list(made.published.get()) == ["w"]
  assert made.published.inner is own
