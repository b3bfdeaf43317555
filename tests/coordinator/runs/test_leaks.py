"""Replicas that come and go leave nothing behind in their process."""

import gc
import os
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from waiting import until

from optax_dist import coordinator
from optax_dist.coordinator.server import process

_SECRET = "a secret of enough bytes"
_PARAMS = {"w": jnp.ones(1000)}


def _counts():
  gc.collect()
  return len(os.listdir("/proc/self/fd")), threading.active_count()


def _settled(most, seconds=60.0):
  """The counts, as soon as they are no more than so many, or in the end."""
  end = time.monotonic() + seconds
  while True:
    result = _counts()
    if all(f <= m for f, m in zip(result, most, strict=True)):
      return result
    if time.monotonic() > end:
      return result
    time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc/self/fd")
@pytest.mark.parametrize(
  ("rejoins", "inline_bytes", "steps"),
  [
    (10, 64 << 10, 1500),
    (10, 0, 0),
    pytest.param(30, 64 << 10, 5000, marks=pytest.mark.nightly),
    pytest.param(30, 0, 0, marks=pytest.mark.nightly),
  ],
)
def test_rejoins_leave_no_descriptor_and_no_thread(
  rejoins, inline_bytes, steps
):
  """One replica stays for all steps; the other leaves, or raises, and joins again."""
  with process.start(_SECRET.encode(), port=0) as made:
    options = {
      "coordinator_address": made.address,
      "secret": _SECRET,
      "bind": "127.0.0.1",
      "start_coordinator": False,
      "total_num_replicas": 2,
      "replicas_to_aggregate": 1,
      "lower_on_loss": True,
      "inline_bytes": inline_bytes,
      "timeout": 60.0,
      "transfer_timeout": 20.0,
    }

    def come_and_go(count, apart=0):
      for number in range(count):
        until(lambda number=number: first.global_step >= number * apart)
        try:
          with coordinator.join(
            optax.sgd(0.1), _PARAMS, replica=1, **options
          ) as replica:
            for _ in range(3):
              replica.step(_PARAMS)
            if number % 2:
              raise ZeroDivisionError
        except ZeroDivisionError:
          pass

    before_all = _counts()
    with coordinator.join(
      optax.sgd(0.1), _PARAMS, replica=0, **options
    ) as first:
      over = threading.Event()

      def go_on():
        while not over.is_set():
          first.step(_PARAMS)

      other = threading.Thread(target=go_on)
      other.start()
      try:
        come_and_go(4)
        before = _settled((0, 0), 1.0)
        come_and_go(rejoins, apart=steps / (rejoins - 1))
        # The last one's connection may not have ended yet.
        after = _settled(before)
      finally:
        over.set()
        other.join(60.0)
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 1
    at_end = _settled(before_all)
    assert at_end[0] <= before_all[0] + 2
    assert at_end[1] <= before_all[1]


def test_a_replica_keeps_one_state_and_no_gradient():
  """Each takes as many bytes as the parameters, which may be many."""
  shape = (41, 4001)  # Of no other array here.
  seen, alive = [], []

  def train(replica):
    for _ in range(4):
      grads = jax.tree.map(lambda x: 0.1 * x, replica.params)
      seen.append(weakref.ref(grads["w"]))
      held = [grads]
      del grads
      replica.step(held.pop())
      shown = replica.params["w"]
      gc.collect()
      alive.append(sum(x.shape == shown.shape for x in jax.live_arrays()))
    assert not any(ref() is not None for ref in seen)
    return np.asarray(replica.params["w"])

  (result,) = coordinator.run_embedded(
    train, 1, optax.sgd(0.5), {"w": jnp.ones(shape)}, inline_bytes=0
  )
  np.testing.assert_allclose(result, 0.95**4, rtol=1e-6)
  # The current parameters, and the initial ones that `run_embedded` was given.
  assert alive[-1] == 2
