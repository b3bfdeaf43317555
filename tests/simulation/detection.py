"""In how many steps an audit finds a replica whose gradients are wrong.

python -m tests.simulation.detection --runs 100
python -m tests.simulation.detection --runs 50 --wrong 0.1

Eight replicas share eight slots of a step, one in 64 of which is audited. Each
gradient of one of them is wrong with some probability. What should come out: of
each slot, the first or the second result is its in 2 of 8 cases.
"""

from __future__ import annotations

import argparse
import math
import random
from typing import Any

from optax_dist import ledger
from optax_dist.coordinator.protocol import journal_events
from tests.simulation import sums
from tests.simulation.invariants import Checker
from tests.simulation.world import Process, Setting, World

_REPLICAS, _SLOTS, _AUDIT = 8, 8, 1 / 64


class _World(World):
  """One replica computes some wrong gradients."""

  wrong = 1.0

  def slot(self, process: Process) -> sums.Nodes:
    chosen = random.Random(f"{self.seed} {process.name} {process.computed}")
    process.is_faulty = process.index == 3 and chosen.random() < self.wrong
    return super().slot(process)


class _Checker(Checker):
  """Looks for the eviction, and nothing else."""

  found = -1

  def noted(self, process: Any, note: journal_events.Record) -> None:
    if isinstance(note, journal_events.Audit) and self.found < 0:
      assert note.evicted == [3]
      self.found = note.step

  def fail(self, guarantee: str, text: str) -> None:
    pass  # Its gradients are wrong, but for some: not what a schedule expects.


def steps(seed: int, wrong: float) -> int:
  """The steps that were committed before the replica was evicted."""
  data = ledger.Batches(
    10**7, _SLOTS, seed=seed, micro_batch=1, deterministic=True, audit=_AUDIT
  )
  setting = Setting(
    _REPLICAS, _SLOTS, steps=10**6, data=data, latency=0.0001, coded=False
  )
  world = _World(setting, seed)
  world.wrong = wrong
  world.checker = checker = _Checker(world)
  while checker.found < 0:
    world.events = 0
    world.run(world.now + 10.0, lambda: checker.found >= 0)
  return checker.found


def main() -> None:
  parser = argparse.ArgumentParser(prog="python -m tests.simulation.detection")
  parser.add_argument("--runs", type=int, default=100)
  parser.add_argument("--wrong", type=float, default=1.0)
  options = parser.parse_args()
  result = sorted(steps(s, options.wrong) for s in range(options.runs))
  each = math.log(1 - _AUDIT * 2 / _REPLICAS * options.wrong)
  for part in (0.5, 0.9, 0.99):
    expected = math.log(1 - part) / (_SLOTS * each)
    seen = result[math.ceil(part * len(result)) - 1]
    print(f"{part:.0%} found within {seen} steps; expected {expected:.0f}")


if __name__ == "__main__":
  main()
