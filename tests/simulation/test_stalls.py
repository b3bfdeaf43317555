"""How long a run stands still when it loses its leader: not for a timeout."""

import itertools
import random
from typing import Any

import pytest

from tests.simulation import faults
from tests.simulation.invariants import Checker
from tests.simulation.world import LEADER_TIMEOUT, Setting, World

# Among so many, some call the next leader before it knows that it leads.
SEEDS = range(60)


def lose(world: World, kind: str, details: tuple[Any, ...]) -> None:
  """Takes the leader out of the run for good."""
  for process in world.all:
    if process.alive and process.node.leader is not None:
      world.spared = True
      if kind == "kill":
        world.kill(process)
      process.wants_leave = kind == "leave"


def longest_pause(seed: int, kind: str) -> float:
  """Seconds between two steps of a run that goes on without its leader."""
  r = random.Random(seed)
  replicas = r.choice((3, 4))
  setting = Setting(
    replicas=replicas,
    needed=r.choice((1, replicas - 1)),
    inline=r.random() < 0.5,
    lower_on_loss=True,
    steps=100,
    latency=r.choice((0.0005, 0.005)),
    store_latency=r.choice((0.0005, 0.005)),
    compute=(0.02,) * 8,
  )
  moment = 1.0 + r.random() / 2
  checkers = []

  def keep(world: World) -> Checker:
    checkers.append(Checker(world))
    return checkers[-1]

  result = faults.run(
    faults.Schedule(seed, setting, ((moment, kind, ()),)),
    checker_class=keep,
    strike=lose,
  )
  assert not result.violation
  (checker,) = checkers
  times = checker.times
  assert times[-1] > moment
  return max(b - a for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("kind", ["kill", "leave"])
def test_the_next_leader_is_there_long_before_a_timeout(kind):
  pauses = {seed: longest_pause(seed, kind) for seed in SEEDS}
  late = {s: p for s, p in pauses.items() if p > LEADER_TIMEOUT / 2}
  assert not late
