"""Files that appear whole or not at all, and are their owner's alone."""

import os
import stat

import pytest

from optax_dist._internal import durable


def _mode(path):
  return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def synced(monkeypatch):
  """Which files and folders were fsynced, by inode."""
  found = set()
  real = os.fsync
  monkeypatch.setattr(
    os, "fsync", lambda n: (found.add(os.fstat(n).st_ino), real(n))
  )
  return found


def test_a_file_replaces_another_and_is_on_the_disk(tmp_path, synced):
  path = tmp_path / "file"
  path.write_bytes(b"before")
  path.chmod(0o644)
  durable.write(path, b"after")
  assert path.read_bytes() == b"after"
  assert _mode(path) == 0o600
  assert {path.stat().st_ino, tmp_path.stat().st_ino} <= synced
  assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_file_that_can_not_be_written_leaves_the_one_before(tmp_path):
  path = tmp_path / "file"
  durable.write(path, b"before")
  with pytest.raises(TypeError):
    durable.write(path, "no bytes")
  assert path.read_bytes() == b"before"
  assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_appears_at_the_end_with_all_that_is_in_it(tmp_path, synced):
  path = tmp_path / "parent" / "folder"
  with durable.folder(path) as new:
    (new / "deep").mkdir(parents=True)
    (new / "deep" / "file").write_text("text")
    assert not path.exists()
    assert _mode(new.parent) == 0o700
  assert (path / "deep" / "file").read_text() == "text"
  everything = [path, path / "deep", path / "deep" / "file", path.parent]
  assert {p.stat().st_ino for p in everything} <= synced
  assert [_mode(p) for p in everything[:3]] == [0o700, 0o700, 0o600]
  assert [p.name for p in path.parent.iterdir()] == ["folder"]


def test_a_folder_whose_writing_fails_is_not_there(tmp_path):
  def write():
    with durable.folder(tmp_path / "new") as new:
      new.mkdir()
      raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError):
    write()
  assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_not_replaced(tmp_path):
  path = tmp_path / "folder"
  with durable.folder(path) as new:
    new.mkdir()
    (new / "file").write_text("first")
  with pytest.raises(FileExistsError), durable.folder(path) as new:
    new.mkdir()
  assert (path / "file").read_text() == "first"
