"""The log in a file, after a loss of power and on a full disk."""

import os

import full_disk
import pytest

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


def test_power_loss_takes_away_steps_alone(tmp_path, monkeypatch):
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


def test_what_does_not_fit_on_a_full_disk_takes_no_room(tmp_path):
  """It is tried again and again, and others need what is left."""
  records = log.FileRecords(tmp_path / "log")
  assert not [*records.read()]
  with full_disk.files_end_at(100), pytest.raises(OSError, match="No space"):
    records.replace(bytes(1000))
  records.close()
  names = {path.name for path in tmp_path.iterdir()}
  assert names == {"log", "log.lock"}
