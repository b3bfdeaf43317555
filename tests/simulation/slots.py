"""Schedules of deterministic runs: a step is always the same micro-batches."""

from __future__ import annotations

import dataclasses
import random

from optax_dist import ledger
from tests.simulation import faults
from tests.simulation.world import TIMEOUT

run = faults.run


def schedule(seed: int, steps: int = 0) -> faults.Schedule:
  """The schedule of a seed."""
  result = faults.schedule(seed, steps)
  r = random.Random(f"slots of {seed}")
  slots = r.choice((1, 2, 3, 5, 8, 16))
  micro = r.choice((1, 3))
  batch = slots * micro
  data = ledger.Batches(
    batch * r.choice((1, 3, 5)) + r.randrange(batch),
    batch,
    epochs=r.choice((2, 3, None)),
    mode=r.choice(("exact", "streaming")),
    micro_batch=micro,
    deterministic=True,
    audit=r.choice((0.0, 0.0, 0.3, 1.0)),
  )
  setting = dataclasses.replace(
    result.setting,
    needed=slots,
    alone=False,
    max_staleness=0,
    starts=(),
    data=data,
    compute=tuple(
      # A hanging replica has a slot.
      seconds if seconds >= TIMEOUT else seconds / slots
      for seconds in result.setting.compute
    ),
  )
  struck = result.faults
  # A hanging replica can't decide which one is wrong, and the others wait for it.
  hangs = any(seconds >= TIMEOUT for seconds in setting.compute)
  if data.audit and r.random() < 0.5 and not hangs:
    fault = (r.random() * slots * 0.05, "wrong gradients", (r.randrange(2),))
    struck = (*struck, fault)
  return dataclasses.replace(result, setting=setting, faults=struck)
