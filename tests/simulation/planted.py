"""Plants faults into the protocol, which the simulation must find.

Each is a change of a few words in the source of the core (or of the world, for
what drivers owe it), made while schedules run and taken back afterwards. A text
that isn't there any more is an error, so the list can't rot unnoticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from tests.simulation import faults, moments

# By name, the seed that found each when `--planted all` ran last.
_SEEDS = pathlib.Path(__file__).parent / "testdata" / "planted_seeds.json"
_PACKAGE = "optax_dist.coordinator.protocol"
# Rooms of their own, below the protocol.
_RULES = ("quorum.", "ledger.")
_PACKAGES = {
  "submission": "optax_dist.coordinator.training.submission",
  "speaker": "optax_dist.coordinator.extras.groups.speaker",
  "rounds": "optax_dist.coordinator.extras.decoupled_diloco.rounds",
  "world": "tests.simulation.world",
}


@dataclasses.dataclass(frozen=True)
class Planted:
  """A fault.

  Attributes:
    name: in a few words.
    changes: module, the text there, and what stands there instead.
    kind: the schedules that find it.
    aimed: whether these are those that aim at a moment.
  """

  name: str
  changes: tuple[tuple[str, str, str], ...]
  kind: Any = faults
  aimed: bool = False


def _patched(source: str, changes: list[tuple[str, str]], where: str) -> str:
  for old, new in changes:
    if source.count(old) != 1:
      raise ValueError(
        f"{where} has {source.count(old)} times the text {old!r}: bring the "
        "planted fault up to date."
      )
    source = source.replace(old, new)
  return source


@contextlib.contextmanager
def plant(fault: Planted) -> Iterator[None]:
  """Has the fault in the protocol for as long as the context lasts."""
  by_module: dict[str, list[tuple[str, str]]] = {}
  for name, old, new in fault.changes:
    by_module.setdefault(name, []).append((old, new))
  undo = []
  for name, changes in by_module.items():
    package = _PACKAGES.get(name, f"{_PACKAGE}.{name}")
    if name.startswith(_RULES):
      package = f"optax_dist.{name}"
    module = importlib.import_module(package)
    source = _patched(inspect.getsource(module), changes, name)
    namespace: dict[str, object] = dict(vars(module))
    exec(compile(source, f"<{fault.name}>", "exec"), namespace)
    for key, new in namespace.items():
      old = vars(module).get(key)
      if getattr(old, "__module__", "") != module.__name__ or new is old:
        continue
      pairs = [(old, new)]
      if inspect.isclass(old) and inspect.isclass(new):
        pairs = [(vars(old).get(name), f) for name, f in vars(new).items()]
      for before, after in pairs:
        if isinstance(before, property) and isinstance(after, property):
          before, after = before.fget, after.fget
        if inspect.isfunction(before) and inspect.isfunction(after):
          undo.append((before, before.__code__))
          before.__code__ = after.__code__
  try:
    yield
  finally:
    for before, code in undo:
      before.__code__ = code


def recorded_seeds() -> dict[str, int]:
  """The seed that found each fault last, by name."""
  return json.loads(_SEEDS.read_text())


def record_seeds(seeds: dict[str, int]) -> None:
  """Has later searches begin with these seeds."""
  _SEEDS.write_text(json.dumps(seeds, indent=1, sort_keys=True) + "\n")


def find(fault: Planted, most: int) -> faults.Result | None:
  """A schedule that finds the fault, of so many; None if none of them does.

  The one that found it last runs first: the others only after a change of the
  core, by which it may no longer get to the fault.
  """
  seeds: Iterable[int] = range(most)
  if fault.aimed:
    aims = (seed for seed in itertools.count() if moments.is_aimed(seed))
    seeds = itertools.islice(aims, most)
  recorded = recorded_seeds().get(fault.name)
  first = () if recorded is None else (recorded,)
  with plant(fault):
    for seed in itertools.chain(first, seeds):
      result = fault.kind.run(fault.kind.schedule(seed))
      if result.violation:
        return result
  return None
