"""Tests of orbax checkpoints: saved by any replica, restored on any number."""

import stat
import threading
import types
from concurrent import futures
from unittest import mock

import embedded_runs as runs
import full_disk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
import waiting

from optax_dist import coordinator, ledger
from optax_dist.coordinator import checkpoint
from optax_dist.coordinator._internal import phases
from optax_dist.coordinator.runtime import processes


def test_run_continues_from_a_checkpoint_with_other_replicas(tmp_path):
  whole = tmp_path / "whole.jsonl"
  rest = tmp_path / "rest.jsonl"
  entered = []

  def train(replica, result):
    step = None
    while replica.global_step < 8:
      grads, batch = runs.compute(replica, result.computed)
      result.computed += 1
      outcome = replica.step(grads, batch=batch)
      if outcome.global_step == 3 and replica.replica == 0:
        replica.save_soon()
      if outcome.save and replica.replica == 1:
        step = checkpoint.save(tmp_path / "saved", replica)
    return step

  phases.listen(lambda phase, replica: entered.append((phase, replica)))
  try:
    results = runs.run(train, 3, journal=whole)
  finally:
    phases.listen(None)
  assert [r.error for r in results] == [None] * 3
  assert ("checkpointing", 1) in entered
  step = results[1].value
  assert 4 <= step < 8

  zeros = jax.tree.map(jax.numpy.zeros_like, runs.PARAMS)
  answer = checkpoint.restore(tmp_path / "saved", zeros, runs.OPT.init(zeros))
  assert answer["global_step"] == step
  # Its content is that of the journal's step.
  held = runs.strategies.SharedState(answer["params"], answer["opt_state"])
  digest = runs.fingerprint(held)
  assert digest == runs.replay(runs.records(whole))[step]

  again = runs.run(runs.to_step(step + 3), 2, journal=rest, **answer)
  assert [r.error for r in again] == [None] * 2
  assert again[0].prints == again[1].prints
  assert sorted(again[0].prints) == [step + 1, step + 2, step + 3]
  commits = [r["step"] for r in runs.records(rest) if r["kind"] == "commit"]
  assert commits == [step, step + 1, step + 2]


def test_checkpoints_are_private_and_never_overwritten(tmp_path):
  path = tmp_path / "saved"

  def train(replica, result):
    replica.step(*runs.compute(replica, 0)[:1])
    checkpoint.save(path, replica)
    before = _files(path)
    with pytest.raises(FileExistsError, match="checkpoint"):
      checkpoint.save(path, replica)
    assert _files(path) == before

  [result] = runs.run(train, 1)
  assert result.error is None
  modes = {stat.S_IMODE(p.stat().st_mode) for p in path.rglob("*")}
  assert modes == {0o600, 0o700}
  assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def _files(path):
  return {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}


class _Group(processes.Processes):
  """One process of a replica of two, which are threads."""

  count = 2

  def __init__(self, index, texts, together):
    self.index, self._texts, self._together = index, texts, together

  def gather(self, text):
    self._texts[self.index] = text
    self._together.wait()
    texts = list(self._texts)
    self._together.wait()
    return texts


class _Orbax:
  """Writes a tree of texts, as process 0 of a replica."""

  __enter__ = lambda self: self
  __exit__ = lambda self, *error: None

  def save(self, path, tree):
    path.mkdir(exist_ok=True)


def _saved_by_two(path, monkeypatch, progress_at):
  """Returns the results of `save` in two processes of a replica."""
  monkeypatch.setattr(orbax.checkpoint, "StandardCheckpointer", _Orbax)
  texts, together = ["", ""], threading.Barrier(2, timeout=120.0)

  def save(index):
    replica = types.SimpleNamespace(
      replica=0,
      run_id="a run",
      lineage=(),
      processes=_Group(index, texts, together),
      inner_state=None,
      state_to_save=lambda: (runs.strategies.SharedState({}, {}), 4),
      has_data=True,
      progress_at=lambda step: progress_at(index),
    )
    return checkpoint.save(path, replica)

  with futures.ThreadPoolExecutor(2) as pool:
    result = [pool.submit(save, index) for index in range(2)]
  return result


def test_one_process_of_a_replica_writes_the_progress(tmp_path, monkeypatch):
  """Another one may be late, and the folder has its name by then."""
  path = tmp_path / "saved"

  def progress_at(index):
    if index:
      waiting.until(path.exists)
    return ledger.Progress(12)

  result = _saved_by_two(path, monkeypatch, progress_at)
  assert [one.result() for one in result] == [4, 4]
  names = {p.name for p in path.iterdir()}
  assert names == {"progress.json", "checkpoint.json"}


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
  (tmp_path / "file").touch()

  def train(replica, result):
    with pytest.raises(NotADirectoryError, match="file is no folder"):
      checkpoint.save(tmp_path / "file" / "step", replica)

  [result] = runs.run(train, 1)
  assert result.error is None


@pytest.mark.parametrize("at", ["first", "orbax"])
def test_a_full_disk_is_an_error_that_names_the_checkpoint(tmp_path, at):
  """Whether the first file does not fit, or one of orbax."""
  full = full_disk.files_end_at(0)
  if at == "orbax":
    # Its error; it also leaves threads behind then.
    error = ValueError("RESOURCE_EXHAUSTED: No space left on device")
    whose = orbax.checkpoint.StandardCheckpointer
    full = mock.patch.object(whose, "save", side_effect=error)

  def train(replica, result):
    replica.step(*runs.compute(replica, 0)[:1])
    with full, pytest.raises(OSError, match="step-00000001"):
      checkpoint.save(tmp_path / "step-00000001", replica)
    assert checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path / "step-00000001", replica)

  [result] = runs.run(train, 1)
  assert result.error is None
  assert checkpoint.latest(tmp_path).name == "step-00000001"


def test_all_processes_of_a_replica_see_that_a_checkpoint_exists(
  tmp_path, monkeypatch
):
  def progress_at(index):
    (tmp_path / "saved").mkdir(exist_ok=True)
    return ledger.Progress(12)

  result = _saved_by_two(tmp_path / "saved", monkeypatch, progress_at)
  for one in result:
    with pytest.raises(FileExistsError, match="There is a checkpoint"):
      one.result()


def test_a_missing_checkpoint_is_reported(tmp_path):
  with pytest.raises(FileNotFoundError):
    checkpoint.restore(
      tmp_path / "none", runs.PARAMS, runs.OPT.init(runs.PARAMS)
    )


def test_a_job_saves_and_resumes_by_one_call_each(tmp_path):
  folder = tmp_path / "checkpoints"
  start = (runs.PARAMS, runs.OPT.init(runs.PARAMS))
  assert checkpoint.resume(folder, *start) == {"params": runs.PARAMS}

  def train(replica, result):
    paths = []
    while replica.global_step < 7:
      grads, batch = runs.compute(replica, result.computed)
      result.computed += 1
      outcome = replica.step(grads, batch=batch)
      if outcome.global_step == 5 and replica.replica == 0:
        replica.save_soon()
      path = checkpoint.save_if_due(folder, replica, outcome, every=3)
      if path is not None:
        paths.append(path.name)
        # A replica that is late finds that another has saved this step.
        assert not checkpoint.save_if_due(folder, replica, outcome, every=3)
    path = checkpoint.save_if_due(folder, replica, replica.finish(), every=3)
    return [*paths, *([path.name] if path else [])]

  results = runs.run(train, 3)
  assert [result.error for result in results] == [None] * 3
  # One replica saves: every three steps, where all are to, and at the end.
  saved = [name for result in results for name in result.value]
  names = sorted(path.name for path in folder.iterdir())
  assert sorted(saved) == names
  due = {"step-00000003", "step-00000006", "step-00000007"}
  assert due <= set(names)
  answer = checkpoint.resume(folder, *start)
  assert f"step-{answer['global_step']:08}" == names[-1]
  [again] = runs.run(runs.to_step(answer["global_step"] + 1), 1, **answer)
  assert again.error is None


def test_last_step_is_saved_once_all_data_is_used(tmp_path):
  data = coordinator.Batches(28, 4)

  def train(replica):
    for _ in replica.batches():
      outcome = replica.step(jnp.ones(3))
      checkpoint.save_if_due(tmp_path, replica, outcome, every=3, keep=1)
    outcome = replica.finish()
    return checkpoint.save_if_due(tmp_path, replica, outcome, every=3, keep=1)

  def run(replicas, **start):
    return coordinator.run_embedded(
      train, replicas, optax.sgd(1.0), data=data, **start
    )

  [last] = filter(None, run(2, params=jnp.zeros(3)))
  assert [*tmp_path.iterdir()] == [last]
  start = checkpoint.resume(tmp_path, jnp.zeros(3), optax.sgd(1.0).init(0))
  assert start["global_step"] == 7
  assert float(start["params"][0]) == -7.0
  # It has come to its end already.
  assert run(4, **start) == [None] * 4
  assert [*tmp_path.iterdir()] == [last]


def test_committed_step_decides_whether_to_save(tmp_path, monkeypatch):
  """The parameters may be newer: others' steps are applied before it wakes up."""
  monkeypatch.setattr(checkpoint, "_save", lambda path, replica, **line: None)
  replica = types.SimpleNamespace(
    replica=0, run_id="a run", lineage=(), processes=processes.Processes()
  )

  def due(committed, step, members=(0, 1)):
    outcome = coordinator.Outcome(
      True, "", step, members=members, committed=committed
    )
    replica.state_to_save = lambda: (None, step)
    return checkpoint.save_if_due(tmp_path, replica, outcome, every=100)

  assert due(100, step=100).name == "step-00000100"
  assert due(100, step=101).name == "step-00000101"
  assert due(99, step=100) is None
  assert due(100, step=100, members=(1, 0)) is None


def test_only_requested_checkpoints_are_saved_if_every_is_0(
  tmp_path,
):
  def train(replica, result):
    saved = []
    while replica.global_step < 6:
      outcome = replica.step(*runs.compute(replica, 0)[:1])
      if outcome.global_step == 2:
        replica.save_soon()
      saved.append(checkpoint.save_if_due(tmp_path, replica, outcome, every=0))
    return [path.name for path in saved if path]

  [result] = runs.run(train, 1)
  assert result.error is None
  assert [path.name for path in tmp_path.iterdir()] == result.value
  assert len(result.value) == 1


def test_a_resumed_replica_compiles_its_gradient_once(tmp_path):
  params = {
    "w": np.ones(4, np.float32)
  }  # NumPy, but the optimizer's state not.
  opt = optax.sgd(0.1, momentum=0.9)
  data = coordinator.Batches(64, 4, micro_batch=2, deterministic=True)

  def programs(steps, **start):
    gradient = jax.jit(
      lambda params, key: jax.tree.map(
        lambda x: x * jax.random.uniform(key), params
      )
    )

    def train(replica):
      for slot in replica.micro_batches():
        replica.step(gradient(replica.params, slot.key))
        if replica.global_step == steps:
          return checkpoint.save(tmp_path / f"step-{steps}", replica)
      return None

    done = coordinator.run_embedded(
      train,
      1,
      opt,
      data=data,
      probe=lambda params, slot: gradient(params, slot.key),
      **start,
    )
    assert done == [steps]
    return gradient._cache_size()

  assert programs(2, params=params) == 1
  result = checkpoint.resume(tmp_path, params, opt.init(params))
  assert result["global_step"] == 2
  assert programs(4, **result) == 1


@pytest.mark.parametrize(
  ("params", "opt"),
  [
    ({"a.b": np.ones(2), "a": {"b": np.zeros(2)}}, optax.sgd(0.1)),
    ({"w": np.ones(2), "none": np.zeros((0, 3))}, optax.sgd(0.1, momentum=0.9)),
    ({"w": jnp.ones(3, jnp.bfloat16)}, runs.widening()),
  ],
  ids=["names", "empty", "dtypes"],
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
  params, opt, tmp_path
):
  """Whatever leaves parameters and optimizer have."""
  params = jax.tree.map(jnp.asarray, params)

  def run(steps, **start):
    def train(replica):
      while replica.global_step < steps:
        replica.step(jax.tree.map(lambda x: x / 3, replica.params))
        if replica.global_step == 2:
          checkpoint.save(tmp_path / f"step-{steps}", replica)
      return replica.fingerprint()

    return coordinator.run_embedded(train, 1, opt, **start)

  whole = run(5, params=params)
  start = checkpoint.restore(tmp_path / "step-5", params, opt.init(params))
  assert run(5, **start) == whole


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_by_name(
  tmp_path,
):
  params = {"w": jnp.ones((2, 3))}
  opt = optax.sgd(0.1, momentum=0.9)
  coordinator.run_embedded(
    lambda replica: checkpoint.save(tmp_path / "step-0", replica),
    1,
    opt,
    params,
  )
  narrow = {"w": params["w"].astype(jnp.bfloat16)}
  for like, optimizer, wrong in (
    ({"v": params["w"]}, opt, r"params\['v'\] is none there"),
    (
      {"w": params["w"].T},
      opt,
      r"\['w'\] is float32\[2, 3\] there, and float32\[3",
    ),
    (narrow, opt, r"params\['w'\] is float32\[2, 3\] there, and bfloat16"),
    (params, optax.sgd(0.1), r"opt_state\[0\].trace\['w'\] .*, and none here"),
  ):
    with pytest.raises(
      ValueError, match=f"another model or optimizer: .*{wrong}"
    ):
      checkpoint.restore(tmp_path / "step-0", like, optimizer.init(like))
