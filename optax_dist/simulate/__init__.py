"""Simulates strategies in virtual time, for capacity planning.

docs/simulate.md describes what is simulated and how accurate it is.
"""

from optax_dist.coordinator.metrics import goodput
from optax_dist.simulate import scale
from optax_dist.simulate.engines.event_engine import Failures
from optax_dist.simulate.latency.distributions import (
  Distribution,
  Empirical,
  Latency,
)
from optax_dist.simulate.latency.hosts import PerHost, SlowHosts
from optax_dist.simulate.latency.parse import parse_latency
from optax_dist.simulate.latency.recording import Recording
from optax_dist.simulate.network import Network
from optax_dist.simulate.plan import Candidate, Plan, plan
from optax_dist.simulate.replay.exchange import Exchange
from optax_dist.simulate.replay.journal import Replay, replay
from optax_dist.simulate.replay.latencies import Recorded, from_journal
from optax_dist.simulate.replay.predict import (
  HeldOut,
  Prediction,
  held_out,
  predict,
)
from optax_dist.simulate.run_timing import simulate_timing
from optax_dist.simulate.strategy import (
  Strategy,
  asynchronous,
  bounded_staleness,
  elastic_average,
  local_updates,
  sync_replicas,
)
from optax_dist.simulate.timing import Timing
from optax_dist.simulate.training import Training, simulate_training

__all__ = [
  "Candidate",
  "Distribution",
  "Empirical",
  "Exchange",
  "Failures",
  "HeldOut",
  "Latency",
  "Network",
  "PerHost",
  "Plan",
  "Prediction",
  "Recorded",
  "Recording",
  "Replay",
  "SlowHosts",
  "Strategy",
  "Timing",
  "Training",
  "asynchronous",
  "bounded_staleness",
  "elastic_average",
  "from_journal",
  "goodput",
  "held_out",
  "local_updates",
  "parse_latency",
  "plan",
  "predict",
  "replay",
  "scale",
  "simulate_timing",
  "simulate_training",
  "sync_replicas",
]
