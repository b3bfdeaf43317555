"""The simulator against the coordinator: predicted and measured steps per second.

5 replicas of the real coordinator, as threads, sleep instead of computing, for times
drawn from a distribution. Their journal is simulated, and the predicted pace told
beside the measured one; then, from the same journal, the pace of other quorums is
predicted and measured too. The goal is a difference of at most 10 %.

    python benchmarks/simulate_reality.py [--steps N] [--scale SECONDS]
"""

import argparse
import pathlib
import tempfile
import time

import numpy as np
import optax

from optax_dist import coordinator, simulate
from optax_dist.coordinator import journal

REPLICAS = 5
RECORDED = 4
LATENCIES = (
  "gamma:4,0.25",
  "shifted-exponential:0.5,0.5",
  "lognormal:-0.3,0.8",
)


def record(spec, k, steps, scale, path):
  """Runs the coordinator, and returns the journal's records."""
  latency = simulate.parse_latency(spec)
  gradient = np.ones(64, np.float32)

  def train(replica):
    rng = np.random.default_rng([k, replica.replica])
    while replica.global_step < steps and not replica.finished:
      time.sleep(scale * latency.draw(rng, 1)[0])
      replica.step(gradient)
    if not replica.finished:
      replica.finish()

  coordinator.run_embedded(
    train,
    REPLICAS,
    optax.sgd(0.1),
    np.zeros(64, np.float32),
    replicas_to_aggregate=k,
    journal=path,
    timeout=60.0,
  )
  return journal.read(path, strict=True).records


def predict(recorded, k, steps):
  """Steps per second of the same replicas with another quorum."""
  strategy = recorded.strategy._replace(replicas_to_aggregate=k)
  return simulate.simulate_timing(
    strategy,
    recorded.latency,
    recorded.replicas,
    steps=max(20_000, steps),
    communication=recorded.communication,
  ).steps_per_second


def main():
  """Measures all."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=int, default=300)
  parser.add_argument(
    "--scale", type=float, default=0.05, help="seconds that a unit lasts"
  )
  args = parser.parse_args()
  print(f"{REPLICAS} replicas, recorded with {RECORDED} of them in a step")
  worst = 0.0
  for spec in LATENCIES:
    with tempfile.TemporaryDirectory() as folder:
      recorded = simulate.from_journal(
        record(
          spec, RECORDED, args.steps, args.scale, pathlib.Path(folder, "run")
        )
      )
      for k in (RECORDED, 5, 3, 2):
        measured = recorded.steps_per_second
        if k != RECORDED:
          measured = simulate.from_journal(
            record(
              spec, k, args.steps, args.scale, pathlib.Path(folder, str(k))
            )
          ).steps_per_second
        predicted = predict(recorded, k, args.steps)
        difference = predicted / measured - 1
        worst = max(worst, abs(difference))
        print(
          f"{spec:30} {k} of {REPLICAS}: measured {measured:6.2f},"
          f" predicted {predicted:6.2f} steps/s ({difference:+.1%})",
          flush=True,
        )
  print(f"at most {worst:.1%} apart (goal 10 %)")


if __name__ == "__main__":
  main()
