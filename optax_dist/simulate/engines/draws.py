"""Streams of latencies, one per replica, equal for every engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optax_dist.simulate.latency.distributions import Latency

_ROW = 256


class Draws:
  """The computation times of each replica.

  The j-th value of a replica does not depend on the order in which replicas
  draw.

  Example:
    >>> from optax_dist import simulate
    >>> draws = Draws(simulate.parse_latency("constant:2"), 3, seed=0, local_steps=5)
    >>> draws.take(np.array([0, 2]))
    array([10., 10.])
  """

  def __init__(
    self, latency: Latency, replicas: int, *, seed: int, local_steps: int = 1
  ):
    """Creates a stream for each replica.

    Args:
      latency: latency of one gradient.
      replicas: number of replicas.
      seed: equal seeds give equal values.
      local_steps: gradients per computation.
    """
    ours, *theirs = np.random.SeedSequence(seed).spawn(replicas + 1)
    self.hosts: Sequence[Latency] = latency.hosts(
      replicas, np.random.default_rng(ours)
    )
    self._rngs = [np.random.Generator(np.random.SFC64(s)) for s in theirs]
    self._local_steps = local_steps
    self._rows = np.empty((replicas, _ROW))
    self._next = np.full(replicas, _ROW)

  def rows(self, replicas: np.ndarray) -> np.ndarray:
    """The next values of these replicas, float64 `[len(replicas), n]`.

    An engine uses either this or `take`.
    """
    rows = np.empty((len(replicas), _ROW))
    for row, i in zip(rows, replicas.tolist(), strict=True):
      values = self.hosts[i].draw(self._rngs[i], _ROW * self._local_steps)
      if self._local_steps > 1:
        values = values.reshape(_ROW, self._local_steps).sum(axis=1)
      row[:] = values
    return rows

  def take(self, replicas: np.ndarray) -> np.ndarray:
    """The next value of each of these replicas, which must be distinct."""
    empty = replicas[self._next[replicas] == _ROW]
    if empty.size:
      self._rows[empty] = self.rows(empty)
      self._next[empty] = 0
    values = self._rows[replicas, self._next[replicas]]
    self._next[replicas] += 1
    return values
