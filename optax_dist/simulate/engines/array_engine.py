"""Vectorized timing: the same steps as `event_engine`, many arrivals at a time.

There are three methods for three kinds of strategy: whole blocks of steps if
every replica restarts at each commit; whole blocks of arrivals if no replica
ever waits; otherwise one step at a time, with all replicas in one array, unless
only a few of them arrive in a step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from optax_dist.simulate import timing
from optax_dist.simulate.engines import heap_engine
from optax_dist.simulate.engines.draws import Draws
from optax_dist.simulate.strategy import UNBOUNDED, Strategy

_Progress = Callable[[int], None]
# With fewer than one in so many replicas per step, and few drops, a heap is
# faster.
_FEW = 25


def run(
  strategy: Strategy,
  draws: Draws,
  replicas: int,
  steps: int,
  *,
  communication: float = 0.0,
  progress: _Progress = lambda steps: None,
) -> timing.Timing:
  """Simulates until a number of steps is committed.

  Args:
    strategy: what the replicas do; it aggregates at most as many contributions
      as there are replicas.
    draws: the computation times.
    replicas: number of replicas.
    steps: number of steps to simulate.
    communication: seconds from a commit until its parameters are available.
    progress: called from time to time with the steps so far.

  Returns:
    The outcome, equal to that of `event_engine.run` on the same draws.
  """
  k, late = strategy.replicas_to_aggregate, strategy.max_staleness
  own_clocks = late == UNBOUNDED or not communication
  if strategy.cancel and not late:
    way = _by_blocks_of_steps
  elif strategy.cancel:
    way = _step_by_step
  elif k == 1 and own_clocks:
    way = _by_blocks_of_arrivals
  elif late and k * _FEW < replicas:
    way = heap_engine.run
  else:
    way = _step_by_step
  return way(strategy, draws, replicas, steps, communication, progress)


def _by_blocks_of_steps(
  strategy: Strategy,
  draws: Draws,
  n: int,
  steps: int,
  communication: float,
  progress: _Progress,
) -> timing.Timing:
  """Late replicas drop their work at once, so each step starts from scratch."""
  k = strategy.replicas_to_aggregate
  applied = np.zeros(n, np.int64)
  useful, waiting, stale = np.zeros((3, n))
  commit_times = np.empty(steps)
  done, now = 0, 0.0
  while done < steps:
    seconds = draws.rows(np.arange(n)).T[: steps - done]
    seconds = np.ascontiguousarray(seconds)
    step_time = np.partition(seconds, k - 1, axis=1)[:, k - 1 : k]
    member = seconds <= step_time
    if np.count_nonzero(member) > k * len(seconds):
      # Of simultaneous arrivals, the first ones count.
      tied = seconds == step_time
      room = k - (member & ~tied).sum(axis=1, keepdims=True)
      member &= ~tied | (np.cumsum(tied, axis=1) <= room)
    applied += member.sum(axis=0)
    useful += np.where(member, seconds, 0).sum(axis=0)
    waiting += np.where(member, step_time - seconds, 0).sum(axis=0)
    stale += np.where(member, 0, step_time).sum(axis=0)
    # Added in time order, so that the result is equal to the last bit.
    passed = np.full((len(seconds), 2), communication)
    passed[:, 0] = step_time[:, 0]
    clock = np.cumsum(np.concatenate([[now], passed.ravel()]))
    commit_times[done : done + len(seconds)] = clock[1::2]
    done, now = done + len(seconds), clock[-1]
    progress(done)
  return timing.make(
    strategy,
    commit_times,
    applied,
    steps - applied,
    {
      "useful": useful,
      "waiting": waiting,
      "stale": stale,
      "communication": np.full(n, (steps - 1) * communication),
    },
    np.array([steps * k]),
  )


def _by_blocks_of_arrivals(
  strategy: Strategy,
  draws: Draws,
  n: int,
  steps: int,
  communication: float,
  progress: _Progress,
) -> timing.Timing:
  """Each arrival is its own step, or dropped: no replica ever waits."""
  book = _Arrivals(n, strategy.max_staleness)
  last = np.zeros(n)  # The last known arrival of each replica.
  horizon = 0.0
  pending = np.empty((3, 0))
  while book.step < steps:
    parts = [pending]
    behind = np.arange(n)
    while behind.size:
      seconds = draws.rows(behind)
      passed = np.full((behind.size, 1 + 2 * seconds.shape[1]), communication)
      passed[:, 0], passed[:, 1::2] = last[behind], seconds
      clock = np.cumsum(passed, axis=1)
      who = np.broadcast_to(behind[:, None], seconds.shape)
      parts.append(
        np.stack([clock[:, 1::2].ravel(), who.ravel(), seconds.ravel()])
      )
      last[behind] = clock[:, -1]
      if horizon == 0.0:
        horizon = float(np.median(last))
      behind = np.flatnonzero(last <= horizon)
    arrivals = np.concatenate(parts, axis=1)
    due = arrivals[0] <= horizon
    pending = arrivals[:, ~due]
    now = arrivals[:, due]
    now = now[:, np.lexsort(now[1::-1])]
    book.take(now, steps)
    progress(min(book.step, steps))
    horizon *= (book.blocks + 1) / book.blocks
  return timing.make(
    strategy,
    np.concatenate(book.commit_times),
    book.applied,
    book.dropped,
    {
      "useful": book.useful,
      "stale": book.stale,
      "communication": communication
      * np.maximum(book.applied + book.dropped - 1, 0),
    },
    book.staleness,
  )


class _Arrivals:
  """Processes arrivals in time order."""

  def __init__(self, n: int, max_staleness: int):
    self.max_staleness = max_staleness
    self.step = self.blocks = 0
    self.commit_times: list[np.ndarray] = []
    self.local = np.zeros(n, np.int64)
    self.applied, self.dropped = np.zeros((2, n), np.int64)
    self.useful, self.stale = np.zeros((2, n))
    self.staleness = np.zeros(0, np.int64)

  def take(self, arrivals: np.ndarray, steps: int) -> None:
    """Processes arrivals `[3, size]`: times, replicas, seconds of computing."""
    times, who, seconds = arrivals
    who = who.astype(np.int64)
    if self.max_staleness == UNBOUNDED:
      size = min(len(times), steps - self.step)
      times, who, seconds = times[:size], who[:size], seconds[:size]
      late, accepted = self._all(who), np.ones(size, bool)
    else:
      late, accepted = self._some(who.tolist(), steps)
      size = len(late)
      times, who, seconds = times[:size], who[:size], seconds[:size]
    n = self.local.size
    self.commit_times.append(times[accepted])
    count = lambda chosen: np.bincount(who[chosen], minlength=n)
    spent = lambda chosen: np.bincount(who[chosen], seconds[chosen], n)
    self.applied += count(accepted)
    self.dropped += count(~accepted)
    self.useful += spent(accepted)
    self.stale += spent(~accepted)
    self.step += int(accepted.sum())
    self.blocks += 1
    self.staleness = add_counts(self.staleness, np.bincount(late[accepted]))

  def _all(self, who: np.ndarray) -> np.ndarray:
    """The staleness of each arrival, if every arrival is a step."""
    order = np.argsort(who, kind="stable")
    steps = self.step + order  # The step that each arrival finds, by replica.
    first = np.flatnonzero(np.diff(who[order], prepend=-1))
    began = np.empty_like(steps)
    began[1:] = steps[:-1] + 1
    began[first] = self.local[who[order][first]]
    late = np.empty_like(steps)
    late[order] = steps - began
    self.local[who] = self.step + np.arange(len(who)) + 1  # The last one wins.
    return late

  def _some(self, who: list[int], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The staleness of each arrival, if only fresh enough ones are steps."""
    local, bound, step = self.local.tolist(), self.max_staleness, self.step
    late = []
    for replica in who:
      if step == steps:
        break
      by = step - local[replica]
      late.append(by)
      step += by <= bound
      local[replica] = step
    self.local[:] = local
    array = np.array(late, np.int64)
    return array, array <= bound


def _step_by_step(
  strategy: Strategy,
  draws: Draws,
  n: int,
  steps: int,
  communication: float,
  progress: _Progress,
) -> timing.Timing:
  lots = Lots(strategy, 1, n, draws.take, communication)
  commit_times = np.empty(steps)
  for step in range(steps):
    commit_times[step] = lots.commit()[0]
    if step % 256 == 0:
      progress(step)
  return timing.make(
    strategy,
    commit_times,
    lots.applied,
    lots.dropped,
    lots.seconds,
    lots.staleness,
  )


class Lots:
  """Simulations side by side, one commit of each at a time.

  Replica i of simulation j has index `j * n + i` in flat arrays.

  Attributes:
    applied, dropped: contributions, int64 `[simulations * n]`.
    seconds: float64 `[simulations * n]` for each cause.
    staleness: number of applied contributions, by staleness.
  """

  def __init__(
    self,
    strategy: Strategy,
    simulations: int,
    n: int,
    take: Callable[[np.ndarray], np.ndarray],
    communication: float | np.ndarray,
    replicas_to_aggregate: np.ndarray | None = None,
  ):
    """Starts all replicas.

    Args:
      strategy: what the replicas do.
      simulations: number of simulations.
      n: replicas in each simulation.
      take: returns the next computation times for flat indices of replicas.
      communication: seconds from a commit until its parameters are available;
        one number, or one for each replica of each simulation.
      replicas_to_aggregate: for each simulation, int `[simulations]`; None for
        the strategy's number in all.
    """
    size = simulations * n
    self._shape = (simulations, n)
    self._take, self._communication = take, communication
    self._late, self._cancel = strategy.max_staleness, strategy.cancel
    k = replicas_to_aggregate
    self._same_k = strategy.replicas_to_aggregate if k is None else 0
    self._k = np.full(simulations, self._same_k) if k is None else np.array(k)
    everyone = np.arange(size)
    self._ids = np.tile(np.arange(n), simulations)
    self._step = 0
    # For each replica's current computation: when it was requested, when it
    # started, when it ends, and the step of its parameters; and the time after
    # it.
    self._token, self._start = np.zeros((2, size))
    self._finish = self._start + take(everyone)
    self._next = take(everyone)
    self._local = np.zeros(size, np.int64)
    self._ready = np.zeros(size)
    self.applied, self.dropped = np.zeros((2, size), np.int64)
    self.seconds = {
      cause: np.zeros(size)
      for cause in ("useful", "waiting", "stale", "communication")
    }
    self.staleness = np.zeros(0, np.int64)

  def commit(self) -> np.ndarray:
    """Advances each simulation to its next commit; returns the times."""
    simulations, n = self._shape
    # A replica that is too late will drop its work, and return with a fresh
    # one.
    fresh = self._local >= self._step - self._late
    again = np.maximum(self._finish, self._ready) + self._next
    arrive = np.where(fresh, self._finish, again)
    rows = arrive.reshape(self._shape)
    if self._same_k:
      k = self._same_k - 1
      time = np.partition(rows, k, axis=1)[:, k]
    else:
      time = np.sort(rows, axis=1)[np.arange(simulations), self._k - 1]
    now = np.repeat(time, n) if simulations > 1 else time
    member = arrive <= now
    before = self._finish < now
    if np.count_nonzero(member) > self._k.sum():
      member = self._first_of_tied(rows, time)
    tied = self._finish == now
    if (tied & ~fresh).any():
      # Simultaneous arrivals are ordered by index.
      last = np.where(member & (arrive == now), self._ids, -1)
      last = last.reshape(self._shape).max(axis=1)
      before |= tied & (self._ids < np.repeat(last, n))
    came = np.flatnonzero(~fresh & before)
    if came.size:
      self._drop(came, self._finish[came])
      self._begin(came, self._finish[came], self._step)
    self._step += 1
    members = np.flatnonzero(member)
    of = now[members] if simulations > 1 else now
    self._apply(members, of)
    self._ready = now + self._communication
    self._begin(members, of, self._step)
    if self._cancel:
      off = np.flatnonzero(self._local < self._step - self._late)
      of = now[off] if simulations > 1 else now
      self._drop(off, of)
      self._begin(off, of, self._step)
    return time

  def _first_of_tied(self, rows: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Of simultaneous arrivals, the first ones count."""
    tied = rows == time[:, None]
    sooner = rows < time[:, None]
    room = self._k[:, None] - sooner.sum(axis=1, keepdims=True)
    return (sooner | (tied & (np.cumsum(tied, axis=1) <= room))).ravel()

  def _begin(self, who: np.ndarray, now: np.ndarray, step: int) -> None:
    """Gives these replicas a token at these times."""
    ready = self._ready if self._ready.size == 1 else self._ready[who]
    self._token[who] = now
    start = np.maximum(now, ready)
    self._start[who] = start
    self._finish[who] = start + self._next[who]
    self._local[who] = step
    self._next[who] = self._take(who)

  def _drop(self, who: np.ndarray, now: np.ndarray) -> None:
    start = self._start[who]
    self.dropped[who] += 1
    self.seconds["stale"][who] += np.maximum(now - start, 0)
    self.seconds["communication"][who] += (
      np.minimum(start, now) - self._token[who]
    )

  def _apply(self, who: np.ndarray, now: np.ndarray) -> None:
    start, finish = self._start[who], self._finish[who]
    self.applied[who] += 1
    self.seconds["useful"][who] += finish - start
    self.seconds["waiting"][who] += now - finish
    self.seconds["communication"][who] += start - self._token[who]
    late = self._step - 1 - self._local[who]
    self.staleness = add_counts(self.staleness, np.bincount(late))


def add_counts(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """The sum of two arrays of counts, the shorter one padded with zeros.

  Example:
    >>> add_counts(np.array([1, 2]), np.array([1, 1, 1]))
    array([2, 3, 1])
  """
  if a.size < b.size:
    a, b = b, a
  total = a.copy()
  total[: b.size] += b
  return total
