"""Decoupled DiLoCo: learners on their own clocks merge fragments of the parameters.

The rules are a pure state machine, without arrays, I/O or a clock; the merge
only uses arrays. docs/decoupled_diloco.md describes how they fit together.
"""

from optax_dist.decoupled_diloco.merge import (
  balanced_fragments,
  merge,
  mix,
  radial_directional_mean,
)
from optax_dist.decoupled_diloco.rules import (
  Abort,
  Adopt,
  Call,
  Config,
  Contribute,
  Drop,
  Join,
  Leave,
  Merge,
  Merged,
  Reason,
  State,
  Tick,
  clocks,
  deadline,
  grace_window,
  init,
  shares,
  step,
  token_weight,
  turn,
)

__all__ = [
  "Abort",
  "Adopt",
  "Call",
  "Config",
  "Contribute",
  "Drop",
  "Join",
  "Leave",
  "Merge",
  "Merged",
  "Reason",
  "State",
  "Tick",
  "balanced_fragments",
  "clocks",
  "deadline",
  "grace_window",
  "init",
  "merge",
  "mix",
  "radial_directional_mean",
  "shares",
  "step",
  "token_weight",
  "turn",
]
