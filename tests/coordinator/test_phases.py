"""Hooks of a step: their listeners, and how much they slow a replica down."""

import threading
import types

import pytest

from optax_dist.coordinator._internal import phases


@pytest.fixture
def slept(monkeypatch):
  """How long a replica was made to wait, and the speed that it had before."""
  result = []
  # Not for other threads, which may still pause.
  clock = types.SimpleNamespace(sleep=result.append)
  monkeypatch.setattr(phases, "time", clock)
  yield result
  phases.slow_down(factor=1.0)


def test_a_slow_replica_takes_its_factor_of_the_time(slept):
  phases.slow_down(2.0)
  assert slept == []  # None is slow by itself.
  phases.slow_down(factor=3.0)
  assert slept == []  # It is from the next gradient on.
  phases.slow_down(2.0)
  phases.slow_down(0.5)
  assert slept == [4.0, 1.0]
  phases.slow_down(factor=1.0)
  phases.slow_down(2.0)
  assert len(slept) == 2


def test_faults_strike_in_the_thread_that_enters_a_phase():
  """A listener stops or ends that one."""
  reached = []
  phases.listen(lambda *found: reached.append((*found, threading.get_ident())))
  try:
    thread = threading.Thread(target=phases.reach, args=("gather", 3))
    thread.start()
    thread.join()
    phases.reach("done", "one")
  finally:
    phases.listen(None)
  phases.reach("applied", 3)
  assert reached == [
    ("gather", 3, thread.ident),
    ("done", "one", threading.get_ident()),
  ]
