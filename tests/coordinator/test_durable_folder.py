"""A checkpoint's folder appears whole or not at all, and is its owner's alone."""

import os
import stat

import pytest

from optax_dist.coordinator import checkpoint_folder


def _durable_folder(path):
  return checkpoint_folder.new(path, checkpoint_folder.About("a run", 1))


def _mode(path):
  return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def synced(monkeypatch):
  """Which files and folders were fsynced, by inode."""
  result = set()
  real = os.fsync
  monkeypatch.setattr(
    os, "fsync", lambda n: (result.add(os.fstat(n).st_ino), real(n))
  )
  return result


def test_folder_appears_once_it_is_complete(tmp_path, synced):
  path = tmp_path / "parent" / "folder"
  with _durable_folder(path) as new:
    (new / "deep").mkdir(parents=True)
    (new / "deep" / "file").write_text("text")
    assert not path.exists()
    assert _mode(new.parent) == 0o700
  assert (path / "deep" / "file").read_text() == "text"
  everything = [path, path / "deep", path / "deep" / "file", path.parent]
  assert {p.stat().st_ino for p in everything} <= synced
  assert [_mode(p) for p in everything[:3]] == [0o700, 0o700, 0o600]
  assert [p.name for p in path.parent.iterdir()] == ["folder"]


def test_folder_is_absent_if_writing_it_fails(tmp_path):
  def write():
    with _durable_folder(tmp_path / "new") as new:
      new.mkdir()
      raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError):
    write()
  assert not list(tmp_path.iterdir())
