"""A folder of checkpoints is that of one line of runs, and has no others."""

import contextlib
import errno
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import embedded_runs as runs
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import waiting

from optax_dist import coordinator, ledger
from optax_dist.coordinator import checkpoint
from optax_dist.coordinator.runtime import endpoint
from optax_dist.coordinator.server import process
from optax_dist.coordinator.transport import addresses

PARAMS = np.zeros((3,), np.float32)


def _train(folder, steps, *, rate=1.0, start=None, keep=None, replicas=1):
  """Trains up to a step; a step with the gradient 1 subtracts the rate."""
  opt = optax.sgd(rate)
  start = {"params": PARAMS} if start is None else start

  def train(replica):
    saved = []
    while replica.global_step < steps and not replica.finished:
      outcome = replica.step(jnp.ones(3))
      saved.append(
        checkpoint.save_if_due(folder, replica, outcome, every=10, keep=keep)
      )
    return [path.name for path in saved if path], replica.run_id

  return coordinator.run_embedded(train, replicas, opt, **start)


def _found(folder, rate=1.0):
  result = checkpoint.resume(folder, PARAMS, optax.sgd(rate).init(PARAMS))
  return result.get("global_step"), float(result["params"][0])


def _restored(path):
  return checkpoint.restore(path, PARAMS, optax.sgd(1.0).init(PARAMS))


def _names(folder):
  return sorted(p.name for p in folder.iterdir())


def test_run_from_an_earlier_checkpoint_replaces_later_ones(tmp_path, caplog):
  [(_, first)] = _train(tmp_path, 60)
  assert _found(tmp_path) == (60, -60.0)
  start = _restored(tmp_path / "step-00000030")
  with caplog.at_level(logging.WARNING, "optax_dist.coordinator"):
    [(saved, _)] = _train(tmp_path, 60, rate=0.5, start=start)
  assert saved == ["step-00000040", "step-00000050", "step-00000060"]
  assert _found(tmp_path) == (60, -45.0)
  # Earlier checkpoints are of its line; later ones are moved, with a warning.
  left = tmp_path / "left" / first
  assert _names(left) == saved
  assert float(_restored(left / "step-00000060")["params"][0]) == -60.0
  lines = [f"step-{step:08}" for step in range(10, 70, 10)]
  assert _names(tmp_path) == ["left", *lines]
  warnings = [r.getMessage() for r in caplog.records if "moved to" in r.msg]
  assert len(warnings) == 1
  assert "step-00000040" in warnings[0]


@pytest.mark.parametrize("kind", ["file", "link", "link of a parent"])
def test_file_or_broken_link_in_place_of_a_folder_is_an_error(tmp_path, kind):
  """A link to a file system that is not mounted: what it holds is not there now."""
  there = tmp_path / "there"
  if kind == "file":
    there.write_text("")
  else:
    there.symlink_to(tmp_path / "not mounted")
  folder = there / "checkpoints" if kind == "link of a parent" else there
  with pytest.raises(
    NotADirectoryError, match=r"can't hold checkpoints: .*there is no folder"
  ):
    _found(folder)
  with pytest.raises(
    NotADirectoryError, match=r"can't hold checkpoints: .*there is no folder"
  ):
    _train(folder, 20)


def test_unreadable_checkpoint_is_not_skipped(tmp_path, monkeypatch):
  """Otherwise a job of another user's folder would begin anew."""
  _train(tmp_path, 20)
  read = pathlib.Path.read_bytes

  def refused(path):
    if path.parent.name == "step-00000020":
      raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return read(path)

  monkeypatch.setattr(pathlib.Path, "read_bytes", refused)
  with pytest.raises(PermissionError, match="step-00000020"):
    _found(tmp_path)


def test_shorter_branch_replaces_the_longer_one(tmp_path):
  _train(tmp_path, 60)
  _train(tmp_path, 40, rate=0.5, start=_restored(tmp_path / "step-00000030"))
  assert _found(tmp_path) == (40, -35.0)


def test_each_branch_from_a_checkpoint_replaces_the_one_before(tmp_path):
  _train(tmp_path, 30)
  for rate in (0.5, 0.25):
    _train(tmp_path, 40, rate=rate, start=_restored(tmp_path / "step-00000030"))
    assert _found(tmp_path) == (40, -30.0 - 10 * rate)
  # And a branch that was left can be taken up again.
  [left] = (tmp_path / "left").iterdir()
  _train(tmp_path, 50, rate=2.0, start=_restored(left / "step-00000040"))
  assert _found(tmp_path) == (50, -55.0)


def test_a_fresh_run_saves_its_own_checkpoints(tmp_path):
  _train(tmp_path, 20)
  [(saved, _)] = _train(tmp_path, 20, rate=0.5)
  assert saved == ["step-00000010", "step-00000020"]
  assert _found(tmp_path) == (20, -10.0)


def test_checkpoints_continue_over_runs_of_different_sizes(tmp_path):
  start = None
  for run, replicas in enumerate((1, 2, 1), start=1):
    results = _train(tmp_path, 20 * run, start=start, replicas=replicas)
    assert len({run_id for _, run_id in results}) == 1
    start = checkpoint.resume(tmp_path, PARAMS, optax.sgd(1.0).init(PARAMS))
  assert _names(tmp_path) == [f"step-{step:08}" for step in range(10, 70, 10)]
  assert [step for _, step in start["lineage"]] == [20, 40, 60]


def test_going_back_under_one_coordinator_replaces_later_checkpoints(tmp_path):
  """All replicas have died, and come back with an earlier checkpoint."""
  world, left = endpoint.World(), []

  def run(steps, rate, **start):
    def train(replica, result):
      left.append(replica.run_id)
      while replica.global_step < steps:
        outcome = replica.step(jnp.full(3, rate))
        checkpoint.save_if_due(tmp_path, replica, outcome, every=10)
      raise runs.Killed

    start = {"params": PARAMS, "k": 1, "n": 1, "opt": optax.sgd(1.0)} | start
    result = runs.Result()
    runs.start(runs.make(world, 0, **start), train, result).join(60.0)
    assert isinstance(result.error, runs.Killed)

  run(35, 1.0)
  for rate in (0.5, 0.25):
    run(25, rate, **_restored(tmp_path / "step-00000010"))
    assert _found(tmp_path) == (20, -10.0 - 10 * rate)
  run(33, 2.0, **_restored(tmp_path / "step-00000020"))
  assert _found(tmp_path) == (30, -32.5)
  assert [_names(tmp_path / "left" / run_id) for run_id in left[:2]] == [
    ["step-00000020", "step-00000030"],
    ["step-00000020"],
  ]


def test_checkpoints_stay_if_the_log_is_lost(tmp_path):
  """The run goes on from what its replicas have, by another coordinator."""
  folder, secret = tmp_path / "checkpoints", b"a secret of enough bytes"
  (port,) = addresses.free_ports()
  start = lambda name: process.start(
    secret, port=port, log=str(tmp_path / name)
  )
  first = start("first.log")
  with contextlib.ExitStack() as stack:
    stack.callback(first.kill)
    replica = stack.enter_context(
      coordinator.join(
        optax.sgd(1.0),
        PARAMS,
        replica=0,
        total_num_replicas=1,
        coordinator_address=first.address,
        start_coordinator=False,
        secret=secret,
        timeout=60.0,
      )
    )
    for steps in (15, 20):
      while replica.global_step < steps:
        outcome = replica.step(jnp.ones(3))
        checkpoint.save_if_due(folder, replica, outcome, every=10)
      if steps == 15:
        first.kill()
        stack.callback(start("other.log").kill)
    [(_, step)] = replica.lineage
    replica.leave()
  assert step == 15
  assert _names(folder) == ["step-00000010", "step-00000020"]


def test_late_replica_knows_the_lineage():
  """It joins without a checkpoint, and may be the replica that saves."""
  lineage = (("an earlier run", 7),)
  world, results = endpoint.World(), [runs.Result(), runs.Result()]
  joined, seen = threading.Event(), {}

  def train(replica, result):
    seen[replica.replica] = replica.run_id, replica.lineage
    if replica.replica:
      joined.set()
      return
    runs.to_step(9)(replica, result)
    thread = runs.start(late, train, results[1])
    assert joined.wait(120.0)
    thread.join(120.0)

  late = runs.make(world, 1, k=1, n=2)
  first = runs.make(world, 0, k=1, n=2, global_step=7, lineage=lineage)
  runs.start(first, train, results[0]).join(60.0)
  assert [result.error for result in results] == [None, None]
  assert seen[0] == seen[1]
  assert seen[0][1] == lineage


def test_second_run_that_saves_to_a_folder_ends_the_first(tmp_path):
  """The second run has moved the checkpoints of the first, which then ends."""
  may_go_on = threading.Event()

  def first(replica):
    for _ in range(10):
      outcome = replica.step(jnp.ones(3))
    checkpoint.save_if_due(tmp_path, replica, outcome, every=10)
    assert may_go_on.wait(120.0)
    for _ in range(10):
      outcome = replica.step(jnp.ones(3))
    checkpoint.save_if_due(tmp_path, replica, outcome, every=10)

  errors = []

  def run():
    try:
      coordinator.run_embedded(first, 1, optax.sgd(1.0), PARAMS)
    except RuntimeError as error:
      errors.append(str(error))

  thread = threading.Thread(target=run)
  thread.start()
  waiting.until((tmp_path / "step-00000010").exists)
  _train(tmp_path, 10, rate=0.5)
  may_go_on.set()
  thread.join(120.0)
  assert len(errors) == 1
  assert "Another run saves its checkpoints to" in errors[0]
  assert _found(tmp_path) == (10, -5.0)


def test_old_checkpoints_are_deleted_on_request(tmp_path):
  _train(tmp_path, 60, keep=2)
  assert _names(tmp_path) == ["step-00000050", "step-00000060"]
  start = checkpoint.resume(tmp_path, PARAMS, optax.sgd(1.0).init(PARAMS))
  _train(tmp_path, 70, start=start, keep=2)
  assert _names(tmp_path) == ["step-00000060", "step-00000070"]
  # An incomplete checkpoint does not count as kept.
  (tmp_path / "step-00000070" / "checkpoint.json").write_text("{}")
  start = checkpoint.resume(tmp_path, PARAMS, optax.sgd(1.0).init(PARAMS))
  assert start["global_step"] == 60
  for keep in (0, -1, 1.5):
    with pytest.raises((ValueError, TypeError), match="keep"):
      _train(tmp_path, 70, start=start, keep=keep)


_KILLED = """
import os, pathlib, sys
import numpy as np, optax
from optax_dist import coordinator
from optax_dist.coordinator import checkpoint
from optax_dist.coordinator.runtime import endpoint
import orbax.checkpoint

class Slow(orbax.checkpoint.StandardCheckpointer):
  def save(self, path, tree):
    super().save(path, tree)
    self.wait_until_finished()
    print("saving", flush=True)
    sys.stdin.read()

orbax.checkpoint.StandardCheckpointer = Slow
def train(replica):
  outcome = replica.step(np.ones(3, np.float32))
  checkpoint.save_if_due(sys.argv[1], replica, outcome, every=1)
coordinator.run_embedded(train, 1, optax.sgd(1.0), np.zeros(3, np.float32))
"""


def test_leftovers_of_a_killed_save_are_removed(
  tmp_path,
):
  # From before there were locks, or of a writer killed at its very beginning.
  (tmp_path / ".step-00000007.abcd1234").mkdir()
  (tmp_path / ".mine").mkdir()
  child = subprocess.Popen(
    [sys.executable, "-c", _KILLED, str(tmp_path)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  try:
    assert child.stdout.readline() == b"saving\n"
    [left] = [n for n in _names(tmp_path) if n.startswith(".step-00000001.")]
    _train(tmp_path, 10)
    assert _names(tmp_path) == [".mine", left, "step-00000010"]
  finally:
    child.kill()
    child.communicate()
  _train(tmp_path, 20)
  assert left not in _names(tmp_path)
  assert ".mine" in _names(tmp_path)


def test_only_complete_checkpoints_are_the_latest(tmp_path, caplog):
  _train(tmp_path, 30)
  whole = tmp_path / "step-00000020"
  shutil.copytree(whole, tmp_path / "backup-20260101")
  shutil.copytree(whole, tmp_path / "step-00000099")  # Not its step.
  shutil.copytree(whole, tmp_path / "step-00000020-old")
  (tmp_path / "step-00000100").mkdir()
  (tmp_path / "step-00000200").write_text("")
  (tmp_path / "step-00000300").symlink_to("nowhere")
  assert checkpoint.latest(tmp_path).name == "step-00000030"
  assert not caplog.records
  for damage in (
    lambda path: path.unlink(),
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
  ):
    last = tmp_path / "step-00000030"
    kept = tmp_path / "kept"
    shutil.copytree(last, kept)
    data = [p for p in last.rglob("*/*") if p.is_file()]
    damage(max(data, key=lambda p: p.stat().st_size))
    assert checkpoint.latest(tmp_path).name == "step-00000020"
    [record] = caplog.records
    assert "step-00000030 is not complete" in record.getMessage()
    caplog.clear()
    with pytest.raises(ValueError, match=r"step-00000030 is not complete: .*"):
      _restored(last)
    shutil.rmtree(last)
    kept.rename(last)
  assert checkpoint.latest(tmp_path).name == "step-00000030"
  (tmp_path / "empty").mkdir()
  with pytest.raises(ValueError, match="empty is no complete checkpoint"):
    _restored(tmp_path / "empty")
  assert checkpoint.latest(tmp_path / "nowhere") is None


def test_latest_checkpoint_is_of_the_run_that_saved_last(tmp_path):
  """Each run saves with `checkpoint.save`."""

  def train(steps):
    def run(replica):
      for _ in range(steps):
        replica.step(jnp.ones(3))
      checkpoint.save(tmp_path / f"step-{steps}", replica)

    coordinator.run_embedded(run, 1, optax.sgd(1.0), PARAMS)

  train(12)
  train(5)
  assert checkpoint.latest(tmp_path).name == "step-5"


@pytest.fixture(scope="module")
def saved_with_leases(tmp_path_factory):
  folder = tmp_path_factory.mktemp("leased")

  def train(replica):
    for _ in replica.batches():
      replica.step(jnp.ones(3))
      if replica.global_step == 2:
        checkpoint.save(folder / "step-2", replica)

  data = coordinator.Batches(8, 4, epochs=2)
  coordinator.run_embedded(train, 1, optax.sgd(1.0), PARAMS, data=data)
  return folder / "step-2"


@pytest.mark.parametrize(
  ("text", "wrong"),
  [
    ('{"next": -5}', "next"),
    ('{"next": "many"}', "next"),
    ('{"next": 4, "open": [[2, 6]]}', "open"),
    ('{"next": 9, "open": [[4, 6], [2, 3]]}', "open"),
    ('{"next": 9, "open": [[4, 4]]}', "open"),
    ('{"next": 9, "open": [[2, 4]], "skipped": [[3, 5]]}', "in common"),
    ('{"next": 9, "skipped": [[-2, 4]]}', "skipped"),
    ('{"next": 4', "truncated"),
    ("", "truncated"),
    ("[]", "object"),
  ],
)
def test_impossible_progress_is_refused(
  tmp_path, saved_with_leases, text, wrong
):
  path = tmp_path / "step-2"
  shutil.copytree(saved_with_leases, path)
  assert _restored(path)["progress"] == ledger.Progress(8)
  (path / "progress.json").write_text(text)
  with pytest.raises(
    ValueError, match=rf"progress\.json is not what .*{wrong}"
  ):
    _restored(path)


@pytest.mark.parametrize(
  ("progress", "wrong"),
  [
    (ledger.Progress(-5), "next is not a position"),
    (ledger.Progress(4, ((2, 6),)), "open is not"),
    (ledger.Progress(17), "beyond the 16 positions"),
  ],
)
def test_progress_of_other_data_is_refused(progress, wrong):
  data = coordinator.Batches(8, 4, epochs=2)
  with pytest.raises(ValueError, match=f"progress is of no run.*{wrong}"):
    coordinator.run_embedded(
      lambda replica: None,
      1,
      optax.sgd(1.0),
      PARAMS,
      data=data,
      progress=progress,
    )


def test_a_checkpoint_is_not_continued_on_other_samples(saved_with_leases):
  """Some would be in two steps of an epoch, and others in none."""

  def resume(**changes):
    numbers = {"num_samples": 8, "global_batch": 4, "epochs": 2, **changes}
    data = coordinator.Batches(**numbers) if changes else None
    return coordinator.run_embedded(
      lambda replica: replica.report_data()[-1].open,
      1,
      optax.sgd(1.0),
      data=data,
      **_restored(saved_with_leases),
    )

  for changes, wrong in (
    ({"seed": 1}, "seed=0, and this has seed=1"),
    ({"num_samples": 12}, "num_samples=8, .* num_samples=12, .*epoch=12"),
    ({"global_batch": 3}, "samples in an epoch=8, .*samples in an epoch=6"),
    ({"shuffle": False}, "shuffle=True, seed=0, .* shuffle=False, seed=None"),
    ({}, "data= is missing"),
  ):
    with pytest.raises(ValueError, match=f"progress.*{wrong}"):
      resume(**changes)
  # More of them, or steps of another size, have the same order.
  for changes in ({"epochs": 3}, {"global_batch": 8}, {"mode": "streaming"}):
    [still_open] = resume(**changes)
    assert len(still_open) == 8


def test_malformed_lineage_is_refused():
  for lineage in ("a run", [("a run",)], [("a run", -1)]):
    with pytest.raises(ValueError, match="lineage must be"):
      coordinator.run_embedded(
        lambda replica: None, 1, optax.sgd(1.0), PARAMS, lineage=lineage
      )
