"""Runs a room's own tests, and simulated schedules, on mutants of a module.

All that the tests import is imported once. Each mutant has a process, forked
from that, in which the code of the module's functions is replaced.
"""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import os
import pathlib
import pickle
import resource
import select
import signal
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.mutants.making import Mutant

# Processor time that a mutant may take, of what the module itself takes: one
# that takes more, for example because it loops, is found.
_TIMES, _AT_LEAST = 4, 3
_MEMORY = 6 << 30


class Found(Exception):
  """A mutant was found; the message says by what."""


def replace(module: types.ModuleType, tree: ast.Module) -> None:
  """Replaces the code of a module that others have imported from already."""
  assert module.__file__ is not None
  new = dict(vars(module))
  exec(compile(tree, module.__file__, "exec"), new)
  for name, value in new.items():
    old = vars(module).get(name)
    if isinstance(value, type) and isinstance(old, type):
      if old.__module__ == module.__name__ and old is not value:
        _replace_class(old, value)
    elif isinstance(value, types.FunctionType):
      if value.__module__ == module.__name__:
        _replace_function(old, value)
    elif isinstance(value, int | float | str | bytes | None) and value != old:
      setattr(module, name, value)


def _replace_class(old: type, new: type) -> None:
  for name, value in vars(new).items():
    was = vars(old).get(name)
    if isinstance(value, property) and isinstance(was, property):
      _replace_function(was.fget, value.fget)
    elif isinstance(value, functools.cached_property):
      _replace_function(getattr(was, "func", None), value.func)
    elif isinstance(value, classmethod | staticmethod):
      _replace_function(getattr(was, "__func__", None), value.__func__)
    else:
      _replace_function(was, value)


def _replace_function(old: Any, new: Any) -> None:
  if isinstance(old, types.FunctionType) and isinstance(
    new, types.FunctionType
  ):
    old.__code__ = new.__code__
    old.__defaults__ = new.__defaults__
    old.__kwdefaults__ = new.__kwdefaults__


class Rooms:
  """A pytest plugin: runs the collected tests once for each mutant.

  Attributes:
    results: the mutants, and by what each was found; "" if it survived.
  """

  def __init__(
    self,
    module: str,
    mutants: Sequence[Mutant],
    schedules: Callable[[], None] | None,
    say: Callable[[Mutant, str], None],
    longest: float,
  ):
    self._module, self._mutants, self._longest = module, mutants, longest
    self._schedules, self._say = schedules, say
    self._seconds = 0.0
    self._durations: dict[str, float] = {}
    self.results: list[tuple[Mutant, str]] = []

  @pytest.hookimpl(tryfirst=True)
  def pytest_runtestloop(self, session: pytest.Session) -> bool:
    module = importlib.import_module(self._module)
    by = self._one(session, lambda: None, 600)
    if by:
      raise RuntimeError(f"Without a mutant, the tests fail: {by}.")
    # Tests that take long come last.
    took = {
      item: self._durations.get(item.nodeid, 0.0) for item in session.items
    }
    session.items = [item for item in took if took[item] <= self._longest]
    session.items.sort(key=lambda item: took[item])
    limit = max(_AT_LEAST, _TIMES * self._seconds)
    for mutant in self._mutants:
      change = lambda mutant=mutant: replace(module, mutant.tree)
      by = self._one(session, change, limit)
      self.results.append((mutant, by))
      self._say(mutant, by)
    return True

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    if report.failed:
      raise Found(report.nodeid)
    if report.when == "call":
      self._durations[report.nodeid] = report.duration

  def _one(
    self, session: pytest.Session, change: Callable[[], None], limit: float
  ) -> str:
    """Returns the test or schedule that finds a change; "" if it survives."""
    reader, writer = os.pipe()
    with warnings.catch_warnings(action="ignore"):
      pid = (
        os.fork()
      )  # jax warns of its threads, which tests of rules don't use.
    if pid == 0:
      os.close(reader)
      try:
        answer = self._try(session, change, limit)
      except BaseException as error:
        answer = (f"{type(error).__name__}: {error}"[:200], 0.0, {})
      os.write(writer, pickle.dumps(answer))
      os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
      data = _read(pipe.fileno(), pid, 10 * limit)
    os.waitpid(pid, 0)
    if not data:
      return "its deadline"
    by, seconds, durations = pickle.loads(data)
    if not by:
      self._seconds, self._durations = seconds, durations
    return by

  def _try(
    self, session: pytest.Session, change: Callable[[], None], limit: float
  ) -> tuple[str, float, dict[str, float]]:
    module = importlib.import_module(self._module)
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + int(limit) + 1,) * 2)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    began = time.process_time()
    try:
      change()
      _doctests(module)
      for item, following in _pairs(session.items):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
      if self._schedules is not None:
        self._schedules()
    except Found as found:
      return str(found), 0.0, {}
    return "", time.process_time() - began, self._durations


def _doctests(module: types.ModuleType) -> None:
  # pytest would run those of the file, and not of the mutant.
  if doctest.testmod(module).failed:
    raise Found("its doctests")


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
  return zip(items, [*items[1:], None], strict=True)


def _read(descriptor: int, pid: int, limit: float) -> bytes:
  """What a process writes before it ends; it is killed after the limit."""
  data, until = b"", time.monotonic() + limit
  while True:
    ready, _, _ = select.select(
      [descriptor], [], [], max(0.0, until - time.monotonic())
    )
    if not ready:
      os.kill(pid, signal.SIGKILL)
      return b""
    more = os.read(descriptor, 1 << 16)
    if not more:
      return data
    data += more


def schedules(chosen: Mapping[str, Sequence[int]]) -> Callable[[], None]:
  """Runs the chosen schedules of each kind; raises `Found` at a violation."""
  kinds = [
    (importlib.import_module(f"tests.simulation.{name}"), name, seeds)
    for name, seeds in chosen.items()
  ]

  def run() -> None:
    for kind, name, seeds in kinds:
      for seed in seeds:
        result = kind.run(kind.schedule(seed))
        if result.violation:
          raise Found(f"schedule {seed} of {name}: {result.violation[:60]}")

  return run


def run(
  path: pathlib.Path,
  tests: Iterable[str],
  mutants: Sequence[Mutant],
  schedules: Callable[[], None] | None,
  say: Callable[[Mutant, str], None],
  longest: float,
) -> list[tuple[Mutant, str]]:
  """Tries the mutants; returns by what each was found, "" if it survived."""
  module = ".".join(path.with_suffix("").parts)
  module = module.removesuffix(".__init__")
  rooms = Rooms(module, mutants, schedules, say, longest)
  options = ["-p", "no:terminal", "-n", "0", "-p", "no:cacheprovider"]
  options += ["-o", "addopts=--import-mode=importlib"]
  code = pytest.main([*options, *tests], plugins=[rooms])
  if not rooms.results and mutants:
    sys.exit(f"The tests of {path} could not be run: {code}.")
  return rooms.results
