"""Simulates strategies in virtual time, for capacity planning.

docs/simulate.md describes what is simulated and how accurate it is.
"""

from optax_dist.simulate.engine import Failures, simulate_timing
from optax_dist.simulate.latency import (
  Distribution,
  Latency,
  SlowHosts,
  parse_latency,
)
from optax_dist.simulate.plan import Candidate, Plan, plan
from optax_dist.simulate.predict import Prediction, predict
from optax_dist.simulate.recorded import Recorded, from_journal
from optax_dist.simulate.recording import Recording
from optax_dist.simulate.replay_run import Replay, replay_run
from optax_dist.simulate.strategy import (
  Strategy,
  sync_replicas,
)
from optax_dist.simulate.timing import Timing

__all__ = [
  "Candidate",
  "Distribution",
  "Failures",
  "Latency",
  "Plan",
  "Prediction",
  "Recorded",
  "Recording",
  "Replay",
  "SlowHosts",
  "Strategy",
  "Timing",
  "from_journal",
  "parse_latency",
  "plan",
  "predict",
  "replay_run",
  "simulate_timing",
  "sync_replicas",
]
