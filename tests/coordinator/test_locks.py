"""A lock ends with its process, also where the file system has no locks."""

import errno
import os
import subprocess
import sys

import pytest

from optax_dist.coordinator._internal import locks

_HOLD = """
import sys
from optax_dist.coordinator._internal import locks
lock = locks.Lock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
  with subprocess.Popen(
    [sys.executable, "-c", _HOLD, str(tmp_path / "lock")],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  ) as child:
    assert child.stdout.readline() == b"held\n"
    yield child
    child.kill()


def test_lock_names_its_holder_and_ends_with_it(tmp_path, holder):
  path = tmp_path / "lock"
  with pytest.raises(locks.Held, match=f"process {holder.pid} on ") as error:
    locks.Lock(path)
  assert error.value.lives
  holder.kill()
  os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
  # It waits for its parent, and has ended all the same.
  with locks.Lock(path) as lock:
    assert path.read_text().endswith(f" {os.getpid()}")
    with pytest.raises(locks.Held, match=f"process {os.getpid()} "):
      locks.Lock(path, 0.05)
  assert not path.exists()
  lock.release()


def test_release_leaves_the_lock_of_another_holder(tmp_path):
  """Whose file is there since somebody has deleted the first one's."""
  path = tmp_path / "lock"
  first = locks.Lock(path)
  path.unlink()
  second = locks.Lock(path)
  first.release()
  with pytest.raises(locks.Held):
    locks.Lock(path)
  second.release()
  assert not path.exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_holder_process_decides_on_file_systems_without_locks(
  tmp_path, monkeypatch, number
):
  def refuse(file, how):
    raise OSError(number, "no locks")

  monkeypatch.setattr(locks.fcntl, "flock", refuse)
  path = tmp_path / "lock"
  with locks.Lock(path), pytest.raises(locks.Held) as error:
    locks.Lock(path, if_in_doubt=True)
  assert error.value.lives
  gone = subprocess.Popen([sys.executable, "-c", ""])
  gone.wait()
  path.write_text(f"{locks.socket.gethostname()} {gone.pid}")
  locks.Lock(path).release()


def test_holder_on_another_host_counts_as_alive_without_locks(
  tmp_path, monkeypatch, caplog
):
  def refuse(file, how):
    raise OSError(errno.ENOLCK, "no locks")

  path = tmp_path / "lock"
  path.write_text("elsewhere 7")
  # With locks it is plain that it has ended.
  locks.Lock(path).release()
  monkeypatch.setattr(locks.fcntl, "flock", refuse)
  path.write_text("elsewhere 7")
  with pytest.raises(locks.Held, match="process 7 on elsewhere") as error:
    locks.Lock(path)
  assert not error.value.lives
  locks.Lock(path, if_in_doubt=True).release()
  assert "process 7 on elsewhere has" in caplog.text
