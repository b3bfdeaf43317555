"""Measured step times with backup replicas against the closed form.

Replicas sleep instead of computing, as long as a distribution says. Where late
replicas drop their work at once (`cancel`), the time of a step is an order
statistic; where they finish first, it is what the simulator of the rules says.
"""

import argparse
import statistics
from collections.abc import Iterator

import latencies
import numpy as np
import side_by_side
from side_by_side import Line

from optax_dist import simulate

REPLICAS = 8
AGGREGATE = (8, 7, 6, 4)
LATENCIES = ("exponential", "outliers")
GOAL = (0.9, 1.1)
# Steps of the simulator, and of the order statistic.
STEPS, DRAWS = 20_000, 1_000_000


def expected(latency: simulate.Latency, k: int, cancel: bool) -> float:
  """Seconds for a step if nothing but computing took time."""
  if cancel:
    rng = np.random.default_rng(0)
    draws = [host.draw(rng, DRAWS) for host in latency.hosts(REPLICAS, rng)]
    return float(np.sort(draws, axis=0)[k - 1].mean())
  timing = simulate.simulate_timing(
    simulate.sync_replicas(k), latency, REPLICAS, steps=STEPS
  )
  return 1 / timing.steps_per_second


def _name(latency: str, k: int, cancel: bool) -> str:
  return f"{latency}, {k} of {REPLICAS}, cancel={cancel}"


def lines(args: argparse.Namespace) -> Iterator[Line]:
  """Yields the ratio of the mean of all rounds to what is expected."""
  for name in LATENCIES:
    text = f"{name}:{args.mean:g}"
    cases = [
      (k, cancel)
      for k in AGGREGATE
      for cancel in (True, False)
      # Without backups there is nothing to give up.
      if cancel or k < REPLICAS
    ]
    if args.rows:
      cases = [
        case
        for case in cases
        if all(word in _name(text, *case) for word in args.rows)
      ]
    if not cases:
      continue
    runs = side_by_side.in_turns(
      {
        _name(text, k, cancel): (
          "replicas.py",
          {
            "replicas": REPLICAS,
            "aggregate": k,
            "latency": text,
            "cancel": cancel,
            "steps": args.steps or 100,
            "seed": lambda i: i,
          },
        )
        for k, cancel in cases
      },
      args.repeats,
    )
    for (k, cancel), each in zip(cases, runs.values(), strict=True):
      times = side_by_side.values(each, "seconds_per_step")
      # Step times are skewed: of few steps the median would be too short.
      mean = statistics.fmean(times)
      steps = sum(side_by_side.values(each, "steps"))
      spread = max(side_by_side.values(each, "step_deviation"))
      form = expected(latencies.parse(text), k, cancel)
      yield Line(
        f"{text}, {k} of {REPLICAS}",
        1e3 * mean,
        "ms",
        "cancelling" if cancel else "finishing stale work",
        1e3 * form,
        mean / form,
        GOAL,
        f"+- {spread / mean / steps**0.5:.1%}",
      )
