r"""Members that have just joined a run that goes on, which no step waits for yet.

A replica that is back would have all others wait until it has the state, has
compiled, and has computed its first gradient. So where a join would raise what a
step needs, it counts only once that gradient is there. If it came too late for its
step, its replica begins with the others, after the next commit; or at once if what
others deliver is not finite, as no commit may come of that:

    joined -> first gradient, in time -------------------> counts
                            \-> too late -> next commit -> counts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from optax_dist import quorum
from optax_dist.coordinator.protocol.entries import Incarnation
from optax_dist.coordinator.protocol.messages import SubmitGradient


def raises(state: quorum.State, join: quorum.Join) -> bool:
  """Whether a step would need one gradient more because of a join."""
  after, _ = quorum.step(state, join)
  return state.live > 0 and quorum.needed(after) > quorum.needed(state)


class Newcomers:
  """Who has just joined, and the first gradients that came too late."""

  def __init__(self) -> None:
    self._late: dict[Incarnation, SubmitGradient | None] = {}
    # When the last step was committed, and how long it took.
    self._committed, self._seconds = 0.0, 0.0
    self._is_due = False

  def __len__(self) -> int:
    return len(self._late)

  def __contains__(self, incarnation: Incarnation) -> bool:
    return incarnation in self._late

  def add(self, incarnation: Incarnation) -> None:
    """A member has joined."""
    self._late[incarnation] = None

  def remove(self, incarnation: Incarnation) -> SubmitGradient | None:
    """It is gone, or counts from now on; returns its late gradient."""
    return self._late.pop(incarnation, None)

  def committed(self, now: float) -> None:
    """A step is committed."""
    if self._committed:
      self._seconds = now - self._committed
    self._committed, self._is_due = now, True

  def begin(self) -> None:
    """Those who can begin shall do so now."""
    self._is_due = True

  def ends_in(self, now: float) -> float | None:
    """Seconds in which this step ends, if it takes as long as the last one."""
    if not self._seconds:
      return None
    return max(0.0, self._committed + self._seconds - now)

  def wait(
    self,
    incarnation: Incarnation,
    late: SubmitGradient,
    others: int,
    now: float,
  ) -> bool:
    """Whether a member should begin with the next step, and not amid this one.

    It is what costs less: that the others wait for it, or that it waits for them.

    Args:
      incarnation: the member.
      late: its gradient, which is stale.
      others: how many would wait.
      now: the time.
    """
    begun = now - self._committed
    waits = begun * others > self._seconds - begun and self._seconds > 0
    if waits:
      self._late[incarnation] = late
    return waits

  def due(self, begins: Callable[[Incarnation], bool]) -> Iterator[Incarnation]:
    """Who counts from this step on, once after each commit and each `begin`.

    Args:
      begins: whether a member without a gradient does.
    """
    if self._is_due:
      self._is_due = False
      for incarnation, late in list(self._late.items()):
        if late is not None or begins(incarnation):
          yield incarnation
