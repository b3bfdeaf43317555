"""Since when a step takes gradients without being committed."""

from __future__ import annotations

from optax_dist import quorum
from optax_dist.coordinator.protocol.entries import Rules


class Stall:
  """Times a step, to warn of one that takes long and to end the run at last.

  Attributes:
    since: since when its members wait; None if none do.
  """

  def __init__(self, rules: Rules):
    """Starts without a step."""
    self._warning, self._timeout = rules.stall_warning, rules.timeout
    self.since: float | None = None
    self._warned = 0.0

  def begin(self, since: float, excused: float = 0.0) -> None:
    """Members wait from now on.

    Args:
      since: when it was.
      excused: seconds that count for `timeout` but not for warnings.
    """
    self.since, self._warned = since, excused

  def end(self) -> None:
    """Nobody waits."""
    self.since = None

  def deadlines(self) -> list[float]:
    """When `check` may find something."""
    if self.since is None:
      return []
    warning = self.since + self._warned + self._warning
    return [warning, self.since + self._timeout]

  def check(self, now: float) -> tuple[float, bool] | None:
    """How long members have waited, and whether that is too long.

    Returns:
      None unless there is something to say.
    """
    if self.since is None:
      return None
    waited = now - self.since
    if waited >= self._timeout:
      return waited, True
    if waited >= self._warned + self._warning:
      self._warned = waited
      return waited, False
    return None


def missing(state: quorum.State) -> str:
  """Whom a step waits for, for people."""
  found = quorum.missing(state)
  texts = [
    f"{what}: replica {', '.join(map(str, replicas))}"
    for what, replicas in (
      ("computing", found.computing),
      ("aggregating", found.reporting),
      ("absent", found.absent),
    )
    if replicas
  ]
  return "waiting for " + ("; ".join(texts) or "nobody")
