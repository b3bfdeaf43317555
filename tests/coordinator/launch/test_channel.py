"""A launched process's side of its channel: whole lines, and one owner."""

import json
import os
import socket
import threading

import pytest

from optax_dist.coordinator.launch import channel as channels
from optax_dist.coordinator.launch.environment import variable


@pytest.fixture
def launched(monkeypatch):
  """Makes this process a launched one; the launcher's end of its socket."""
  launcher, own = socket.socketpair()
  launcher.settimeout(60.0)
  number = own.detach()
  os.set_inheritable(number, True)  # As a launcher passes it on.
  monkeypatch.setenv(variable("channel"), str(number))
  monkeypatch.setattr(channels, "_open", {})
  yield launcher
  launcher.close()
  for made in channels._open.values():
    made._socket.close()


def _lines(launcher, count):
  """Returns so many events of the process."""
  file = launcher.makefile("rb")
  return [json.loads(file.readline()) for _ in range(count)]


@pytest.mark.parametrize("number", ["", "987654", "file"])
def test_process_that_was_not_launched_has_no_channel(
  monkeypatch, tmp_path, number
):
  """The number may be that of any file: the environment is inherited."""
  with (tmp_path / "file").open("w") as file:
    number = str(file.fileno()) if number == "file" else number
    monkeypatch.setenv(variable("channel"), number)
    assert channels.current() is None
    file.write("It is still open.")


def test_events_of_several_threads_are_whole_lines(launched):
  launcher = launched
  one = channels.current()
  texts = [letter * 400_000 for letter in "abcd"]

  def say(text):
    for number in range(4):
      one.say("told", number=number, text=text)

  threads = [threading.Thread(target=say, args=(text,)) for text in texts]
  for thread in threads:
    thread.start()
  events = _lines(launcher, 16)
  for thread in threads:
    thread.join(60.0)
  for text in texts:
    numbers = [e["number"] for e in events if e["text"] == text]
    assert numbers == list(range(4))


def test_messages_to_an_ended_launcher_are_ignored(launched):
  launcher = launched
  one = channels.current()
  launcher.close()
  for _ in range(3):
    one.say("told", text="x" * 100_000)
