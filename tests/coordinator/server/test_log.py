"""The log in a file: after a loss of power, on a full disk, and without locks."""

import errno
import os
import stat

import full_disk
import pytest

from optax_dist.coordinator._internal import locks
from optax_dist.coordinator.protocol.entries import (
  Began,
  Committed,
  Epoch,
  Job,
  Joined,
  Member,
  Part,
  Record,
  Removed,
  RoundId,
  Rules,
  Start,
)
from optax_dist.coordinator.server import log

_PARTS = (Part(0, 0, 0, 0, 0, 1, 1.0),)


def _committed(step):
  return Committed(RoundId(0, step, 1), _PARTS, b"mean", False, (), ())


def test_power_loss_loses_only_steps(tmp_path, monkeypatch):
  path, synced = tmp_path / "log", []
  sync = os.fsync

  def synchronize(file):
    sync(file)
    synced.append(os.fstat(file).st_size)

  monkeypatch.setattr(os, "fsync", synchronize)
  result = log.Log(log.FileRecords(path))
  history = result.read()
  for entry in (
    Epoch(0, "nonce"),
    Began(Start(), Job((), Rules())),
    Joined(Member(0, 0, "a", "at a")),
    _committed(0),
    Joined(Member(1, 1, "b", "at b")),
    Removed(1, False, "it was killed"),
    _committed(1),
    _committed(2),
  ):
    history.add(entry)
    assert not result.append(Record((entry,)), history)
  result.close()
  os.truncate(path, synced[-1])

  again = log.Log(log.FileRecords(path))
  left = again.read()
  again.close()
  assert (left.epoch, left.next_incarnation, left.step) == (0, 2, 1)
  assert ({*left.members}, {*left.departed}) == ({0}, {1})


@pytest.mark.parametrize("left", [b"", b"\0" * 90, b"optax-dist l\0\0\0"])
def test_a_loss_of_power_before_the_first_record_leaves_an_empty_log(
  tmp_path, left
):
  path = tmp_path / "log"
  path.write_bytes(left)
  for _ in range(2):
    records = log.FileRecords(path)
    assert not [*records.read()]
    records.close()


def test_power_loss_loses_no_file(tmp_path, monkeypatch):
  """A file has its name after it only if the folder is synced."""
  path, named = tmp_path / "log", {}
  sync = os.fsync

  def synchronize(file):
    sync(file)
    if stat.S_ISDIR(os.fstat(file).st_mode):
      named.clear()
      named.update({entry.name: entry.inode() for entry in os.scandir(file)})

  monkeypatch.setattr(os, "fsync", synchronize)
  records = log.FileRecords(path)
  for write in (
    lambda: [*records.read()],
    lambda: records.append(b"a record", durable=True),
    lambda: records.replace(b"all of it"),
  ):
    write()
    assert named["log"] == path.stat().st_ino
  records.close()


def test_log_has_one_coordinator_under_all_its_names(tmp_path):
  path, link = tmp_path / "log", tmp_path / "link"
  link.symlink_to(path)
  records = log.FileRecords(path)
  for name in (path, link):
    with pytest.raises(log.LogError, match="Another coordinator has the log"):
      log.FileRecords(name)
  records.close()
  log.FileRecords(link).close()
  assert link.is_symlink()


def test_a_file_system_without_locks_can_have_a_log(tmp_path, monkeypatch):
  def refuse(file, how):
    raise OSError(errno.ENOSYS, "no locks")

  monkeypatch.setattr(locks.fcntl, "flock", refuse)
  records = log.FileRecords(tmp_path / "log")
  assert not [*records.read()]
  with pytest.raises(log.LogError, match=f"process {os.getpid()} on "):
    log.FileRecords(tmp_path / "log")
  records.close()


def test_a_file_that_is_in_the_way_is_named(tmp_path):
  path = tmp_path / "log"
  (tmp_path / "log.new").mkdir()
  result = log.Log(log.FileRecords(path))
  history, entry = result.read(), Record((Epoch(0, "nonce"),))
  path.unlink()
  result.append(entry, history)
  result._retry_at = 0.0
  assert result.append(entry, history).endswith(f" ({path}.new)")
  result.close()
  (tmp_path / "log.lock").mkdir()
  with pytest.raises(log.LogError, match=r"log can't .* \(.*/log\.lock\)\."):
    log.FileRecords(path)


def test_failed_write_on_a_full_disk_leaves_no_file(tmp_path):
  """It is tried again and again, and others need what is left."""
  records = log.FileRecords(tmp_path / "log")
  assert not [*records.read()]
  with full_disk.files_end_at(100), pytest.raises(OSError, match="No space"):
    records.replace(bytes(1000))
  records.close()
  assert [path.name for path in tmp_path.iterdir()] == ["log"]
