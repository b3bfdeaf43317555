"""Leadership moves to the member that is nearest to the store.

Each step waits for the store, so a leader that is far from it slows down all.
"""

from __future__ import annotations

from optax_dist.coordinator.protocol.entries import Incarnation, Process
from optax_dist.coordinator.protocol.leader.outbox import Outbox
from optax_dist.coordinator.protocol.leader.roster import Roster
from optax_dist.coordinator.protocol.messages import TakeOver

# A member that is so much nearer to the store, in seconds and as a part of the
# leader's own distance, becomes leader.
_NEARER, _NEARER_PART = 0.005, 0.5


class Succession:
  """The member to which a leader hands its leadership, if there is one."""

  def __init__(self, leader: Process, roster: Roster, out: Outbox):
    """Starts without a successor.

    Args:
      leader: the leader's process.
      roster: the members.
      out: where messages go.
    """
    self._leader, self._roster, self._out = leader, roster, out
    self._successor: Incarnation | None = None

  def look(self) -> None:
    """Finds a member that is much nearer to the store than the leader."""
    own = self._roster.of_process(self._leader)
    if own is None:
      return
    most = min(own.store_delay - _NEARER, own.store_delay * _NEARER_PART)
    near = [s for s in self._roster if 0.0 < s.store_delay <= most]
    key = lambda s: (s.store_delay, s.member.incarnation)
    self._successor = None
    if near:
      self._successor = min(near, key=key).member.incarnation

  def hand_over(self, step: int | None) -> None:
    """Hands leadership over; the leader calls this while it has nothing to lose.

    The successor claims leadership like any replica, so if the leader puts a
    record first, everything goes on as before.

    Args:
      step: the step whose state the successor must have; None if it reads all
        that it needs in the log.
    """
    if self._successor is None:
      return
    state = self._roster.get(self._successor)
    if state is None or state.leaving is not None or state.needs:
      self._successor = None
    elif step is None or state.has(step):
      self._successor = None
      self._out.say(state, TakeOver())
