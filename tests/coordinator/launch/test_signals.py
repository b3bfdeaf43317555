"""Signals are recorded, in order, and interrupt nothing."""

import os
import signal
import threading

import pytest

from optax_dist.coordinator.launch import signals


@pytest.fixture(autouse=True)
def handlers():
  """Ctrl-C as in a separate program, and everything as before afterwards."""
  numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
  before = {number: signal.getsignal(number) for number in numbers}
  signal.signal(signal.SIGINT, signal.default_int_handler)
  yield before
  for number, handler in before.items():
    signal.signal(number, handler)


def _come(number):
  os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_program_that_ignores_a_signal_goes_on_ignoring_it(number):
  signal.signal(number, signal.SIG_IGN)
  with signals.recorded() as numbers:
    _come(number)
    assert numbers == []


def test_other_threads_get_no_signals():
  result = []

  def run():
    with signals.recorded() as numbers:
      result.append(numbers)

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert result == [[]]
