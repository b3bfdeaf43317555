"""What is said before a process is evicted is printed, or lost in time."""

import threading

from optax_dist.coordinator.runtime import process_exit


def test_last_words_without_a_thread_are_dropped(capsys, monkeypatch):
  def start(thread):
    raise RuntimeError("can't start new thread")

  monkeypatch.setattr(threading.Thread, "start", start)
  process_exit.say("stuck")
  assert capsys.readouterr().err == ""
