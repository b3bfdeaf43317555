"""Goodput of up to a million chips that fail, in virtual time.

A strategy is a function of a fleet, the seconds to simulate and a random
generator; it returns how the chips' time was spent. Each has its own file.
"""

from optax_dist.simulate.scale.backup_groups import backup_groups
from optax_dist.simulate.scale.choose import Choice, Option, choose
from optax_dist.simulate.scale.decoupled_diloco import (
  Learners,
  decoupled_diloco,
  paper_fleet,
  simulate_learners,
)
from optax_dist.simulate.scale.diloco import diloco
from optax_dist.simulate.scale.elastic_restart import elastic_restart
from optax_dist.simulate.scale.fleet import Fleet
from optax_dist.simulate.scale.one_program import (
  best_checkpoint_interval,
  one_program,
  one_program_goodput,
)
from optax_dist.simulate.scale.replica_groups import replica_groups
from optax_dist.simulate.scale.run import Strategy, simulate_fleet

__all__ = [
  "Choice",
  "Fleet",
  "Learners",
  "Option",
  "Strategy",
  "backup_groups",
  "best_checkpoint_interval",
  "choose",
  "decoupled_diloco",
  "diloco",
  "elastic_restart",
  "one_program",
  "one_program_goodput",
  "paper_fleet",
  "replica_groups",
  "simulate_fleet",
  "simulate_learners",
]
