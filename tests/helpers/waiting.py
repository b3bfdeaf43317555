"""Waiting for what other threads and processes do."""

import time


def until(ready, told=lambda: "it did not come in time", seconds=180.0):
  """Waits until `ready()` is true; returns its value.

  Args:
    ready: the condition, which is polled.
    told: returns the text of the error after the time limit.
    seconds: the time limit.
  """
  end = time.monotonic() + seconds
  while not (result := ready()):
    assert time.monotonic() < end, told()
    time.sleep(0.01)
  return result
