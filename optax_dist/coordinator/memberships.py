"""The replicas of this process: a second `join` with the same number is an error.

The coordinator could not distinguish two replicas with one number, and each would wait
for the other to end. But a notebook's cell that runs again replaces the replica of its
earlier run.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from optax_dist.coordinator import errors
from optax_dist.coordinator.training import participant

if TYPE_CHECKING:
  from optax_dist.coordinator.replica import Replica

_REMEDY = (
  "For several models in one process give each a run= of its own; to take part"
  " anew, end the earlier one first: its `with` block, its close(), or that of"
  " as_optimizer(...)."
)


class Membership:
  """One replica of this process, from the beginning of `join` on.

  Attributes:
    key: the coordinator's address, the name of the run, and the replica's number.
    part: its part in the run; None until `join` has created it.
    follows: closed memberships of this process in that run (`messages.Hello`); none
      if its number had none.
  """

  def __init__(self, owner: types.FrameType, *key: str):
    """Creates it; `begin` makes it known.

    Args:
      owner: the program or notebook cell that it is for.
      *key: its key.
    """
    self.key = key
    self.part: participant.Participant | None = None
    self.follows: tuple[tuple[str, int], ...] = ()
    self._owner = owner
    self._since = time.monotonic()
    self._process = os.getpid()
    self._replica: weakref.ref[Replica] | None = None
    # Whether `join` has failed.
    self.given_up = False
    self._remove_handlers: Callable[[], None] = lambda: None
    self._ended: BaseException | None = None

  def belongs_to(
    self,
    replica: Replica,
    part: participant.Participant,
    remove_handlers: Callable[[], None],
  ) -> None:
    """Notes that `join` has succeeded; the membership ends when the replica is closed.

    Args:
      replica: the replica that the program gets.
      part: its part in the run.
      remove_handlers: removes its signal handlers.
    """
    self._replica, self.part = weakref.ref(replica), part
    self._remove_handlers = remove_handlers
    if self._ended is not None:
      raise self._ended

  @property
  def is_ours(self) -> bool:
    """Whether this process has made it, and not the one that it was forked from."""
    return self._process == os.getpid()

  @property
  def is_open(self) -> bool:
    """Whether it takes part in the run, or is about to."""
    if self.given_up or not self.is_ours:
      return False
    part = self.part
    if part is None:
      return True
    return not (part.closed or part.is_over or part.inbox.failure)

  def is_used(self) -> bool:
    """Whether the program that it was made for may still use it."""
    if not _runs(self._owner):
      return False
    if self._replica is not None:
      gc.collect()
    return self._replica is None or self._replica() is not None

  def refuse(self) -> errors.CoordinatorError:
    """The error of a second `join`."""
    seconds = time.monotonic() - self._since
    _, run, number = self.key
    run = f"run {run!r}" if run else "the run"
    return errors.CoordinatorError(
      f"This process is replica {number} of {run} already, since it called"
      f" join {seconds:.1f} s ago. {_REMEDY}"
    )

  def replace(self) -> None:
    """Ends an unused membership, and reports its replica as lost."""
    replaced = errors.CoordinatorError(
      f"Replica {self.key[-1]} has been replaced by a later join of its own"
      f" process. {_REMEDY}"
    )
    self.end("its process has joined again", replaced)

  def end(self, reason: str, error: BaseException) -> None:
    """Ends it, from another thread; see `Participant.abort`."""
    self._ended = error
    if self.part is not None and self.is_ours and not self.part.closed:
      self.part.abort(reason, error)
      self._remove_handlers()


class Owner:
  """The program or notebook cell that memberships are for: that of the caller.

  Attributes:
    frame: its frame.
    made: its memberships, from their beginning on.
  """

  def __init__(self) -> None:
    self.frame = _top_frame()
    self.made: list[Membership] = []

  @contextlib.contextmanager
  def joins(self) -> Iterator[None]:
    """Assigns replicas that this thread joins inside the block to this owner."""
    _calls.owner = self
    try:
      yield
    finally:
      _calls.owner = None


_lock = threading.Lock()
# The owner for which this thread calls `join`, if not its own program or cell.
_calls = threading.local()
# The latest membership of each number, by address and run.
_known: dict[tuple[str, ...], Membership] = {}


@contextlib.contextmanager
def begin(*key: str) -> Iterator[Membership]:
  """Makes a membership known, while it is made; afterwards it is open.

  Args:
    *key: see `Membership`.

  Yields:
    The membership.

  Raises:
    CoordinatorError: this process is that replica already.
  """
  owner = getattr(_calls, "owner", None) or Owner()
  made = Membership(owner.frame, *key)
  owner.made.append(made)
  with _lock:
    if not _known:
      atexit.register(_leave_all)
    earlier = _known.get(made.key)
    if earlier is not None and earlier.is_open and earlier.is_used():
      raise earlier.refuse()
    _known[made.key] = made
  if earlier is not None:
    earlier.replace()
  try:
    made.follows = _followed(made, earlier)
    yield made
  except BaseException:
    made.given_up = True
    raise


def _followed(
  made: Membership, earlier: Membership | None
) -> tuple[tuple[str, int], ...]:
  if earlier is None:
    return ()
  with _lock:
    ours = [m for m in _known.values() if m.key[:2] == made.key[:2]]
  closed: set[tuple[str, int]] = set()
  for membership in (*ours, earlier):
    if membership is not made and membership.is_ours and not membership.is_open:
      closed.update(membership.follows)
      if membership.part is not None:
        seen = membership.part.inbox
        closed.add((seen.joined.run_id, seen.joined.incarnation))
  return tuple(sorted(closed))


def _leave_all() -> None:
  """At exit, ends replicas that the program has not closed.

  It has to happen now: later in the exit no thread can run.
  """
  error: BaseException | None = getattr(sys, "last_value", None)
  for made in list(_known.values()):
    part = made.part
    if part is None or not made.is_open:
      continue
    with contextlib.suppress(errors.CoordinatorError):
      if error is None:
        part.leave()
        part.close()
      else:
        part.abort(f"it has raised {error!r:.200}", error)


def _top_frame() -> types.FrameType:
  """The program or notebook cell that the caller belongs to."""
  frame: types.FrameType | None = sys._getframe(1)
  assert frame is not None
  while frame.f_back is not None:
    # The names that Python and IPython give to the code of modules and cells.
    if frame.f_code.co_name.startswith(("<module>", "<cell line")):
      break
    frame = frame.f_back
  return frame


def _runs(wanted: types.FrameType) -> bool:
  """Whether a frame is on the stack of any thread."""
  for top in sys._current_frames().values():
    frame: types.FrameType | None = top
    while frame is not None:
      if frame is wanted:
        return True
      frame = frame.f_back
  return False
