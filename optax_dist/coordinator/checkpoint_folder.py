"""The folder of a job's checkpoints: which are complete, of which run, and pruned.

    step-00000060/          a checkpoint, which appears whole or not at all
      checkpoint.json       its description (`About`)
    .step-00000080.x1y2/    a checkpoint being written, or whose writer was killed
    left/RUN/step-00000070  a checkpoint of another line of runs, moved here

A run may go back to an earlier checkpoint and continue from there, or begin anew. Then
later checkpoints of other runs are not of its line: they may have other parameters at
the same step. So a checkpoint names its run and the runs before it, and `latest` and
pruning stay on one line.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import msgspec

from optax_dist.coordinator._internal import locks
from optax_dist.coordinator._internal.files import sync
from optax_dist.coordinator.protocol.codec import Natural
from optax_dist.coordinator.protocol.entries import Lineage

_log = logging.getLogger("optax_dist.coordinator")

_ABOUT = "checkpoint.json"
_NAME = re.compile(r"step-(\d+)")
# In each folder that is being written: locked by the writer while it lives.
_WRITER = ".writer"
_UNDER_WAY = re.compile(r"\.(.+)\.[^.]+")
_LEFT = "left"
# A process holds this lock while it renames or removes something in the folder. It
# writes no checkpoint meanwhile, so the lock is free soon.
_LOCK, _LOCK_SECONDS = ".lock", 30.0
# Errors of a file that is not there, or is no file.
_GONE = errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ESTALE


class About(msgspec.Struct, frozen=True):
  """The description of a checkpoint.

  Attributes:
    run: the run that saved it (`Replica.run_id`).
    step: its step.
    lineage: the runs before that run (`Replica.lineage`).
    number: higher than that of each checkpoint in the folder when it was saved.
    files: the size of each file, by its path.
    arrays: shape and dtype of each array, by its path.
  """

  run: str
  step: Natural
  lineage: Lineage = ()
  number: Natural = 0
  files: dict[str, Natural] = {}
  arrays: dict[str, tuple[tuple[Natural, ...], str]] = {}

  @property
  def line(self) -> Lineage:
    """The lineage of a run that continues from this checkpoint."""
    return (*self.lineage, (self.run, self.step))

  def comes_from(self, other: About) -> bool:
    """Whether another checkpoint is of this run, or of a run that it continues."""
    return other.run == self.run or any(
      other.run == run and other.step <= last for run, last in self.lineage
    )


def read(path: pathlib.Path) -> About:
  """The description of a complete checkpoint.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is not complete, or is no checkpoint.
  """
  if not path.exists():
    raise FileNotFoundError(f"There is no checkpoint at {path}.")
  about = parse(path / _ABOUT, About)
  for name, size in about.files.items():
    file = path / name
    if not file.is_file() or file.stat().st_size != size:
      raise ValueError(
        f"The checkpoint {path} is not complete: {name} must have {size} bytes."
        " Was it copied in part?"
      )
  return about


def parse(path: pathlib.Path, kind: Any) -> Any:
  """Reads a file of JSON in a checkpoint.

  Args:
    path: the file.
    kind: what it must be.

  Raises:
    ValueError: it is something else, or can't be read.
  """
  try:
    return msgspec.json.decode(path.read_bytes(), type=kind)
  except OSError as error:
    if error.errno not in _GONE:
      raise  # The file may exist, and be readable for other users.
    raise ValueError(
      f"{path.parent} is no complete checkpoint: its {path.name} can't be read:"
      f" {error.strerror}."
    ) from None
  except msgspec.DecodeError as error:
    raise ValueError(
      f"{path} is not what was saved: {error}. Take another checkpoint."
    ) from None


def latest(folder: pathlib.Path) -> pathlib.Path | None:
  """The latest complete checkpoint of the run that saved last."""
  checkpoints = _all(folder)
  while checkpoints:
    run = max(checkpoints.values(), key=lambda about: about.number).run
    line = [path for path in checkpoints if checkpoints[path].run == run]
    path = max(line, key=lambda path: checkpoints[path].step)
    del checkpoints[path]
    try:
      read(path)
    except (ValueError, FileNotFoundError) as error:
      if path.exists():  # It was not pruned by another replica since.
        _log.warning("%s The one before it is taken.", error)
    else:
      return path
  return None


def has(path: pathlib.Path, about: About) -> bool:
  """Whether this checkpoint exists, or is being written."""
  with contextlib.suppress(ValueError, FileNotFoundError):
    return about.comes_from(read(path))
  return any(
    name == path.name and not _is_dead(other)
    for other, name in _under_way(path.parent)
  )


@contextlib.contextmanager
def new(
  path: pathlib.Path,
  about: About,
  *,
  replaces: bool = False,
  keep: int | None = None,
) -> Iterator[pathlib.Path]:
  """Creates a checkpoint with everything that the block writes, at its end.

  It appears complete or not at all, survives a power failure, and is its owner's
  alone. Unfinished checkpoints of killed processes are removed.

  Args:
    path: its folder.
    about: its description, without `number` and `files`.
    replaces: whether checkpoints beside it that are not of its line are moved out
      of the way.
    keep: how many checkpoints of its line to keep; None for all.

  Yields:
    A temporary path to write it to, which does not exist yet.

  Raises:
    FileExistsError: the folder exists at the end.
    NotADirectoryError: the parent of `path` is no folder.
    RuntimeError: another run has moved this run's checkpoints out of the way.
    TimeoutError: another process does not free the folder's lock.

  Example:
    >>> there = pathlib.Path(tempfile.mkdtemp())
    >>> for step in (90, 120):
    ...   with new(there / f"step-{step}", About("a run", step), keep=1) as path:
    ...     path.mkdir()
    ...     _ = (path / "file").write_text("text")
    >>> [path.name for path in there.iterdir()]
    ['step-120']
  """
  folder = path.parent
  _contents(folder)
  folder.mkdir(parents=True, exist_ok=True)
  with contextlib.ExitStack() as stack:
    with _alone(folder):
      if replaces:
        _check_place(folder, about.run)
      dead = [
        other
        for other, name in _under_way(folder)
        if (_NAME.fullmatch(name) or name == path.name) and _is_dead(other)
      ]
      outer = pathlib.Path(
        tempfile.mkdtemp(prefix=f".{path.name}.", dir=folder)
      )
      stack.callback(shutil.rmtree, outer, ignore_errors=True)
      stack.enter_context(locks.Lock(outer / _WRITER))
    for other in dead:
      shutil.rmtree(other, ignore_errors=True)
    inner = outer / path.name
    yield inner
    files = _make_durable(inner)
    with _alone(folder):
      others = _all(folder)
      number = 1 + max((a.number for a in others.values()), default=0)
      about = msgspec.structs.replace(about, number=number, files=files)
      written = inner / _ABOUT
      written.write_bytes(msgspec.json.encode(about))
      written.chmod(0o600)
      sync(written)
      sync(inner)
      if replaces:
        _check_place(folder, about.run)
        _move_away(path, about, others)
      if path.exists():
        raise FileExistsError(f"{path} exists.")
      os.rename(inner, path)
      sync(folder)
      gone = _pruned(folder, about, keep)
      for old in gone:
        os.rename(old, outer / old.name)


def _all(folder: pathlib.Path) -> dict[pathlib.Path, About]:
  """All folders with a checkpoint's name and description; some may be incomplete."""
  checkpoints = {}
  for path in _contents(folder):
    named = _NAME.fullmatch(path.name)
    if named:
      with contextlib.suppress(ValueError):
        about = parse(path / _ABOUT, About)
        if about.step == int(named[1]):
          checkpoints[path] = about
  return checkpoints


def _contents(folder: pathlib.Path) -> list[pathlib.Path]:
  """The contents of a folder; nothing if the folder does not exist.

  Raises:
    NotADirectoryError: the path is no folder, or a broken link: the checkpoints may be
      on a file system that is not mounted.
  """
  try:
    return sorted(folder.iterdir())
  except (FileNotFoundError, NotADirectoryError):
    for path in (folder, *folder.parents):
      if os.path.lexists(path) and not path.is_dir():
        raise NotADirectoryError(
          f"{folder} can't hold checkpoints: {path} is no folder, nor a link to one."
          " Is a file system not mounted?"
        ) from None
    return []


def _under_way(folder: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
  """Unfinished checkpoints, each with the name that it will have once complete."""
  paths = []
  for path in _contents(folder):
    named = _UNDER_WAY.fullmatch(path.name)
    if named and path.is_dir():
      paths.append((path, named[1]))
  return paths


def _is_dead(path: pathlib.Path) -> bool:
  """Whether the writer of an unfinished checkpoint has ended."""
  try:
    locks.Lock(path / _WRITER).release()
  except locks.Held:
    return False
  except OSError:
    return not path.exists()
  return True


@contextlib.contextmanager
def _alone(folder: pathlib.Path) -> Iterator[None]:
  try:
    lock = locks.Lock(folder / _LOCK, _LOCK_SECONDS, if_in_doubt=True)
  except locks.Held as error:
    raise TimeoutError(
      f"{error.holder} has held {folder / _LOCK} for {_LOCK_SECONDS:g} s, and nobody"
      " else can save a checkpoint there. If it has ended, delete that file."
    ) from None
  with lock:
    yield


def _check_place(folder: pathlib.Path, run: str) -> None:
  if (folder / _LEFT / run).exists():
    raise RuntimeError(
      f"Another run saves its checkpoints to {folder}, too, and has moved those"
      f" of this one to {folder / _LEFT / run}. Give each run a folder of its own."
    )


def _move_away(
  path: pathlib.Path, about: About, others: dict[pathlib.Path, About]
) -> None:
  """Moves checkpoints that are not of this line out of the way."""
  moved = [other for other in others if not about.comes_from(others[other])]
  if path.exists() and path not in others:
    moved.append(path)
  for old in moved:
    run = others[old].run if old in others else "unknown"
    to = path.parent / _LEFT / run
    to.mkdir(parents=True, exist_ok=True)
    name, count = old.name, 1
    while (to / name).exists():
      name, count = f"{old.name}.{count}", count + 1
    os.rename(old, to / name)
  if moved:
    names = ", ".join(old.name for old in moved)
    _log.warning(
      "This run does not come from these checkpoints, which were moved to %s: %s.",
      *(path.parent / _LEFT, names),
    )


def _pruned(
  folder: pathlib.Path, about: About, keep: int | None
) -> list[pathlib.Path]:
  """The checkpoints of a line to prune, if enough complete ones are left."""
  checkpoints = _all(folder)
  line = [p for p in checkpoints if about.comes_from(checkpoints[p])]
  line.sort(key=lambda path: -checkpoints[path].step)
  whole = 0
  for index, path in enumerate(line):
    if whole == keep:
      return line[index:]
    with contextlib.suppress(ValueError, FileNotFoundError):
      read(path)
      whole += 1
  return []


def _make_durable(path: pathlib.Path) -> dict[str, int]:
  """Returns the size of each file, by its path."""
  sizes = {}
  for at, _, names in os.walk(path, topdown=False):
    for name in names:
      file = pathlib.Path(at, name)
      file.chmod(0o600)
      sync(file)
      sizes[str(file.relative_to(path))] = file.stat().st_size
    os.chmod(at, 0o700)
    sync(at)
  return sizes
