"""Checkpoints of a launched training, and what becomes of those of others."""

import argparse
import os
import stat
import types

import jax.numpy as jnp
import pytest

from optax_dist.cli import errors
from optax_dist.cli.train.processes import checkpoints, training
from optax_dist.coordinator import journal


def _replica(step):
  return types.SimpleNamespace(
    replica=0,
    global_step=step,
    center={"w": jnp.full(3, float(step))},
    opt_state={"m": jnp.zeros(3)},
  )


def _arguments(output, resume=False):
  return argparse.Namespace(output=output, resume=resume)


def test_what_holds_parameters_is_its_owners_alone(tmp_path):
  folder = tmp_path / "checkpoints"
  checkpoints.save(folder, _replica(5))
  [path] = folder.iterdir()
  assert stat.S_IMODE(path.stat().st_mode) == 0o600
  assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_latest_three_are_kept(tmp_path):
  for step in (5, 10, 15, 20):
    checkpoints.save(tmp_path, _replica(step))
  assert checkpoints.steps(tmp_path) == [10, 15, 20]


@pytest.mark.parametrize("how", ["empty", "cut", "nonsense", "other"])
def test_a_broken_newest_one_falls_back_to_the_one_before(
  tmp_path, caplog, how
):
  for step in (5, 10):
    checkpoints.save(tmp_path, _replica(step))
  newest = checkpoints.path_of(tmp_path, 10)
  whole = newest.read_bytes()
  other = checkpoints.path_of(tmp_path, 5).read_bytes()
  newest.write_bytes(
    {"empty": b"", "cut": whole[:-9], "nonsense": b"\xc1", "other": other}[how]
  )
  found = checkpoints.newest(tmp_path)
  assert found == checkpoints.path_of(tmp_path, 5)
  assert "The checkpoint of step 10 can't be read" in caplog.text
  like = types.SimpleNamespace(
    params={"w": jnp.zeros(3)}, opt_state={"m": jnp.zeros(3)}
  )
  start = checkpoints.load(found, like)
  assert start["global_step"] == 5
  assert start["params"]["w"].tolist() == [5.0] * 3
  # The resumed run saves step 10 again.
  checkpoints.save(tmp_path, _replica(10))
  assert checkpoints.newest(tmp_path) == newest
  assert newest.read_bytes() == whole


def test_without_a_whole_one_there_is_nothing_to_resume(tmp_path):
  folder = tmp_path / "checkpoints"
  checkpoints.save(folder, _replica(5))
  checkpoints.path_of(folder, 5).write_bytes(b"")
  with pytest.raises(errors.CommandError, match="there is no checkpoint"):
    training._checkpoint(_arguments(tmp_path, resume=True))


def test_a_new_run_deletes_nothing_of_an_older_one(tmp_path):
  folder = tmp_path / "checkpoints"
  for step in (50, 100):
    checkpoints.save(folder, _replica(step))
  before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
  with pytest.raises(
    errors.CommandError, match=r"step 100; --resume .* folder"
  ):
    training._checkpoint(_arguments(tmp_path))
  after = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
  assert after == before


def test_a_journal_without_checkpoints_is_not_deleted_either(tmp_path):
  path = tmp_path / "journal.jsonl"
  assert training._checkpoint(_arguments(tmp_path)) is None
  with journal.Journal(path) as file:
    file.write("run", strategy="sync_replicas", step=0)
    assert training._checkpoint(_arguments(tmp_path)) is None
    file.write("commit", step=0, attempt=0, attempt_time=0.1, members=[])
  with_commit = path.read_text()
  with pytest.raises(errors.CommandError, match=r"journal .* another folder"):
    training._checkpoint(_arguments(tmp_path))
  assert path.read_text() == with_commit
