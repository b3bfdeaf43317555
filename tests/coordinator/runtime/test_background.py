"""Tests of the thread for slow work."""

import queue
import threading

import pytest

from optax_dist.coordinator.runtime.background import Background


def test_work_is_done_in_order_and_its_errors_are_passed_on():
  posted, did = queue.SimpleQueue(), []
  background = Background("works", posted.put)
  for i in (1, 0):
    background(lambda i=i: did.append(1 / i), did.append)
  for _ in range(2):
    posted.get(timeout=60.0)()
  background.close(60.0)
  assert did[:2] == [1.0, None]
  assert isinstance(did[2], ZeroDivisionError)
  assert not any(thread.name == "works" for thread in threading.enumerate())


def test_a_thread_that_does_not_start_is_not_waited_for(monkeypatch):
  """Python 3.12 starts none once the main thread has ended."""

  def start(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")

  background = Background("works", lambda done: done())
  with monkeypatch.context() as patch:
    patch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="at interpreter shutdown"):
      background(lambda: None, lambda error: None)
  background.close(60.0)
