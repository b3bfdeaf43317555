"""Tests of the thread for slow work."""

import queue
import threading

import pytest

from optax_dist.coordinator.runtime.background import Background


def test_work_is_done_in_order_and_errors_are_raised_on_the_event_loop():
  posted, did = queue.SimpleQueue(), []
  background = Background("works", posted.put)
  background(lambda: did.append(1), lambda: did.append(2))
  for done in (None, lambda: did.append(3)):
    background(lambda: 1 / 0, done)
  posted.get(timeout=60.0)()
  for _ in range(2):
    with pytest.raises(ZeroDivisionError):
      posted.get(timeout=60.0)()
  background.close(60.0)
  assert did == [1, 2]
  assert not any(thread.name == "works" for thread in threading.enumerate())


def test_event_loop_is_not_woken_for_work_without_a_callback():
  posted, did = queue.SimpleQueue(), []
  background = Background("works", posted.put)
  background(lambda: did.append(1))
  background.close(60.0)
  assert did == [1]
  assert posted.empty()


def test_a_thread_that_does_not_start_is_not_waited_for(monkeypatch):
  """Python 3.12 starts none once the main thread has ended."""

  def start(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")

  background = Background("works", lambda done: done())
  with monkeypatch.context() as patch:
    patch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="at interpreter shutdown"):
      background(lambda: None)
  background.close(60.0)
