"""Engines of one process that leave notes for each other."""

import contextlib
import dataclasses

import pytest

from optax_dist.coordinator import (
  embedded,
  engine,
  host_exchange,
  shared_memory,
)

needs_notes = pytest.mark.skipif(
  not shared_memory.is_available(), reason="memory can't be shared here"
)


class CountingBoard:
  """A board that counts what is asked of it."""

  def __init__(self, board):
    self._board = board
    self.calls = []

  def __getattr__(self, name):
    method = getattr(self._board, name)

    def call(key, *args, **kwargs):
      self.calls.append((name, key))
      return method(key, *args, **kwargs)

    return call


@dataclasses.dataclass
class Near:
  """Two engines on one board.

  Attributes:
    one: an engine; its board is a `CountingBoard`.
    two: another.
  """

  one: engine.Engine
  two: engine.Engine


@contextlib.contextmanager
def near():
  """Yields two engines that read each other's notes."""
  world = embedded.World()
  made = []
  for name in ("one", "two"):
    exchange = host_exchange.HostExchange(share_memory=True, transfer=None)
    board = CountingBoard(world.connect(name).board)
    made.append(engine.Engine(board, exchange, exchange))
  try:
    yield Near(*made)
  finally:
    for each in made:
      each.exchange.close()
