"""A chief that stalls while its successor trims the log commits nothing more."""

import threading

import embedded_runs as runs
import near_engines
import pytest

from optax_dist.coordinator import (
  board_log,
  embedded,
  engine,
  log_reader,
  messages,
)
from optax_dist.coordinator.local_line import LocalLine

SECRET = b"secret"
# A commit stays readable for some 256 entries; then its block is removed.
ENTRIES = 300 + board_log.BLOCK
TICK = {"kind": "tick", "ack": False}


class StallingBoard:
  """A board whose process stops just before it puts an entry of the log.

  Attributes:
    stalled: set while the process stands still.
  """

  def __init__(self, board):
    self._board = board
    self._lock = threading.Lock()
    self._armed = False
    self.stalled = threading.Event()
    self._awake, self._runs = threading.Event(), threading.Event()
    self._runs.set()

  def stall(self):
    self._armed = True

  def wake(self):
    self._awake.set()

  def put(self, key, value, *, overwrite=False):
    with self._lock:
      stalls = self._armed and key.startswith("log/") and b"commit" in value
      if stalls:
        self._armed = False
        self._runs.clear()
    if not stalls:
      self._runs.wait()
      return self._board.put(key, value, overwrite=overwrite)
    self.stalled.set()
    self._awake.wait()
    try:
      return self._board.put(key, value, overwrite=overwrite)
    finally:
      self._runs.set()

  def __getattr__(self, name):
    method = getattr(self._board, name)

    def call(*args, **kwargs):
      self._runs.wait()
      return method(*args, **kwargs)

    return call


def trim(board):
  """Fills a log, and removes its first block."""
  successor = board_log.BoardLog(board, SECRET)
  for position in range(ENTRIES):
    assert successor.append(position, TICK)
  successor.trim(ENTRIES - 4 * board_log.BLOCK)
  assert successor.trimmed() == board_log.BLOCK


def put_without_a_look(board):
  """Puts an entry where it was removed, as one that ended right after that."""
  assert board.put("log/0/7", messages.pack(SECRET, "log/0/7", TICK))


def test_nothing_can_be_appended_where_the_log_was_trimmed():
  board = embedded.World().connect("one").board
  trim(board)
  late = board_log.BoardLog(board, SECRET)
  with pytest.raises(board_log.Trimmed):
    late.append(7, TICK)
  assert not late.has(7)


def test_the_marker_is_never_set_back():
  board = embedded.World().connect("one").board
  log = board_log.BoardLog(board, SECRET)
  for position in range(ENTRIES):
    log.append(position, TICK)

  class Stalls(board_log.BoardLog):
    """Stands still after it has looked where the log begins."""

    def trimmed(self):
      found = super().trimmed()
      log.trim(4 * board_log.BLOCK)
      return found

  Stalls(board, SECRET).trim(2 * board_log.BLOCK)
  assert log.trimmed() == 4 * board_log.BLOCK
  with pytest.raises(board_log.Trimmed):
    log.append(3 * board_log.BLOCK, TICK)


def test_whoever_finds_an_entry_looks_whether_it_was_trimmed():
  board = embedded.World().connect("one").board
  trim(board)
  log = board_log.BoardLog(board, SECRET)
  put_without_a_look(board)
  with pytest.raises(board_log.Trimmed):
    log.read(7, 0.1)
  with pytest.raises(board_log.Trimmed):
    log_reader.LogReader(log, LocalLine(), None).read(7, None, 0.1)


@near_engines.needs_notes
def test_a_reader_of_notes_looks_at_the_marker_too():
  with near_engines.near() as near:
    trim(near.one.board)
    log = board_log.BoardLog(near.one.board, SECRET, notes=near.one.notes)
    with pytest.raises(board_log.Trimmed):
      log.append(7, TICK)
    put_without_a_look(near.one.board)
    reader = log_reader.LogReader(
      board_log.BoardLog(near.two.board, SECRET), LocalLine(), near.two.notes
    )
    with pytest.raises(board_log.Trimmed):
      reader.read(7, near.one.exchange.address, 0.1)


class _World(embedded.World):
  """A world in which the board of the first replica can stall.

  Attributes:
    stalling: that board.
  """

  def connect(self, name):
    made = super().connect(name)
    if name != "0":
      return made
    self.stalling = StallingBoard(made.board)
    return engine.Engine(self.stalling, made.exchange)


def test_a_commit_at_a_trimmed_position_is_told_to_nobody():
  world = _World()
  results, told = [runs.Result(), runs.Result()], []

  def train_old(replica, result):
    runs.to_step(2)(replica, result)
    assert replica.is_chief
    world.stalling.stall()
    told.append(replica.step(runs.compute(replica, 2)[0]))
    while not result.outcomes[-1].global_step > ENTRIES:
      runs.to_step(replica.global_step + 1)(replica, result)

  def train_next(replica, result):
    assert world.stalling.stalled.wait(10.0)
    runs.to_step(ENTRIES)(replica, result)
    assert replica.is_chief
    world.stalling.wake()
    old.join(20.0)

  options = {"k": 1, "n": 2, "timeout": 15.0}
  old = runs.start(runs.make(world, 0, **options), train_old, results[0])
  following = runs.start(runs.make(world, 1, **options), train_next, results[1])
  runs.finish([old, following], 60.0)
  assert [r.error for r in results] == [None] * 2
  # The one history has the successor's gradient at that step.
  assert not told[0].accepted
  assert told[0].reason == "lost"
  assert results[0].outcomes[-1].accepted
  assert results[1].counts["applied"] == ENTRIES - 2
