"""What a launcher knows of a job's other launchers: their notices, and ages.

It has no clock and reads nothing itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from optax_dist.coordinator.extras.hosts.notices import Notice

# Seconds that a host may take to connect for the first time, or more if it may be
# silent for longer.
_MEET = 300.0
# Seconds after which a notice that doesn't change is of a launcher that ended.
_SETTLED = 1.5


@dataclasses.dataclass
class _Seen:
  """What was read under a host's key.

  Attributes:
    notice: the latest notice; None if it has written none.
    since: when its key was first read; None before that.
    changed: when its notice changed: an unchanged one may be of an earlier
      launch.
  """

  notice: Notice | None = None
  since: float | None = None
  changed: float = -math.inf


class Peers:
  """The launchers of a job, as one of them sees the others.

  Attributes:
    meet: seconds that a host may take to connect for the first time.

  Example:
    >>> peers = Peers(0, Notice("a"), [1], 0.0, silence=6.0)
    >>> peers.update(1, Notice("b", beat=7), 1.0)  # It may have ended long ago.
    ''
    >>> peers.is_silent(1, 1.0)
    True
    >>> peers.update(1, Notice("b", beat=8), 2.0)
    ''
    >>> peers.is_silent(1, 8.0), peers.is_silent(1, 9.0), peers.is_gone(1, 15.0)
    (False, True, True)
  """

  def __init__(
    self,
    host: int,
    own: Notice,
    hosts: Iterable[int],
    now: float,
    silence: float = 60.0,
  ):
    """Starts without knowledge of the others.

    Args:
      host: the index of this host.
      own: the first notice of this launcher.
      hosts: the others whose notices it reads.
      now: the time.
      silence: seconds that a host may be silent; it is gone after twice as long.
    """
    self.host, self.own = host, own
    self._began, self._silence, self.meet = now, silence, max(_MEET, silence)
    self._seen = {h: _Seen() for h in sorted({host, *hosts})}

  @property
  def hosts(self) -> list[int]:
    """The hosts whose notices are read, including this one."""
    return list(self._seen)

  def update(self, host: int, notice: Notice | None, now: float) -> str:
    """Takes what was read under a host's key.

    Args:
      host: its index.
      notice: its notice; None if it has not written one.
      now: the time.

    Returns:
      Why this launcher can't take part in the job; "" if it can.
    """
    seen = self._seen[host]
    before, first = seen.notice, seen.since is None
    if first:
      seen.since = now
    if notice is None or notice == before:
      return ""
    seen.notice = notice
    if first:
      return ""
    seen.changed = now
    if host != self.host:
      return self._difference(notice)
    if notice.launcher == self.own.launcher:
      return ""
    return (
      f"Two launchers say that they are on host {host}: this one"
      f" ({self.own.process}) and another ({notice.process}). Give each host a"
      " --node-rank of its own, and start one launcher there."
    )

  def notice(self, host: int) -> Notice | None:
    """The latest notice of a host, perhaps of an earlier launcher."""
    return self._seen[host].notice

  def was_read(self, host: int) -> bool:
    """Whether it is known if a host has written a notice."""
    return self._seen[host].since is not None

  def may_write(self, now: float) -> bool:
    """Whether no other launcher writes under this host's key."""
    own = self._seen[self.host]
    if own.since is None:
      return False
    others = own.notice and own.notice.launcher != self.own.launcher
    return not others or now - own.since >= _SETTLED

  def is_silent(self, host: int, now: float) -> bool:
    """Whether a host has not connected, or has been silent for too long."""
    return now - self._seen[host].changed > self._silence

  def is_gone(self, host: int, now: float) -> bool:
    """Whether it is useless to wait for a host any longer."""
    if self.came(host):
      return now - self._seen[host].changed > 2 * self._silence
    return now - self._began >= self.meet

  def why_silent(self, host: int, now: float) -> str:
    """What is wrong with a silent host, for people."""
    words = f"the launcher of host {host}"
    if not self.came(host):
      return f"{words} has not connected"
    return f"{words} was silent for {now - self._seen[host].changed:.0f} s"

  def came(self, host: int) -> bool:
    """Whether a host's notice has changed, and so is of this launch."""
    return self._seen[host].changed > -math.inf

  def _difference(self, notice: Notice) -> str:
    """Names the settings that differ from another launcher's, or ""."""
    mine, theirs = dict(self.own.settings), dict(notice.settings)
    differ = [name for name in mine if mine[name] != theirs.get(name)]
    if not differ:
      return ""
    shown = lambda values: ", ".join(
      f"{name} {values.get(name, '(none)')}" for name in differ
    )
    return (
      "The launchers of the job have different settings:"
      f" {shown(mine)} here ({self.own.process}), {shown(theirs)} there"
      f" ({notice.process}). Start all of them with the same."
    )
