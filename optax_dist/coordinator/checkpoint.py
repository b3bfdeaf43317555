"""Checkpoints of the state that all replicas share, written with orbax.

Any replica can write one, since all hold the same state; one is enough. It can
be restored on any number of replicas.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import msgspec

from optax_dist import ledger
from optax_dist.coordinator import phases
from optax_dist.coordinator.replica import Outcome, Replica
from optax_dist.coordinator.runtime import processes

# Which samples are in committed steps, stored beside the files orbax writes.
_PROGRESS = "progress.json"
# Hidden ones are not complete.
_NAME = re.compile(r"[^.].*?(\d+)")


def save(path: str | os.PathLike[str], replica: Replica) -> int:
  """Writes the parameters, optimizer state and step that all replicas share.

  After an `Outcome` with `save`, the common step is written, even by a replica
  that has moved past it meanwhile. The folder appears once it is complete on
  disk, and only its owner may read it. If a replica has several processes, all
  of them call this with a shared folder, and each writes its shards.

  Args:
    path: a folder that does not exist yet.
    replica: any replica; all of them hold the same state.

  Returns:
    The step.

  Raises:
    ModuleNotFoundError: orbax-checkpoint is not installed.
    FileExistsError: the folder exists.
  """
  import orbax.checkpoint as ocp

  shared, step = replica.state_to_save()
  phases.reach("checkpointing", replica.replica)
  path = pathlib.Path(os.path.abspath(path))
  tree = {
    "params": shared.params,
    "opt_state": shared.opt_state,
    "global_step": step,
  }
  first = replica.processes.index == 0
  taken: FileExistsError | None = None
  try:
    # The contexts exit in this order: the folder must be complete before it is
    # renamed.
    with contextlib.ExitStack() as stack:
      new = ""
      if first and not path.exists():
        new = str(stack.enter_context(_durable_folder(path)))
      new, *_ = replica.processes.gather(new)
      if not new:
        raise FileExistsError(path)
      with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(pathlib.Path(new), tree)
      if replica.has_data:
        # All processes ask for the progress. It is written last, once everything
        # else is there.
        progress = msgspec.json.encode(replica.progress_at(step))
        if first:
          (pathlib.Path(new) / _PROGRESS).write_bytes(progress)
  except FileExistsError as error:
    taken = error
  # The processes wait until the first one has renamed the folder, or has found
  # that another replica was faster.
  if "taken" in replica.processes.gather("taken" if taken else ""):
    raise FileExistsError(
      f"There is a checkpoint at {path} already."
    ) from taken
  return step


def save_if_due(
  folder: str | os.PathLike[str],
  replica: Replica,
  outcome: Outcome,
  every: int,
) -> pathlib.Path | None:
  """Saves every so many steps, and when all are to save; call it after a step.

  One replica of those that took the step saves, since all hold the same. What it
  saves is the state of its parameters, which may be some steps newer.

  Args:
    folder: what holds the checkpoints, each in a folder ``step-...`` of it.
    replica: this replica.
    outcome: what `Replica.step` returned.
    every: steps between checkpoints; 0 for none but those that are asked for
      (`Outcome.save`).

  Returns:
    The path of the new checkpoint; None if there is none.
  """
  # The step that all are to save may be before the one that this replica is at.
  step = outcome.save or outcome.global_step
  due = outcome.save or (every and outcome.committed % every == 0)
  if not due or outcome.members[:1] != (replica.replica,):
    return None
  path = pathlib.Path(folder, f"step-{step:08}")
  try:
    save(path, replica)
  except FileExistsError:
    return None  # A replica that is late may be at a step that another saved.
  return path


def latest(folder: str | os.PathLike[str]) -> pathlib.Path | None:
  """Finds the checkpoint of the latest step.

  If the replica has several processes (`initialize_processes`), all of them call
  this, and get what the first one finds: another replica may save one while they
  look, and those that restore it would wait for the others for ever.

  Args:
    folder: what holds the checkpoints, each in a folder whose name ends with its
      step, such as ``step-00000120``. It need not exist.

  Returns:
    The path of the one with the largest number; None if there is none.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as there:
    ...   for name in ("step-90", "step-120", "other"):
    ...     pathlib.Path(there, name).mkdir()
    ...   latest(there).name
    'step-120'
  """
  folder = pathlib.Path(folder)
  names = [] if not folder.is_dir() else [x.name for x in folder.iterdir()]
  matches = [m for m in map(_NAME.fullmatch, names) if m]
  name = max(matches, key=lambda m: int(m[1]))[0] if matches else ""
  name, *_ = processes.of_this_program().gather(name)
  return folder / name if name else None


def restore(
  path: str | os.PathLike[str], params: Any, opt_state: Any
) -> dict[str, Any]:
  """Reads a checkpoint written by `save`.

  Args:
    path: the folder.
    params: arrays, or `jax.ShapeDtypeStruct` with a sharding, that describe the
      result; for example the initial parameters of the model.
    opt_state: the same for the optimizer, for example `opt.init(params)`.

  Returns:
    Arguments for `join` and `run_embedded`: `params`, `opt_state` and
    `global_step`; and `progress`, if samples were leased.

  Raises:
    ModuleNotFoundError: orbax-checkpoint is not installed.
    FileNotFoundError: there is no checkpoint.

  """
  import orbax.checkpoint as ocp

  like = {"params": params, "opt_state": opt_state, "global_step": 0}
  with ocp.StandardCheckpointer() as checkpointer:
    restored = checkpointer.restore(
      os.path.abspath(path), jax.tree.map(_abstract, like)
    )
  progress = pathlib.Path(path) / _PROGRESS
  if progress.exists():
    restored["progress"] = msgspec.json.decode(
      progress.read_bytes(), type=ledger.Progress
    )
  return restored


def resume(
  folder: str | os.PathLike[str], params: Any, opt_state: Any
) -> dict[str, Any]:
  """Reads the checkpoint of the latest step, if there is one.

  Args:
    folder: what holds the checkpoints, as for `latest`.
    params: the initial parameters, which are returned if there is none.
    opt_state: the initial optimizer state, as for `restore`.

  Returns:
    Arguments for `join` and `run_embedded`, as `restore` returns them.

  Example:
    Every replica resumes, and joins with the result::

      start = checkpoint.resume("checkpoints", params, opt.init(params))
      with coordinator.join(opt, **start) as replica:
        while replica.global_step < steps and not replica.finished:
          outcome = replica.step(gradient(replica.params, next(batches)))
          checkpoint.save_if_due("checkpoints", replica, outcome, every=100)
        replica.finish()
  """
  path = latest(folder)
  if path is None:
    return {"params": params}
  return restore(path, params, opt_state)


def _abstract(leaf: Any) -> Any:
  if isinstance(leaf, jax.Array):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
  return leaf


@contextlib.contextmanager
def _durable_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Creates a folder with everything that the block writes, at the block's end.

  It appears complete or not at all, survives a power failure, and is its owner's
  alone.

  Args:
    path: the folder.

  Yields:
    A temporary path to write it to, which does not exist yet.

  Raises:
    FileExistsError: the folder exists at the end.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as there:
    ...   with _durable_folder(pathlib.Path(there, "new")) as new:
    ...     new.mkdir()
    ...     _ = (new / "file").write_text("text")
    ...   oct(pathlib.Path(there, "new", "file").stat().st_mode)[-3:]
    '600'
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  outer = pathlib.Path(
    tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)
  )
  try:
    inner = outer / path.name
    yield inner
    for at, _, files in os.walk(inner, topdown=False):
      for name in files:
        os.chmod(os.path.join(at, name), 0o600)
        _sync(os.path.join(at, name))
      os.chmod(at, 0o700)
      _sync(at)
    if path.exists():
      raise FileExistsError(f"{path} exists.")
    try:
      os.rename(inner, path)
    except OSError as error:
      # Another process may have created it just now.
      if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
        raise
      raise FileExistsError(f"{path} exists.") from error
    _sync(path.parent)
  finally:
    shutil.rmtree(outer, ignore_errors=True)


def _sync(path: str | os.PathLike[str]) -> None:
  number = os.open(path, os.O_RDONLY)
  try:
    os.fsync(number)
  finally:
    os.close(number)
