"""Signals are remembered, and raise where that does no harm."""

import gc
import os
import signal
import sys
import threading

import pytest

from optax_dist.coordinator.launch import interrupts


@pytest.fixture(autouse=True)
def handlers():
  """Ctrl-C as in a separate program, and everything as before afterwards."""
  numbers = (signal.SIGINT, signal.SIGTERM)
  before = {number: signal.getsignal(number) for number in numbers}
  signal.signal(signal.SIGINT, signal.default_int_handler)
  yield before
  for number, handler in before.items():
    signal.signal(number, handler)


def _come(number):
  os.kill(os.getpid(), number)


@pytest.mark.parametrize(
  ("number", "error"),
  [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)],
)
def test_a_signal_raises_where_it_is_asked_for(number, error):
  with interrupts.handled() as told:
    told.at_once = False
    told.check()
    _come(number)
    with pytest.raises(error) as caught:
      told.check()
    if error is SystemExit:
      assert caught.value.code == 143
    # It stays true: code that caught it by mistake gets it again.
    with pytest.raises(error):
      told.check()
    told.at_once = True
    with pytest.raises(error):
      _come(number)


def test_a_signal_dropped_by_a_library_is_not_lost(monkeypatch):
  with interrupts.handled() as told:

    def collected(phase, info):
      if phase == "start":
        _come(signal.SIGTERM)

    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    gc.disable()  # No other thread collects meanwhile.
    gc.callbacks.append(collected)
    try:
      gc.collect()
    finally:
      gc.callbacks.remove(collected)
      gc.enable()
    # Python only prints what is raised there.
    assert [one.exc_type for one in dropped] == [SystemExit]
    with pytest.raises(SystemExit):
      told.check()


def test_handlers_are_put_back(handlers):
  with interrupts.handled():
    assert signal.getsignal(signal.SIGTERM) != handlers[signal.SIGTERM]
  assert signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_that_ignores_ctrl_c_goes_on_ignoring_it():
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  with interrupts.handled() as told:
    _come(signal.SIGINT)
    told.check()


def test_other_threads_get_no_signals():
  errors = []

  def run():
    try:
      with interrupts.handled() as told:
        told.check()
    except BaseException as error:
      errors.append(error)

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert not errors


def test_other_signals_are_only_collected():
  before = signal.getsignal(signal.SIGUSR2)
  with interrupts.handled([signal.SIGUSR2]) as told:
    _come(signal.SIGUSR2)
    told.check()
    assert told.take_others() == [signal.SIGUSR2]
    assert told.take_others() == []
  assert signal.getsignal(signal.SIGUSR2) == before


def test_a_handled_signal_can_be_cleared():
  with interrupts.handled() as told:
    told.at_once = False
    _come(signal.SIGTERM)
    assert told.number == signal.SIGTERM
    told.forget()
    told.check()
