"""Simulates the timing of replicas that train together, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from optax_dist.simulate.engines import array_engine, event_engine
from optax_dist.simulate.engines.draws import Draws
from optax_dist.simulate.engines.event_engine import Failures, Writer
from optax_dist.simulate.latency.distributions import Latency
from optax_dist.simulate.strategy import Strategy
from optax_dist.simulate.timing import Timing


def simulate_timing(
  strategy: Strategy,
  latency: Latency,
  replicas: int,
  *,
  steps: int = 1000,
  seed: int = 0,
  communication: float = 0.0,
  failures: Failures | None = None,
  engine: Literal["auto", "events", "arrays"] = "auto",
  journal: Writer | None = None,
  progress: Callable[[int], None] = lambda steps: None,
) -> Timing:
  """Simulates N replicas until a number of steps is committed.

  The rules of `optax_dist.quorum` decide what counts and what is dropped. No
  gradient is computed: only time advances.

  Args:
    strategy: what the replicas do.
    latency: how long a gradient takes on each host.
    replicas: number of replicas.
    steps: number of steps to simulate.
    seed: equal seeds give equal outcomes, to the last bit.
    communication: seconds from a commit until its parameters are available.
    failures: when replicas fail and come back; None for never.
    engine: `"events"` lets the rules decide on each event; `"arrays"` gives the
      same outcome many times faster, without failures, a journal, or more
      contributions per step than replicas; `"auto"` picks one that can do it.
    journal: receives every event, in virtual time; None for none.
    progress: called from time to time with the steps so far.

  Returns:
    The outcome.

  Raises:
    ValueError: a number is out of range, or `"arrays"` cannot do it.

  Example:
    >>> from optax_dist import simulate
    >>> timing = simulate_timing(
    ...   simulate.sync_replicas(3), simulate.parse_latency("constant:0.5"), 4)
    >>> timing.steps_per_second, round(timing.dropped_share, 2)
    (2.0, 0.25)
  """
  for name, value, least in (
    ("replicas", replicas, 1),
    ("steps", steps, 1),
    ("communication", communication, 0),
    ("seed", seed, 0),
  ):
    if not least <= value < float("inf"):
      raise ValueError(f"{name} must be at least {least}, got {value!r}.")
  if failures is not None and not (
    failures.rate > 0 and failures.downtimes and min(failures.downtimes) > 0
  ):
    raise ValueError(
      f"rate and downtime of failures must be above 0, got {failures}."
    )
  needs_events = (
    failures is not None
    or journal is not None
    or strategy.replicas_to_aggregate > replicas
  )
  if engine == "arrays" and needs_events:
    raise ValueError(
      "engine='arrays' supports neither failures nor journals nor more"
      f" contributions in a step than replicas (got {strategy.name},"
      f" {replicas} replicas): use engine='events'."
    )
  draws = Draws(latency, replicas, seed=seed, local_steps=strategy.local_steps)
  if engine == "events" or needs_events:
    return event_engine.run(
      strategy,
      draws,
      replicas,
      steps,
      communication=communication,
      failures=failures,
      seed=seed,
      journal=journal,
      progress=progress,
    )
  return array_engine.run(
    strategy,
    draws,
    replicas,
    steps,
    communication=communication,
    progress=progress,
  )
