"""Checkpoints of the state that all replicas share, written with orbax.

Any replica can write one, since all hold the same state; one is enough. It can
be restored on any number of replicas.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from typing import Any

import jax
import msgspec
import numpy as np

from optax_dist import ledger
from optax_dist._internal import checks
from optax_dist.coordinator import checkpoint_folder, phases
from optax_dist.coordinator.replica import Outcome, Replica
from optax_dist.coordinator.runtime import processes, trees

# Which samples are in committed steps, stored beside the files orbax writes.
_PROGRESS = "progress.json"


def save(path: str | os.PathLike[str], replica: Replica) -> int:
  """Writes the parameters, optimizer state and step that all replicas share.

  With a strategy that trains locally, also the state of this replica's own
  optimizer at its last exchange, from which any number of replicas can resume.

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
  return _save(pathlib.Path(os.path.abspath(path)), replica)


def _save(path: pathlib.Path, replica: Replica, **line: Any) -> int:
  """Saves, with options of `checkpoint_folder.new`."""
  import orbax.checkpoint as ocp

  shared, step = replica.state_to_save()
  phases.reach("checkpointing", replica.replica)
  tree = {
    "params": shared.params,
    "opt_state": shared.opt_state,
    "global_step": step,
  }
  inner = trees.leaves_of(replica.inner_state)
  if inner:
    tree["inner_state"] = inner
  first = replica.processes.index == 0
  taken: FileExistsError | None = None
  try:
    # The contexts exit in this order: the folder must be complete before it is
    # renamed.
    with contextlib.ExitStack() as stack:
      new = ""
      if first and (line or not path.exists()):
        about = checkpoint_folder.About(replica.run_id, step, replica.lineage)
        folder = checkpoint_folder.new(path, about, **line)
        new = str(stack.enter_context(folder))
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
  keep: int | None = None,
) -> pathlib.Path | None:
  """Saves every so many steps, and when all are to save; call it after a step.

  One replica of those that took the step saves, since all hold the same. What it
  saves is the state of its parameters, which may be some steps newer. A replica
  that leaves the run there (SIGTERM, Ctrl-C) saves the step that it has come to,
  too, unless another one has.

  The checkpoints of the folder are those of one line: of this run, and up to where
  it went on from them, of the runs before it. Checkpoints of other runs are moved
  to ``left`` in it, with a warning. That holds for a run that began anew, and for
  later steps of one that this run went back behind.

  Args:
    folder: what holds the checkpoints, each in a folder ``step-...`` of it.
    replica: this replica.
    outcome: what `Replica.step` returned.
    every: steps between checkpoints; 0 for none but those that are asked for
      (`Outcome.save`).
    keep: how many checkpoints to keep, of the latest steps; older ones are
      deleted. None for all. With 2 or more, none disappears while a replica that
      has just started reads it.

  Returns:
    The path of the new checkpoint; None if there is none.

  Raises:
    ModuleNotFoundError: orbax-checkpoint is not installed.
    RuntimeError: another run has begun to save to this folder.
  """
  if keep is not None:
    keep = checks.count("keep", keep)
  every = checks.count("every", every, least=0)
  first = outcome.members[:1] == (replica.replica,)
  lineage = replica.lineage
  if first and (outcome.save or (every and outcome.committed % every == 0)):
    # The step that all are to save may be before the one that this replica is at.
    step = outcome.save or outcome.global_step
  elif every and outcome.finished and replica.has_left:
    step = replica.global_step
    if step <= (lineage[-1][1] if lineage else 0):
      return None  # It has taken no step.
  else:
    return None
  path = pathlib.Path(os.path.abspath(folder), f"step-{step:08}")
  about = checkpoint_folder.About(replica.run_id, step, lineage)
  there = "there" if checkpoint_folder.has(path, about) else ""
  if replica.processes.gather(there)[0]:
    return None  # A replica that is late may be at a step that another saved.
  try:
    _save(path, replica, replaces=True, keep=keep)
  except FileExistsError:
    return None
  return pathlib.Path(folder, path.name)


def latest(folder: str | os.PathLike[str]) -> pathlib.Path | None:
  """Finds the checkpoint of the latest step.

  Only complete checkpoints count, whose names are theirs. If there are some of
  several runs, it is the latest step of the run that has saved last.

  If the replica has several processes (`initialize_processes`), all of them call
  this, and get what the first one finds: another replica may save one while they
  look, and those that restore it would wait for the others for ever.

  Args:
    folder: what holds the checkpoints, each in a folder ``step-...`` with its step,
      such as ``step-00000120``. It need not exist.

  Returns:
    Its path; None if there is none.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as there:
    ...   pathlib.Path(there, "step-00000120").mkdir()  # There is nothing in it.
    ...   latest(there)
  """
  folder = pathlib.Path(folder)
  newest = checkpoint_folder.latest(folder)
  name, *_ = processes.of_this_program().gather(newest.name if newest else "")
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
    Arguments for `join` and `run_embedded`: `params`, `opt_state`, `global_step`
    and `lineage`; `inner_state`, its leaves, if replicas have an optimizer of their
    own; and `progress`, if samples were leased.

  Raises:
    ModuleNotFoundError: orbax-checkpoint is not installed.
    FileNotFoundError: there is no checkpoint.
    ValueError: it is not complete, or a file of it is not what was saved.
  """
  import orbax.checkpoint as ocp

  done = _progress(pathlib.Path(path, _PROGRESS))
  about = checkpoint_folder.read(pathlib.Path(path))

  like = {"params": params, "opt_state": opt_state, "global_step": 0}
  path = pathlib.Path(os.path.abspath(path))
  with ocp.StandardCheckpointer() as checkpointer:
    held = checkpointer.metadata(path).item_metadata
    if held is not None and "inner_state" in held:
      # `join` knows its structure, and where to put it.
      like["inner_state"] = [
        np.empty(x.shape, x.dtype) for x in held["inner_state"]
      ]
    restored = checkpointer.restore(path, jax.tree.map(_abstract, like))
  restored["lineage"] = about.line
  if done is not None:
    restored["progress"] = done
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
  while (path := latest(folder)) is not None:
    try:
      return restore(path, params, opt_state)
    except (OSError, ValueError):
      # Newer ones may have taken its place meanwhile.
      if path.exists() or processes.of_this_program().count > 1:
        raise
  return {"params": params}


def _progress(path: pathlib.Path) -> ledger.Progress | None:
  if not path.exists():
    return None
  progress: ledger.Progress = checkpoint_folder.parse(path, ledger.Progress)
  try:
    progress.check()
  except ValueError as error:
    raise ValueError(f"{path} is not what was saved: {error}") from None
  return progress


def _abstract(leaf: Any) -> Any:
  if isinstance(leaf, jax.Array):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
  return leaf
