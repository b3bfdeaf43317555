"""A run whose journal can't be written for a while, or is taken away."""

import os

import full_disk
import jax.numpy as jnp
import optax
import pytest

from optax_dist import coordinator
from optax_dist.coordinator import journal


def test_the_journal_has_all_steps_once_there_is_room(tmp_path, caplog):
  path = tmp_path / "run.jsonl"

  def train(replica):
    def to_step(step):
      while replica.global_step < step:
        replica.step(jnp.ones(3))

    to_step(3)
    with full_disk.files_end_at(path.stat().st_size):
      to_step(6)
    to_step(9)

  coordinator.run_embedded(train, 1, optax.sgd(1.0), jnp.zeros(3), journal=path)
  assert caplog.text.count("can't be written any more") == 1
  assert "training goes on without it" in caplog.text
  # As soon as there is room again, it has all, and their times.
  assert "is written again after" in caplog.text
  assert "0 lines are missing from it" in caplog.text
  result = journal.read(path)
  times = [r["time"] for r in result.records]
  assert times == sorted(times)
  commits = [r["step"] for r in result.records if r["kind"] == "commit"]
  assert commits == list(range(9))
  assert not result.problems
  assert result.records[-1]["kind"] == "finish"


@pytest.mark.parametrize(
  "take", [os.unlink, lambda path: path.rename(f"{path}.1"), os.truncate]
)
def test_deleted_or_moved_journal_continues_in_a_new_file(
  take, tmp_path, caplog
):
  """As by `rm`, or by logrotate, with and without copytruncate."""
  path = tmp_path / "run.jsonl"

  def train(replica):
    while replica.global_step < 9:
      replica.step(jnp.ones(3))
      if replica.global_step == 4:
        take(path, 0) if take is os.truncate else take(path)

  coordinator.run_embedded(train, 1, optax.sgd(1.0), jnp.zeros(3), journal=path)
  assert "deleted, moved or emptied" in caplog.text
  result = journal.read(path)
  assert not result.problems
  first, *others = result.records
  assert (first["kind"], first["strategy"]) == ("run", "sync_replicas")
  commits = [r["step"] for r in others if r["kind"] == "commit"]
  assert commits == list(range(first["step"], 9))
  # A step is announced before it is written.
  assert first["step"] in (3, 4)
  times = [r["time"] for r in others]
  assert times == sorted(times)
  assert 0.0 <= times[-1] < 60.0
