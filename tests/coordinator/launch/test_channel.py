"""A launched process's side of its channel: whole lines, and one owner."""

import contextlib
import faulthandler
import json
import os
import socket
import threading

import pytest

from optax_dist.coordinator.launch import channel as channels
from optax_dist.coordinator.launch.environment import variable

_FORKS = pytest.mark.filterwarnings(
  "ignore::RuntimeWarning", "ignore::DeprecationWarning"
)


@pytest.fixture
def launched(monkeypatch):
  """Makes this process a launched one: the launcher's socket, and its ends.

  What would end the process is written down instead.
  """
  launcher, own = socket.socketpair()
  launcher.settimeout(60.0)
  ended = []
  number = own.detach()
  os.set_inheritable(number, True)  # As a launcher passes it on.
  monkeypatch.setenv(variable("channel"), str(number))
  monkeypatch.setattr(channels, "_open", {})
  monkeypatch.setattr(channels, "_end_with_launcher", lambda: None)
  monkeypatch.setattr(faulthandler, "register", lambda *_, **__: None)
  monkeypatch.setattr(os, "_exit", ended.append)
  yield launcher, ended
  launcher.close()
  for made in channels._open.values():
    with contextlib.suppress(OSError):
      made._socket.shutdown(socket.SHUT_RDWR)
  for thread in threading.enumerate():
    if thread.name == "launcher":
      thread.join(60.0)
  for made in channels._open.values():
    made._socket.close()


def _lines(launcher, count):
  """So many events of the process."""
  file = launcher.makefile("rb")
  return [json.loads(file.readline()) for _ in range(count)]


def _made():
  return channels.Channel(ends_with_launcher=False)


@pytest.mark.parametrize("number", ["", "987654", "file"])
def test_a_process_that_was_not_launched_is_told_so(
  monkeypatch, tmp_path, number
):
  """The number may be that of any file: the environment is inherited."""
  with (tmp_path / "file").open("w") as file:
    number = str(file.fileno()) if number == "file" else number
    monkeypatch.setenv(variable("channel"), number)
    with pytest.raises(ValueError, match=r"No launcher .* OPTAX_DIST_CHANNEL"):
      _made()
    assert channels.current() is None
    file.write("It is still open.")


def test_events_of_several_threads_are_whole_lines(launched):
  launcher, _ = launched
  one = _made()
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


def test_what_is_said_to_a_launcher_that_has_ended_is_of_no_effect(launched):
  launcher, ended = launched
  one = _made()
  launcher.close()
  for _ in range(3):
    one.say("told", text="x" * 100_000)
  assert ended == []


def test_messages_come_whole_and_in_order_however_they_are_cut(launched):
  launcher, ended = launched
  one = channels.Channel()
  sent = [{"number": i, "text": "é\n" * i} for i in range(5)]
  sent.append({"text": "y" * 10_000})  # More than is read at once.
  encode = lambda message: json.dumps(message, ensure_ascii=False).encode()
  raw = b"".join(encode(message) + b"\n" for message in sent)
  cut = 150
  for start in range(0, cut, 3):
    launcher.sendall(raw[start : min(start + 3, cut)])
  launcher.sendall(raw[cut:])
  assert [one.receive(60.0) for _ in sent] == sent
  with pytest.raises(TimeoutError, match=r"said nothing in 0\.01 s"):
    one.receive(0.01)
  assert ended == []


@pytest.mark.parametrize("how", ["closed", "midway"])
def test_the_process_ends_with_its_launcher(launched, how):
  launcher, ended = launched
  channels.Channel()
  (thread,) = [t for t in threading.enumerate() if t.name == "launcher"]
  if how == "midway":
    launcher.sendall(b'{"env')
  launcher.close()
  thread.join(60.0)
  assert ended == [1]


def test_there_is_one_channel_and_no_child_inherits_it(launched):
  """A second owner of the descriptor would close it under the first."""
  one = channels.current()
  assert channels.current() is one
  number = int(os.environ[variable("channel")])
  assert one._socket.fileno() == number
  assert not os.get_inheritable(number)


@_FORKS
@pytest.mark.parametrize(("launcher", "code"), [("lives", 7), ("died", 1)])
def test_a_launcher_that_died_during_the_start_is_noticed(launcher, code):
  """Nothing would tell: the signal is for parents that die later."""
  parent = os.getpid() if launcher == "lives" else 1
  child = os.fork()
  if not child:
    try:
      os.environ[channels.LAUNCHER_VARIABLE] = str(parent)
      channels._end_with_launcher()
    finally:
      os._exit(7)
  _, status = os.waitpid(child, 0)
  assert os.waitstatus_to_exitcode(status) == code
