"""Decoupled DiLoCo: learners that never wait for each other."""

from optax_dist.coordinator.extras.decoupled_diloco.learner import Learner
from optax_dist.coordinator.extras.decoupled_diloco.strategy import (
  DecoupledDiloco,
  FragmentsState,
  decoupled_diloco,
)

__all__ = [
  "DecoupledDiloco",
  "FragmentsState",
  "Learner",
  "decoupled_diloco",
]
