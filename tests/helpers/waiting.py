"""Waiting for what other threads and processes do."""

import time


def until(ready, told=lambda: "it did not come in time", seconds=180.0):
  """Waits until `ready()` is true; returns what it is.

  Args:
    ready: what is asked again and again.
    told: what the error says, if it is still not true after so long.
    seconds: how long.
  """
  end = time.monotonic() + seconds
  while not (result := ready()):
    assert time.monotonic() < end, told()
    time.sleep(0.01)
  return result
