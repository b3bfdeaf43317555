"""Every wait ends by its deadline, with an error that says what was missing."""

import re
import threading

import embedded_runs as runs
import pytest

from optax_dist import coordinator
from optax_dist.coordinator.runtime import endpoint

STEPS = 6
PHASES = (
  "computing",
  "arrived",
  "reduce_scatter",
  "gather",
  "done",
  "applied",
)


@pytest.fixture(scope="module")
def hangs():
  """By phase: whether a replica has hung there, and the error of the other.

  All at once: their deadlines are beyond what a busy machine delays.
  """
  limits = {"timeout": 2.8, "transfer_timeout": 2.5, "silence_timeout": 1.1}
  released, results, threads = threading.Event(), [], []
  hang = lambda: released.wait(120.0)
  plan = {(phase, 2 * i, 2): hang for i, phase in enumerate(PHASES)}
  with runs.Faults(plan) as faults:
    for replica in range(2 * len(plan)):
      if replica % 2 == 0:
        world, together = endpoint.World(), threading.Barrier(2)

      def train(replica, result, together=together):
        together.wait(60.0)
        runs.to_step(STEPS)(replica, result)

      one = runs.make(world, replica, k=2, n=2, inline_bytes=0, **limits)
      results.append(runs.Result())
      threads.append(runs.start(one, train, results[-1]))
    for thread in threads[1::2]:
      thread.join(60.0)
    # By its own deadline: what it waits for still hangs.
    ended = [not thread.is_alive() for thread in threads[1::2]]
    released.set()
    runs.finish(threads)
  return {
    phase: (key in faults.done and ended[i], results[2 * i + 1].error)
    for i, (key, phase) in enumerate(zip(plan, PHASES, strict=True))
  }


@pytest.mark.parametrize("phase", PHASES)
def test_error_of_the_other_replica_names_the_one_that_hangs(hangs, phase):
  """With what was waited for, and for how long: A6 of docs/assumptions.md."""
  in_time, error = hangs[phase]
  assert in_time, error
  assert isinstance(error, coordinator.CoordinatorError)
  text = str(error)
  assert re.search(r"[Ss]tep \d|this step's commit", text), text
  assert re.search(r"\d+\.\d s", text), text
  # On a busy machine it has been evicted, and is missing.
  hung = 2 * PHASES.index(phase)
  assert re.search(rf"(replica|missing:) {hung}\b", text), text
