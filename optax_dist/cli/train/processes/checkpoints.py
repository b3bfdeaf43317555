"""Checkpoints of a launched training: one file for each saved step."""

from __future__ import annotations

import logging
import pathlib
import re
from typing import Any

from optax_dist._internal import durable

_log = logging.getLogger("optax_dist.cli")
_NAME = re.compile(r"step-(\d{8})\.msgpack")
_KEPT = 3


def save(folder: pathlib.Path, replica: Any) -> None:
  """Saves the state that all replicas share, unless another replica has.

  The file appears complete or not at all, even if this process is killed or the
  machine loses power, and only its owner may read it.

  Args:
    folder: folder for checkpoints; created if it is missing.
    replica: a `coordinator.Replica`.
  """
  from flax import serialization

  from optax_dist.coordinator import phases

  phases.reach("checkpointing", replica.replica)
  folder.mkdir(mode=0o700, parents=True, exist_ok=True)
  path = path_of(folder, replica.global_step)
  if path.exists():
    return
  state = {
    "params": replica.center,
    "opt_state": replica.opt_state,
    "step": replica.global_step,
  }
  durable.write(path, serialization.to_bytes(state))
  for old in steps(folder)[:-_KEPT]:
    path_of(folder, old).unlink(missing_ok=True)


def path_of(folder: pathlib.Path, step: int) -> pathlib.Path:
  """The checkpoint of a step."""
  return folder / f"step-{step:08}.msgpack"


def steps(folder: pathlib.Path) -> list[int]:
  """The steps of all checkpoints, in order."""
  if not folder.is_dir():
    return []
  found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
  return sorted(int(match[1]) for match in found if match)


def step_of(path: pathlib.Path) -> int:
  """The step of a checkpoint."""
  match = _NAME.fullmatch(path.name)
  if match is None:
    raise ValueError(f"{path} is not named as a checkpoint is.")
  return int(match[1])


def newest(folder: pathlib.Path) -> pathlib.Path | None:
  """The newest readable checkpoint; None if there is none.

  Newer ones are empty or broken, and are renamed, so that the resumed run can
  save those steps.
  """
  from flax import serialization

  for step in reversed(steps(folder)):
    path = path_of(folder, step)
    try:
      found = serialization.msgpack_restore(path.read_bytes())
      if found["step"] == step and {"params", "opt_state"} <= set(found):
        return path
      reason = "it is not of that step"
    except OSError:
      raise  # It may be intact.
    except Exception as error:
      reason = f"{type(error).__name__}: {error}"
    broken = path.with_suffix(".broken")
    path.replace(broken)
    _log.warning(
      "The checkpoint of step %d can't be read (%s); it is now %s.",
      step,
      reason,
      broken,
    )
  return None


def load(path: pathlib.Path, like: Any) -> dict[str, Any]:
  """Loads the arguments of `coordinator.join` from a checkpoint.

  Args:
    path: the file.
    like: a shared state (parameters and optimizer state) of the same structure.

  Returns:
    The arguments `params`, `opt_state` and `global_step`.
  """
  from flax import serialization

  form = {"params": like.params, "opt_state": like.opt_state, "step": 0}
  found = serialization.from_bytes(form, path.read_bytes())
  return {
    "params": found["params"],
    "opt_state": found["opt_state"],
    "global_step": found["step"],
  }
