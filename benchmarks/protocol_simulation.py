"""Schedules per second that the simulation of the coordinator's protocol runs.

The goal is 100,000 schedules of 12 steps in at most 20 minutes on two cores,
which is 24 ms of one core each. Processor time is told too: on a busy machine it
says what the simulation costs, and the time passed what it was given.

  python benchmarks/protocol_simulation.py --schedules 2000
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tests.simulation import faults

GOAL = 0.024


def main() -> None:
  """Prints a line of figures."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--schedules", type=int, default=2000)
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args()
  steps = events = 0
  passed, used = time.perf_counter(), time.process_time()
  for seed in range(options.seed, options.seed + options.schedules):
    result = faults.run(faults.schedule(seed))
    steps += result.steps
    events += result.events
  passed, used = time.perf_counter() - passed, time.process_time() - used
  each = used / options.schedules
  print(
    f"{options.schedules} schedules, {steps} steps, {events} events: "
    f"{1e3 * each:.1f} ms of processor time each, {each / GOAL:.2f} of the "
    f"goal; {used / events * 1e6:.0f} us an event; {passed:.1f} s passed, "
    f"{used:.1f} s used; 100,000 take {1e5 * each / 2 / 60:.1f} min of two cores"
  )


if __name__ == "__main__":
  main()
