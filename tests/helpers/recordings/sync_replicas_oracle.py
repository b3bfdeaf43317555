"""The rule of sync_replicas, tick by tick, in plain Python and NumPy."""

import numpy as np


class Oracle:
  """One parameter, gradient descent with a learning rate of 1."""

  def __init__(self, size, needed, max_staleness=0, weight=lambda s: 1.0):
    self.size, self.needed, self.bound = size, needed, max_staleness
    self.weight = weight
    self.global_step = 0
    self.local_step = [0] * size
    self.held = [[] for _ in range(size)]
    self.ledger = {
      kind: [0] * size for kind in ("accepted", "absent", "stale", "nonfinite")
    }

  def tick(self, gradients, arrived, local_step=None):
    """Returns the update, and moves on."""
    for i in range(self.size):
      step = self.local_step[i] if local_step is None else local_step[i]
      staleness = self.global_step - step
      if not arrived[i]:
        kind = "absent"
      elif self.bound is not None and staleness > self.bound:
        kind = "stale"
      elif not np.isfinite(gradients[i]).all():
        kind = "nonfinite"
      else:
        kind = "accepted"
        weighted = self.weight(staleness) * gradients[i].astype(np.float64)
        self.held[i].append(weighted)
      self.ledger[kind][i] += 1
    all_in = [g for held in self.held for g in held]
    update = np.zeros(gradients.shape[1:])
    if len(all_in) >= self.needed:
      update = -np.mean(all_in, axis=0)
      self.held = [[] for _ in range(self.size)]
      self.global_step += 1
    for i in range(self.size):
      if arrived[i]:
        self.local_step[i] = self.global_step
    return update
