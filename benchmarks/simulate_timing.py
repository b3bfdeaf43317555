"""How many arrivals per second of processor time the timing simulation processes.

Prints a line for each strategy, at N replicas.

    python benchmarks/simulate_timing.py [--replicas N] [--seconds S]
"""

import argparse
import time

from optax_dist import simulate


def strategies(n):
  """The measurements, by name."""
  some = max(1, n // 20)
  return {
    "sync, all": simulate.sync_replicas(n),
    "sync, 5 % backups, cancelled": simulate.sync_replicas(
      n - some, cancel=True
    ),
    "sync, 5 % backups": simulate.sync_replicas(n - some),
    "sync, 50 % backups": simulate.sync_replicas(n - n // 2),
    "sync, 90 % backups": simulate.sync_replicas(max(1, n // 10)),
    "asynchronous": simulate.sync_replicas(1, max_staleness=None),
    "bounded staleness, N / 2": simulate.sync_replicas(1, max_staleness=n // 2),
  }


def rate(strategy, n, seconds):
  """Arrivals per second; the run is extended until it takes long enough."""
  steps = max(1, 2 * n // strategy.replicas_to_aggregate)
  latency = simulate.parse_latency("exponential:1")
  while True:
    begin = time.process_time()
    timing = simulate.simulate_timing(strategy, latency, n, steps=steps)
    took = time.process_time() - begin
    if took >= seconds:
      return (timing.applied + timing.dropped) / took
    steps *= 2


def main():
  """Measures all."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--replicas", type=int, default=1000)
  parser.add_argument("--seconds", type=float, default=1.0)
  args = parser.parse_args()
  n = args.replicas
  print(f"{n:,} replicas, exponential latencies; thousand arrivals per second")
  for name, strategy in strategies(n).items():
    print(f"{name:30} {rate(strategy, n, args.seconds) / 1e3:6.1f}", flush=True)


if __name__ == "__main__":
  main()
