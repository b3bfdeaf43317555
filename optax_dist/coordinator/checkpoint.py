"""Checkpoints of the state that all replicas share, written with orbax.

Any replica can write one, since all hold the same state; one is enough. It can
be restored on any number of replicas.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from optax_dist import ledger
from optax_dist._internal import checks
from optax_dist.coordinator import checkpoint_folder
from optax_dist.coordinator._internal import phases
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
  checks.path("path", path)
  return _save(pathlib.Path(os.path.abspath(path)), replica)


def _save(path: pathlib.Path, replica: Replica, **line: Any) -> int:
  """Saves, with options of `checkpoint_folder.new`."""
  _check_replica(replica)
  shared, step = replica.state_to_save()
  phases.reach("checkpointing", replica.replica)
  arrays = _arrays(
    params=shared.params,
    opt_state=shared.opt_state,
    inner_state=trees.leaves_of(replica.inner_state),
  )
  first = replica.processes.index == 0
  taken: FileExistsError | None = None
  try:
    # The contexts exit in this order: the folder must be complete before it is
    # renamed.
    with contextlib.ExitStack() as stack:
      new = ""
      if first and (line or not path.exists()):
        about = checkpoint_folder.About(
          replica.run_id,
          step,
          replica.lineage,
          arrays={name: _kind(leaf) for name, leaf in arrays.items()},
        )
        folder = checkpoint_folder.new(path, about, **line)
        new = str(stack.enter_context(folder))
      new, *_ = replica.processes.gather(new)
      if not new:
        raise FileExistsError(path)
      _write(pathlib.Path(new), arrays)
      if replica.has_data:
        # All processes ask for the progress, as they must make the same calls. It is
        # written last, once everything else is there.
        progress = msgspec.json.encode(replica.progress_at(step))
        if first:
          (pathlib.Path(new) / _PROGRESS).write_bytes(progress)
  except FileExistsError as error:
    taken = error
  except OSError as error:
    if error.filename or not error.errno:
      raise
    # The error of a full disk names no path, so it is added.
    raise OSError(error.errno, error.strerror, str(path)) from error
  # The processes wait until the first one has renamed the folder, or has found
  # that another replica was faster.
  if "taken" in replica.processes.gather("taken" if taken else ""):
    raise FileExistsError(
      f"There is a checkpoint at {path} already."
    ) from taken
  return step


def _write(path: pathlib.Path, arrays: Mapping[str, Any]) -> None:
  """Writes arrays with orbax; whatever its error is, it names the path."""
  import orbax.checkpoint as ocp

  try:
    with ocp.StandardCheckpointer() as checkpointer:
      # orbax writes no arrays without numbers.
      filled = {name: leaf for name, leaf in arrays.items() if np.size(leaf)}
      checkpointer.save(path, filled)
  except ValueError as error:  # As on a full disk.
    raise OSError(f"{path} can't be written: {error}") from error


def save_if_due(
  folder: str | os.PathLike[str],
  replica: Replica,
  outcome: Outcome,
  every: int,
  keep: int | None = None,
) -> pathlib.Path | None:
  """Saves every so many steps, when all are to save, and the last step.

  Call it after each step, and with the outcome of `Replica.finish`. One replica of
  those that took the step saves, since all hold the same. What it saves is the
  state of its parameters, which may be some steps newer. A replica for which the
  run ends there, or that leaves it (SIGTERM, Ctrl-C), saves the step that it has
  come to, unless another one has.

  The checkpoints of the folder are those of one line: of this run, and up to where
  it went on from them, of the runs before it. Checkpoints of other runs are moved
  to ``left`` in it, with a warning. That holds for a run that began anew, and for
  later steps of one that this run went back behind.

  Args:
    folder: what holds the checkpoints, each in a folder ``step-...`` of it.
    replica: this replica.
    outcome: what `Replica.step` or `Replica.finish` returned.
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
    OSError: the checkpoint can't be written.
  """
  checks.path("folder", folder)
  _check_replica(replica)
  checks.kind("outcome", outcome, Outcome, "what Replica.step returns")
  if keep is not None:
    keep = checks.count("keep", keep)
  every = checks.count("every", every, least=0)
  first = outcome.members[:1] == (replica.replica,)
  due = outcome.save or (every and outcome.committed % every == 0)
  if not ((first and due) or (every and outcome.finished)):
    return None
  # The step that all are to save may be before the one that this replica is at.
  _, step = replica.state_to_save()
  lineage = replica.lineage
  if step <= (lineage[-1][1] if lineage else 0):
    return None  # The run has taken no step.
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

  Raises:
    OSError: the folder or what is in it can't be read.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as there:
    ...   pathlib.Path(there, "step-00000120").mkdir()  # There is nothing in it.
    ...   latest(there)
  """
  checks.path("folder", folder)
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
    opt_state: the same for the optimizer, for example `opt.init(params)`. With a
      strategy that trains locally, for what all replicas share of it:
      `outer_optimizer.init(params)`, or ``()`` with elastic averaging.

  Returns:
    Arguments for `join` and `run_embedded`: `params`, `opt_state`, `global_step`
    and `lineage`; `inner_state`, its leaves, if replicas have an optimizer of their
    own; and `progress`, if samples were leased.

  Raises:
    ModuleNotFoundError: orbax-checkpoint is not installed.
    FileNotFoundError: there is no checkpoint.
    ValueError: it is not complete, or one of its files was changed since it was saved;
      or it is of other parameters or another optimizer.
  """
  import orbax.checkpoint as ocp

  checks.path("path", path)
  path = pathlib.Path(os.path.abspath(path))
  done = _progress(path / _PROGRESS)
  about = checkpoint_folder.read(path)
  like = _arrays(params=params, opt_state=opt_state)
  # `join` knows its structure, and where to put it.
  inner = [name for name in about.arrays if name.startswith("inner_state")]
  like |= {name: np.empty(*about.arrays[name]) for name in inner}
  _check(path, about.arrays, like)
  read = {
    name: _abstract(leaf, about.arrays[name][1]) for name, leaf in like.items()
  }
  with ocp.StandardCheckpointer() as checkpointer:
    filled = {name: leaf for name, leaf in read.items() if leaf.size}
    arrays = checkpointer.restore(path, filled)
  arrays |= {
    name: np.zeros(leaf.shape, leaf.dtype)
    for name, leaf in read.items()
    if not leaf.size
  }
  leaves = iter([arrays[name] for name in like])
  restored = {"global_step": about.step, "lineage": about.line}
  parts = {"params": params, "opt_state": opt_state}
  if inner:
    parts["inner_state"] = inner
  for name, part in parts.items():
    restored[name] = jax.tree.map(lambda _: next(leaves), part)
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
        checkpoint.save_if_due("checkpoints", replica, replica.finish(), every=100)
  """
  while (path := latest(folder)) is not None:
    try:
      return restore(path, params, opt_state)
    except (OSError, ValueError):
      # Another replica may have pruned it since, after it saved newer checkpoints.
      if path.exists() or processes.of_this_program().count > 1:
        raise
  return {"params": params}


def _check_replica(replica: Any) -> None:
  if not hasattr(replica, "run_id"):
    raise ValueError(f"`replica` must be a Replica, got {replica!r:.100}.")


def _progress(path: pathlib.Path) -> ledger.Progress | None:
  if not path.exists():
    return None
  progress: ledger.Progress = checkpoint_folder.parse(path, ledger.Progress)
  try:
    progress.check()
  except ValueError as error:
    raise ValueError(f"{path} is not what was saved: {error}") from None
  return progress


def _arrays(**parts: Any) -> dict[str, Any]:
  """The arrays of a checkpoint, by their path."""
  return {
    f"{name}{jax.tree_util.keystr(path)}": leaf
    for name, part in parts.items()
    for path, leaf in jax.tree_util.tree_leaves_with_path(part)
  }


def _kind(leaf: Any) -> tuple[tuple[int, ...], str]:
  """Shape and dtype of an array; the type of anything else."""
  if hasattr(leaf, "dtype"):
    return np.shape(leaf), str(leaf.dtype)
  if isinstance(leaf, int | float | complex):
    return (), str(jnp.result_type(leaf))
  return (), type(leaf).__name__


def _check(
  path: pathlib.Path,
  saved: Mapping[str, tuple[tuple[int, ...], str]],
  like: Mapping[str, Any],
) -> None:
  """Refuses a checkpoint of other parameters, or of another optimizer."""
  for name in [*like, *saved]:
    wanted = _kind(like[name]) if name in like else None
    found = saved.get(name)
    same = wanted == found
    if wanted and found and not name.startswith("params"):
      same = wanted[0] == found[0]  # `init` may return another dtype.
    if not same:
      shown = [
        f"{kind[1]}{list(kind[0])}" if kind else "none"
        for kind in (found, wanted)
      ]
      raise ValueError(
        f"The checkpoint {path} is of another model or optimizer: {name} is"
        f" {shown[0]} there, and {shown[1]} here. Restore it with those it was"
        " saved with. Where each replica trains locally, `opt_state` is what all share"
        " (docs/coordinator.md, Each replica's own state)."
      )


def _abstract(leaf: Any, dtype: str) -> Any:
  """A description of an array for orbax to read, with the dtype that was saved."""
  if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
    return np.empty(np.shape(leaf), jnp.dtype(dtype))
  kind = leaf.dtype if str(leaf.dtype) == dtype else jnp.dtype(dtype)
  return jax.ShapeDtypeStruct(leaf.shape, kind, sharding=leaf.sharding)
