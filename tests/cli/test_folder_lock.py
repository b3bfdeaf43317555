"""Only one command at a time writes to a folder."""

import errno
import fcntl
import os

import pytest

from optax_dist.cli import errors, folder_lock


def _lock_again(folder):
  with folder_lock.held(folder):
    pass


def test_a_second_one_is_told_who_has_it(tmp_path):
  with folder_lock.held(tmp_path):
    for _ in range(2):
      with pytest.raises(errors.CommandError) as caught:
        _lock_again(tmp_path)
      assert (
        f"--output {tmp_path} is in use by process {os.getpid()} on "
        in str(caught.value)
      )
  assert list(tmp_path.iterdir()) == []
  _lock_again(tmp_path)


def test_what_a_killed_process_left_locks_nothing(tmp_path):
  (tmp_path / folder_lock.NAME).write_text("process 1 on gone\n")
  with folder_lock.held(tmp_path):
    told = (tmp_path / folder_lock.NAME).read_text()
  assert told.startswith(f"process {os.getpid()} on ")


def test_a_file_that_was_removed_before_it_was_locked_is_none(
  tmp_path, monkeypatch
):
  real, removed = fcntl.flock, []

  def flock(file, how):
    if not removed:
      removed.append(os.unlink(file.name))
    real(file, how)

  monkeypatch.setattr(fcntl, "flock", flock)
  with (
    folder_lock.held(tmp_path),
    pytest.raises(errors.CommandError, match="is in use"),
  ):
    _lock_again(tmp_path)
  assert removed


def test_a_lock_that_can_not_be_written_is_named(tmp_path):
  path = tmp_path / folder_lock.NAME
  path.mkdir()
  with pytest.raises(errors.CommandError, match=f"Is a directory .{path}"):
    _lock_again(tmp_path)


def test_a_file_system_without_locks_is_used_all_the_same(
  tmp_path, monkeypatch
):
  def flock(file, how):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

  monkeypatch.setattr(fcntl, "flock", flock)
  with folder_lock.held(tmp_path):
    _lock_again(tmp_path)
