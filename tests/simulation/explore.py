"""Every interleaving of a small run, breadth first, with no clock at all.

Where `faults` draws one order of events, here each event that could be next is
taken in turn: a message of any connection, a request at the store, its answer, a
gradient that is ready. Time passes only when nothing else can happen. Within
each space there may be one kill, one stop (others find the process silent, and
it may go on at any time) and one answer of the store that is lost.

The leader's sign of life in the store is read and written at once: it is a
hint, and decides nothing. States are compared by value, so that orders which
lead to the same one are followed once.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import io
import math
import pickle
import types
import zlib
from typing import Any

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol.log import LEADER_KEY
from tests.simulation import world as worlds
from tests.simulation.invariants import Checker, Violation


@dataclasses.dataclass(frozen=True)
class Space:
  """A small run and what may go wrong in it.

  Attributes:
    name: in a few words.
    setting: of the run.
    kills: how many processes may be killed.
    stops: how many may be stopped, and go on.
    losses: how many answers of the store may be lost.
    warm: whether it begins with all replicas at work, instead of with their start.
  """

  name: str
  setting: worlds.Setting
  kills: int = 1
  stops: int = 1
  losses: int = 1
  warm: bool = True


def _setting(replicas: int, inline: bool, steps: int = 2) -> worlds.Setting:
  return worlds.Setting(
    replicas=replicas,
    needed=replicas,
    inline=inline,
    lower_on_loss=True,
    steps=steps,
  )


def _spaces() -> tuple[Space, ...]:
  found = [
    Space("2 replicas start and end", _setting(2, True, 0), 0, 0, 0, False),
    Space(
      "2 replicas start and end, a kill", _setting(2, True, 0), 1, 0, 0, False
    ),
    Space(
      "2 replicas start and end, a lost answer",
      _setting(2, True, 0),
      0,
      0,
      1,
      False,
    ),
  ]
  for replicas in (2, 3):
    for inline in (True, False):
      for name, budget in (
        ("nothing goes wrong", (0, 0, 0)),
        ("a kill", (1, 0, 0)),
        ("a stop", (0, 1, 0)),
        ("a lost answer", (0, 0, 1)),
        ("a kill, a stop and a lost answer", (1, 1, 1)),
      ):
        how = "sent inline" if inline else "exchanged"
        text = f"{replicas} replicas, 2 steps {how}, {name}"
        found.append(Space(text, _setting(replicas, inline), *budget))
  return tuple(found)


SPACES = _spaces()


class _NoChance:
  """Draws the same number always: nothing here is left to chance."""

  def random(self) -> float:
    return 0.5


class _World(worlds.World):
  """A world whose events wait in queues to be chosen, instead of for a time."""

  def __init__(self, space: Space):
    self.queues: dict[tuple[Any, ...], list[tuple[str, tuple[Any, ...]]]] = {}
    self.stopped: set[str] = set()
    self.left = [space.kills, space.stops, space.losses]
    super().__init__(space.setting, 0)
    self.random = _NoChance()  # type: ignore[assignment]

  # What `World` would do at a time waits in a queue of its own, in order.

  def at(self, time: float, action: Any, *args: Any) -> None:
    name = action.__name__
    match name:
      case "deliver" | "accept":
        key: tuple[Any, ...] = ("net", args[1].name, args[2].name)
      case "lose":
        connection, end = args[0], args[1]
        key = ("net", connection.other(end).name, end.name)
      case "store_acts":
        key = ("store", args[0].name)
      case "input" if isinstance(args[1], ins.PutAnswered | ins.GetAnswered):
        key = ("answer", args[0].name)
      case "input":
        key = ("local", args[0].name)
      case "computed":
        key = ("compute", args[0].name)
      case "next_gradient" | "go_on_later" | "quit":
        key = ("local", args[0].name)
      case "store_deletes":
        key = ("deletes",)
      case "ring":
        return
      case "check_moves" | "fetch_times_out" | "snapshot" | "silent":
        key = ("slow", name)
      case "cut_silent" | "resume" | "store_unknown":
        return
      case _:
        raise AssertionError(name)
    self.queues.setdefault(key, []).append((name, args))

  def delay(self, mean: float) -> float:
    return 0.0

  def request(self, process: worlds.Process, effect: Any) -> None:
    if effect.key != LEADER_KEY:
      super().request(process, effect)
      return
    if isinstance(effect, fx.Put):
      self.store[effect.key] = effect.value
      answer: ins.Input = ins.PutAnswered(effect.request, "done")
    else:
      value = self.store.get(effect.key)
      answer = ins.GetAnswered(effect.request, True, value)
    key = ("local", process.name)
    self.queues.setdefault(key, []).append(("input", (process, answer)))

  def choices(self) -> list[tuple[Any, ...]]:
    """What may happen next."""
    found: list[tuple[Any, ...]] = []
    local = [k for k in self.queues if k[0] == "local"]
    for key in local:
      # Nobody can tell when a process does what concerns only itself.
      if key[1] not in self.stopped:
        return [("take", key)]
    for key, items in self.queues.items():
      if not items or key[0] == "slow":
        continue
      if key[-1] in self.stopped and key[0] != "store":
        continue
      found.append(("take", key))
      if key[0] == "answer" and self.left[2]:
        found.append(("lose answer", key))
    if not found:
      if any(k[0] == "slow" for k in self.queues):
        found += [("take", k) for k in self.queues if k[0] == "slow"][:1]
      elif any(
        p.alive and not p.over and p.name not in self.stopped for p in self.all
      ):
        found.append(("time",))
    running = [p for p in self.all if p.alive and not p.over]
    for process in running:
      if self.left[0]:
        found.append(("kill", process.name))
      if self.left[1] and process.name not in self.stopped:
        found.append(("stop", process.name))
    found += [("go on", name) for name in sorted(self.stopped)]
    return found

  def take(self, choice: tuple[Any, ...]) -> None:
    """Lets it happen."""
    match choice:
      case ("take", key):
        items = self.queues[key]
        name, args = items.pop(0)
        if not items:
          del self.queues[key]
        getattr(self, name)(*args)
      case ("lose answer", key):
        self.left[2] -= 1
        items = self.queues[key]
        _, (process, answer) = items.pop(0)
        if not items:
          del self.queues[key]
        lost: ins.Input = ins.PutAnswered(answer.request, "unknown")
        if isinstance(answer, ins.GetAnswered):
          lost = ins.GetAnswered(answer.request, False, None)
        self.input(process, lost)
      case ("kill", name):
        self.left[0] -= 1
        process = self.by_name[name]
        self.kill(process)
        self.stopped.discard(name)
        for key in [k for k in self.queues if k[0] != "net"]:
          if key[-1] == name and key[0] != "store":
            del self.queues[key]
      case ("stop", name):
        self.left[1] -= 1
        self.stopped.add(name)
        self.silent(self.by_name[name])
      case ("go on", name):
        self.stopped.discard(name)
      case ("time",):
        self._let_time_pass()

  def silent(self, process: worlds.Process) -> None:
    for connection in list(process.connections.values()):
      other = connection.other(process)
      self.at(0.0, self.lose, connection, other, "silent", "nothing heard")
      self.at(0.0, self.lose, connection, process, "silent", "nothing heard")

  def _let_time_pass(self) -> None:
    due = [
      (p.node.deadline() - p.offset, p)
      for p in self.all
      if p.alive and not p.over and p.name not in self.stopped
    ]
    time, process = min(due, key=lambda d: d[0])
    if time < math.inf:
      self.now = max(self.now, time)
      self.input(process, ins.TimePassed())

  def set_timer(self, process: worlds.Process) -> None:
    pass


class _Values:
  """What can't change: kept once, and shared by all states that have it."""

  def __init__(self) -> None:
    self._all: list[Any] = []
    self._index: dict[Any, int] = {}
    self._frozen: dict[type, bool] = {}

  def get(self, index: int) -> Any:
    return self._all[index]

  def index(self, value: Any) -> int | None:
    """Its number, where it is a value; None where it is not."""
    kind = type(value)
    frozen = self._frozen.get(kind)
    if frozen is None:
      params = getattr(kind, "__dataclass_params__", None)
      frozen = self._frozen[kind] = params is not None and params.frozen
    if not frozen:
      return None
    index = self._index.get(value)
    if index is None:
      index = self._index[value] = len(self._all)
      self._all.append(value)
    return index


_VALUES = _Values()


def _get_value(index: int) -> Any:
  return _VALUES.get(index)


class _Copier(pickle.Pickler):
  """Copies a world; values are shared."""

  def reducer_override(self, value: Any) -> Any:
    index = _VALUES.index(value)
    return NotImplemented if index is None else (_get_value, (index,))


def _freeze(world: _World) -> bytes:
  buffer = io.BytesIO()
  _Copier(buffer, 5).dump(world)
  return zlib.compress(buffer.getvalue(), 1)


def _thaw(frozen: bytes) -> _World:
  return pickle.loads(zlib.decompress(frozen))


class _Key(pickle.Pickler):
  """Bytes that are equal for equal states, whoever shares what with whom."""

  def reducer_override(self, value: Any) -> Any:
    index = _VALUES.index(value)
    if index is not None:
      return _get_value, (index,)
    if isinstance(value, types.MethodType):
      return str, (value.__name__,)
    if isinstance(value, worlds.Process) and self.inside:
      return str, (value.name,)
    if isinstance(value, _World) and self.inside:
      return str, ("world",)
    return NotImplemented

  inside = False


def _key(world: _World) -> bytes:
  buffer = io.BytesIO()
  pickler = _Key(buffer, 5)
  pickler.fast = True
  pickler.inside = True
  for process in world.all:
    state = dict(vars(process))
    state["world"] = None
    state["connections"] = {
      name: tuple(c.open.items()) for name, c in process.connections.items()
    }
    pickler.dump(state)
  queues = {
    key: [(n, tuple(_plain(a) for a in args)) for n, args in items]
    for key, items in sorted(world.queues.items())
  }
  pickler.dump((queues, sorted(world.stopped), world.left, world.store))
  pickler.dump(world.now)
  return hashlib.blake2b(buffer.getvalue(), digest_size=16).digest()


def _plain(value: Any) -> Any:
  if isinstance(value, worlds.Connection):
    return tuple(value.open.items())
  if isinstance(value, worlds.Process):
    return value.name
  return value


@dataclasses.dataclass
class Found:
  """What an exploration saw.

  Attributes:
    states: how many different ones.
    ends: how many of them are ends of runs.
    complete: whether there are no others.
    violations: a text for each.
    trace: the choices that lead to the first violation.
  """

  states: int
  ends: int
  complete: bool
  violations: list[str]
  trace: tuple[Any, ...] = ()


def _first(space: Space) -> _World:
  """The state that an exploration begins with."""
  world = _World(space)
  world.checker = Checker(world)
  if space.warm:
    budget, world.left = world.left, [0, 0, 0]
    while any(p.suspended for p in world.all) or any(
      key[0] != "compute" for key in world.queues
    ):
      world.take(
        next(
          c for c in world.choices() if c[0] != "take" or c[1][0] != "compute"
        )
      )
    world.left = budget
  return world


def explore(space: Space, most: int) -> Found:
  """Follows every order of events, up to so many states."""
  first = _first(space)
  seen = {_key(first)}
  todo = collections.deque([(_freeze(first), 0)])
  parents: dict[int, tuple[int, Any]] = {}
  found = Found(1, 0, True, [])
  number = 0
  while todo:
    blob, at = todo.popleft()
    choices = _thaw(blob).choices()
    if not choices:
      found.ends += 1
    for choice in choices:
      world = _thaw(blob)
      try:
        world.take(choice)
        _check_end(world)
      except (Violation, AssertionError) as error:
        if not found.violations:
          found.trace = (*_path(parents, at), choice)
        found.violations.append(str(error)[:160])
        continue
      key = _key(world)
      if key in seen:
        continue
      seen.add(key)
      number += 1
      parents[number] = (at, choice)
      found.states += 1
      if found.states >= most:
        found.complete = False
        return found
      todo.append((_freeze(world), number))
  return found


def _path(parents: dict[int, tuple[int, Any]], at: int) -> list[Any]:
  path = []
  while at in parents:
    at, choice = parents[at]
    path.append(choice)
  return path[::-1]


def _check_end(world: _World) -> None:
  """Where nothing more can happen, everyone must be done."""
  if not any(p.alive and not p.over for p in world.all):
    return
  if world.now > worlds.TIMEOUT + 100.0:
    world.checker.finish()
