"""The coordinator for replicas that run as separate processes.

Replicas on different hosts train one model: each computes gradients on its own
devices, a step is taken from k of N fresh ones, and a replica that is slow,
stopped or killed does not hold up the others. See docs/coordinator.md.

Example:
  Two replicas, here as threads of one process; `join` makes a process a
  replica.

  >>> import jax, jax.numpy as jnp, optax
  >>> from optax_dist import coordinator
  >>> def train(replica):
  ...   for _ in range(3):
  ...     outcome = replica.step(jax.grad(jnp.sum)(replica.params))
  ...   return outcome.global_step, outcome.members
  >>> coordinator.run_embedded(train, 2, optax.sgd(0.1), jnp.zeros(4))
  [(3, (0, 1)), (3, (0, 1))]
"""

from typing import TYPE_CHECKING

from optax_dist._internal import lazy

if TYPE_CHECKING:
  from optax_dist.coordinator._internal.fingerprints import fingerprint
  from optax_dist.coordinator.any_trainer import (
    CoordinatedOptimizer,
    CoordinatedState,
    as_optimizer,
  )
  from optax_dist.coordinator.errors import (
    CoordinatorError,
    Diverged,
    JoinRefused,
    RunFinished,
  )
  from optax_dist.coordinator.extras.decoupled_diloco.strategy import (
    decoupled_diloco,
  )
  from optax_dist.coordinator.extras.groups.group import initialize_processes
  from optax_dist.coordinator.joining import join, run_embedded
  from optax_dist.coordinator.options import Options
  from optax_dist.coordinator.replica import Outcome, Replica
  from optax_dist.coordinator.strategies.elastic_average import elastic_average
  from optax_dist.coordinator.strategies.local_updates import local_updates
  from optax_dist.ledger import Batches
else:
  __getattr__, __dir__ = lazy.names(__name__)

__all__ = [
  "Batches",
  "CoordinatedOptimizer",
  "CoordinatedState",
  "CoordinatorError",
  "Diverged",
  "JoinRefused",
  "Options",
  "Outcome",
  "Replica",
  "RunFinished",
  "as_optimizer",
  "decoupled_diloco",
  "elastic_average",
  "fingerprint",
  "initialize_processes",
  "join",
  "local_updates",
  "run_embedded",
]
