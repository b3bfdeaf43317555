"""Checkpoints of what all replicas share, by orbax.

Any replica can write one, for all hold the same; one is enough. It is restored
on as many replicas as one likes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from typing import Any

import jax

from optax_dist import ledger
from optax_dist._internal import durable
from optax_dist.coordinator import phases
from optax_dist.coordinator.replica import Replica

# Which samples are in committed steps, beside what orbax writes.
_PROGRESS = "progress.json"


def save(path: str | os.PathLike[str], replica: Replica) -> int:
  """Writes parameters, optimizer state and step of all replicas.

  After an `Outcome` with `save` it is the common step that is written, also by
  a replica that has gone on meanwhile. The folder appears once all of it is on
  the disk, and only its owner may read it. All processes of a replica that has
  several call it, and each writes its shards, into a folder that they share.

  Args:
    path: a folder that does not exist yet.
    replica: whose state is written; that of any other is the same.

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
  group = replica.group
  # Left in this order: it must be whole before it gets its name.
  with contextlib.ExitStack() as stack:
    new = ""
    if (group is None or not group.process) and not path.exists():
      new = str(stack.enter_context(durable.folder(path)))
    if group is not None:
      new, *_ = group.gather(new)
    if not new:
      raise FileExistsError(f"There is a checkpoint at {path} already.")
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(pathlib.Path(new), tree)
    if replica.has_data:
      # Beside it, once all of it is there.
      told = dataclasses.asdict(replica.progress_at(step))
      (pathlib.Path(new) / _PROGRESS).write_text(json.dumps(told))
  if group is not None:
    group.gather("It has its name.")
  return step


def restore(
  path: str | os.PathLike[str], params: Any, opt_state: Any
) -> dict[str, Any]:
  """Reads a checkpoint of `save`.

  Args:
    path: the folder.
    params: arrays, or `jax.ShapeDtypeStruct` with a sharding, as they are to
      be; for example those that the model is initialized with.
    opt_state: the same of the optimizer, for example `opt.init(params)`.

  Returns:
    Arguments of `join` and `run_embedded`: `params`, `opt_state` and
    `global_step`; and `progress`, if samples were leased.

  Raises:
    ModuleNotFoundError: orbax-checkpoint is not installed.
    FileNotFoundError: there is no checkpoint.

  Example:
    Every replica restores, and joins with what it has::

      found = checkpoint.restore(path, params, opt.init(params))
      with coordinator.join(opt, found.pop("params"), **found) as replica:
        ...
  """
  import orbax.checkpoint as ocp

  like = {"params": params, "opt_state": opt_state, "global_step": 0}
  with ocp.StandardCheckpointer() as checkpointer:
    found = checkpointer.restore(
      os.path.abspath(path), jax.tree.map(_abstract, like)
    )
  told = pathlib.Path(path) / _PROGRESS
  if told.exists():
    found["progress"] = _progress(json.loads(told.read_text()))
  return found


def _progress(found: dict[str, Any]) -> ledger.Progress:
  spans = lambda name: tuple((a, b) for a, b in found[name])
  return ledger.Progress(found["next"], spans("open"), spans("skipped"))


def _abstract(leaf: Any) -> Any:
  if isinstance(leaf, jax.Array):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
  return leaf
