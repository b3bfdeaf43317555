"""Every interleaving of a small run, breadth first, with no clock at all.

Where `faults` draws one order of events, here each event that could be next is
taken in turn: a message of any connection, a request at the store, its answer, a
gradient that is ready, a deadline that has come. Time passes only when nothing
else can happen. Within each space there may be one kill, also amid what a process
sends; one stop (others find the process silent, and it may go on at any time);
and one answer of the store that is lost.

The leader's sign of life in the store is read and written at once: it is a
hint, and decides nothing.
"""

from __future__ import annotations

import array
import collections
import dataclasses
from typing import Any

from tests.simulation import world as worlds
from tests.simulation.exhaustive import parts, reduction, states
from tests.simulation.invariants import Violation


@dataclasses.dataclass(frozen=True)
class Space:
  """A small run and what may go wrong in it.

  Attributes:
    name: in a few words.
    setting: of the run.
    kills: how many processes may be killed: 0 or 1.
    stops: how many may be stopped, and go on: 0 or 1.
    losses: how many answers of the store may be lost: 0 or 1.
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
  found = []
  faults = (
    ("nothing goes wrong", (0, 0, 0)),
    ("a kill", (1, 0, 0)),
    ("a stop", (0, 1, 0)),
    ("a lost answer", (0, 0, 1)),
    ("a kill, a stop and a lost answer", (1, 1, 1)),
  )
  for replicas in (2, 3):
    for name, budget in faults:
      text = f"{replicas} replicas start and end, {name}"
      found.append(Space(text, _setting(replicas, True, 0), *budget, False))
  for replicas in (2, 3):
    for inline in (True, False):
      for name, budget in faults:
        how = "sent inline" if inline else "exchanged"
        text = f"{replicas} replicas, 2 steps {how}, {name}"
        found.append(Space(text, _setting(replicas, inline), *budget))
  return tuple(found)


SPACES = _spaces()


@dataclasses.dataclass
class Found:
  """What an exploration saw.

  Attributes:
    states: how many different ones.
    ends: how many of them are ends of runs.
    complete: whether there are no others.
    violations: a text for each.
    trace: the choices that lead to the first violation.
    outcomes: what the ends are like: how each process ended, what stands in the
      store, and what each gradient's training loop was told.
  """

  states: int
  ends: int
  complete: bool
  violations: list[str]
  trace: tuple[Any, ...] = ()
  outcomes: set[Any] = dataclasses.field(default_factory=set)


def _firsts(
  all_: states.States, space: Space, reduced: bool
) -> list[states.State]:
  """The states that an exploration begins with.

  A reduced one says first whom each fault may strike: then it is an event of that
  process's own, and doesn't depend on what strikes others.
  """
  state = all_.first()
  if space.warm:
    while True:
      choices = [c for c in all_.choices(state) if c[0] != "compute"]
      if not choices:
        break
      state = all_.take(state, choices[0])
  everyone = (1 << all_.n) - 1
  one = [1 << p for p in range(all_.n)] if reduced else [everyone]
  found = []
  for kills in one if space.kills else [0]:
    for stops in one if space.stops else [0]:
      for losses in one if space.losses else [0]:
        row = list(state)
        row[all_.kills], row[all_.stops] = kills, stops
        row[all_.losses] = losses
        found.append(tuple(row))
  return found


def explore(space: Space, most: int, reduced: bool = True) -> Found:
  """Follows every order of events, up to so many states.

  Args:
    space: what may happen.
    most: states to follow at the most.
    reduced: whether of orders that make no difference one is enough.
  """
  all_ = states.States(space.setting)
  reduce = reduction.Reduction(all_)
  seen: dict[bytes, int] = {}
  todo: collections.deque[states.State] = collections.deque()
  parents = array.array("I")
  taken: list[states.Choice] = []
  kept = parts.Numbers()
  found = Found(0, 0, True, [])

  def reached(state: states.State, parent: int, choice: states.Choice) -> int:
    key = array.array("I", state).tobytes()
    number = seen.get(key)
    if number is None:
      number = seen[key] = len(seen)
      parents.append(parent)
      taken.append(kept.values[kept(choice)])
      todo.append(state)
    return number

  def follow(
    state: states.State, at: int, choices: list[states.Choice]
  ) -> bool:
    """Whether they lead to where nothing was followed yet."""
    news = False
    for choice in choices:
      try:
        after = all_.take(state, choice)
      except Violation as error:
        if not found.violations:
          found.trace = (*_path(parents, taken, at), choice)
        found.violations.append(str(error)[:160])
        continue
      news = reached(after, at, choice) > at or news
    return news

  for state in _firsts(all_, space, reduced):
    reached(state, 0, ())
  at = 0
  while todo:
    state = todo.popleft()
    choices = all_.choices(state)
    if not choices:
      found.ends += 1
      found.outcomes.add(all_.outcome(state))
    some = reduce.enough(state, choices) if reduced else choices
    news = follow(state, at, some)
    if not news and len(some) < len(choices):
      # Nothing waits indefinitely.
      follow(state, at, [c for c in choices if c not in some])
    at += 1
    if len(seen) >= most and todo:
      found.complete = False
      break
  found.states = len(seen)
  return found


def _path(
  parents: array.array[int], taken: list[states.Choice], at: int
) -> list[states.Choice]:
  path = []
  while taken[at]:
    path.append(taken[at])
    at = parents[at]
  return path[::-1]
