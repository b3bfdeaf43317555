"""What is said before a process is evicted is printed, or lost in time."""

import errno
import os
import sys
import threading

import pytest

from optax_dist.coordinator.runtime import process_exit


class FullDisk:
  """A stream to a full disk."""

  def write(self, text):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  flush = write


@pytest.fixture
def full_pipe():
  """A stream to a pipe that nobody reads."""
  read, write = os.pipe()
  os.set_blocking(write, False)
  try:
    while True:
      os.write(write, bytes(4096))
  except BlockingIOError:
    os.set_blocking(write, True)
  with open(write, "w") as stream:
    yield stream
    os.read(read, 1 << 20)  # All of it: there is room again.
    for thread in threading.enumerate():
      if thread.name == "optax-dist-last-words":
        thread.join()
  os.close(read)


def test_it_is_printed_when_the_call_returns(capsys, monkeypatch):
  monkeypatch.setattr(process_exit, "_PRINT_SECONDS", 60.0)
  process_exit.say("stuck")
  assert capsys.readouterr().err == "stuck\n"


def test_a_full_pipe_does_not_block_training(full_pipe, monkeypatch):
  monkeypatch.setattr(sys, "stderr", full_pipe)
  monkeypatch.setattr(process_exit, "_PRINT_SECONDS", 0.05)
  process_exit.say("stuck")


def test_a_stream_that_fails_is_left_alone(monkeypatch):
  monkeypatch.setattr(sys, "stderr", FullDisk())
  process_exit.say("stuck")


def test_last_words_without_a_thread_are_dropped(capsys, monkeypatch):
  def start(thread):
    raise RuntimeError("can't start new thread")

  monkeypatch.setattr(threading.Thread, "start", start)
  process_exit.say("stuck")
  assert capsys.readouterr().err == ""
