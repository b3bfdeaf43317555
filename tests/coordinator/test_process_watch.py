import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from optax_dist.coordinator import engine, process_watch


@pytest.fixture
def child():
  code = "import sys; print('up', flush=True); sys.stdin.read()"
  with subprocess.Popen(
    [sys.executable, "-S", "-c", code],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  ) as child:
    assert child.stdout.readline() == b"up\n"
    yield child
    child.kill()


def _process(child):
  return process_watch.Process(child.pid, process_watch._start_time(child.pid))


@pytest.fixture
def watch():
  watch = process_watch.ProcessWatch()
  yield watch
  watch.close()


def test_an_end_is_told_once(child, watch):
  told, ended, failed = [], threading.Event(), threading.Event()

  def fails():
    failed.set()
    raise RuntimeError("of the caller")

  # One that fails keeps the others from nothing.
  watch.add(_process(child), fails)
  forget = watch.add(_process(child), lambda: told.append("forgotten"))
  watch.add(_process(child), lambda: (told.append("end"), ended.set()))
  watch.add(process_watch.this_process(), lambda: told.append("own"))
  assert watch.count() == 4
  forget()
  forget()
  assert watch.count() == 3
  child.send_signal(signal.SIGSTOP)
  time.sleep(0.1)
  assert told == []
  child.kill()
  # Which of the two is told first is nobody's promise.
  assert failed.wait(5.0)
  assert ended.wait(5.0)
  assert told == ["end"]
  assert watch.count() == 1


def test_one_that_has_ended_is_told_at_once(child, watch):
  process = _process(child)
  file = process_watch.open_process(process)
  assert not process_watch.has_ended(file)
  # A process of another start time is a later one under the number.
  earlier = dataclasses.replace(process, started=process.started - 1)
  for gone in (earlier, process_watch.Process(2**22 - 1, 1)):
    with pytest.raises(engine.PeerLost, match=f"{gone.pid} has ended"):
      process_watch.open_process(gone)
    told = threading.Event()
    watch.add(gone, told.set)()
    assert told.wait(5.0)
  child.kill()
  child.wait()
  assert process_watch.has_ended(file)
  os.close(file)


def _files():
  """Descriptors of what is not a file; others come and go."""
  count = 0
  for name in os.listdir("/proc/self/fd"):
    with contextlib.suppress(FileNotFoundError):
      link = os.readlink(f"/proc/self/fd/{name}")
      count += any(kind in link for kind in ("pidfd", "eventpoll", "eventfd"))
  return count


def test_close_ends_the_thread_and_frees_descriptors(child):
  before = _files()
  watch = process_watch.ProcessWatch()
  watch.add(_process(child), lambda: pytest.fail("told after close"))
  assert "process-watch" in [t.name for t in threading.enumerate()]
  watch.close()
  watch.close()
  end = time.monotonic() + 5.0
  while "process-watch" in [t.name for t in threading.enumerate()]:
    assert time.monotonic() < end
    time.sleep(0.01)
  child.kill()
  assert _files() == before
  with pytest.raises(engine.PeerLost, match="closed"):
    watch.add(process_watch.this_process(), lambda: None)
