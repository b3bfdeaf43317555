"""Timing with a heap, for steps of a few gradients from many replicas.

Arrays would process all replicas for the few that arrive. This plain loop does
what the rules do, with one heap push per computation.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

import numpy as np

from optax_dist.simulate import timing
from optax_dist.simulate.engines.draws import Draws
from optax_dist.simulate.strategy import Strategy


def run(
  strategy: Strategy,
  draws: Draws,
  n: int,
  steps: int,
  communication: float,
  progress: Callable[[int], None],
) -> timing.Timing:
  """Simulates until a number of steps is committed.

  Args:
    strategy: what the replicas do; late ones finish their work.
    draws: the computation times.
    n: number of replicas.
    steps: number of steps to simulate.
    communication: seconds from a commit until its parameters are available.
    progress: called from time to time with the steps so far.

  Returns:
    The outcome, equal to that of `event_engine.run` on the same draws.
  """
  k, bound = strategy.replicas_to_aggregate, strategy.max_staleness
  first = draws.rows(np.arange(n))
  coming = [iter(row) for row in first.tolist()]
  heap = [(next(values), replica) for replica, values in enumerate(coming)]
  heapq.heapify(heap)
  token, start, local = [0.0] * n, [0.0] * n, [0] * n
  applied, dropped = [0] * n, [0] * n
  useful, waiting, stale, late_start = ([0.0] * n for _ in range(4))
  staleness: Counter[int] = Counter()
  commit_times: list[float] = []
  inside: list[tuple[float, int]] = []
  ready, step = 0.0, 0

  def begin(replica: int, now: float) -> tuple[float, int]:
    """Hands out a token; returns when the next gradient arrives."""
    token[replica] = now
    begins = start[replica] = now if now > ready else ready
    local[replica] = step
    seconds = next(coming[replica], None)
    if seconds is None:
      (row,) = draws.rows(np.array([replica])).tolist()
      coming[replica] = iter(row)
      seconds = next(coming[replica])
    return begins + seconds, replica

  while step < steps:
    now, replica = heap[0]
    if step - local[replica] > bound:
      dropped[replica] += 1
      stale[replica] += now - start[replica]
      late_start[replica] += start[replica] - token[replica]
      heapq.heapreplace(heap, begin(replica, now))
      continue
    inside.append(heapq.heappop(heap))
    if len(inside) < k:
      continue
    commit_times.append(now)
    ready = now + communication
    for arrived, member in inside:
      applied[member] += 1
      staleness[step - local[member]] += 1
      useful[member] += arrived - start[member]
      waiting[member] += now - arrived
      late_start[member] += start[member] - token[member]
    step += 1
    for _, member in inside:
      heapq.heappush(heap, begin(member, now))
    inside.clear()
    if step % 1024 == 0:
      progress(step)
  return timing.make(
    strategy,
    np.array(commit_times),
    np.array(applied),
    np.array(dropped),
    {
      "useful": np.array(useful),
      "waiting": np.array(waiting),
      "stale": np.array(stale),
      "communication": np.array(late_start),
    },
    np.array([staleness[late] for late in range(max(staleness) + 1)]),
  )
