"""All deadlines of a run, in one place, in an order that always holds.

  a member's `transfer` < `round` < the run's own timeout < a replica's own wait

So a member that lacks bytes names the member that stalls long before the coordinator
ends the run, and the coordinator gives its reason before replicas end by themselves.
Three durations decide all deadlines: `timeout`, `transfer_timeout` and
`silence_timeout` of `join`. Two limits adapt to observed durations, by a `Rule`: the
silence of a connection, and a step inside a replica.

The core's clock stands still while its process is stopped (`Transport.now`), so no
deadline expires because a process was asleep.
"""

from __future__ import annotations

import dataclasses

from optax_dist.coordinator.protocol.liveness import Rule

# Some 30 years, in seconds: a wait that every operating system's timer can represent.
LONGEST = 1e9
# Defaults, in seconds.
_TRANSFER, _RECONNECT = 10.0, 5.0
# A member can send its slice of the mean only once it has all gradients. So the mean
# may take longer than the gradients, and a member that lacks a gradient reports first.
_MEAN = 1.5


@dataclasses.dataclass(frozen=True, slots=True)
class Deadlines:
  """How long members, coordinator and replicas wait, in seconds.

  Attributes:
    transfer: after this long without a byte of a member's gradient, another member
      reports that gradient as missing; also the limit for a snapshot, and for
      messages that a coordinator should answer at once.
    mean: the same for a member's slice of the mean, once the gradients were sent.
    round: how long an early round may take before it is announced again.
    reconnect: how long members have to call a coordinator that has started again;
      pauses between calls are based on it.
    silence: how long a peer may be silent at most.
    timeout: after this long without progress the coordinator ends the run.
    replica: after this long a replica that waits ends by itself; the coordinator
      should have said why before.
  """

  transfer: float
  mean: float
  round: float
  reconnect: float
  silence: float
  timeout: float
  replica: float


def of(
  timeout: float,
  transfer_timeout: float | None = None,
  silence_timeout: float | None = None,
) -> Deadlines:
  """The deadlines of a run.

  Args:
    timeout: how long the run may make no progress while a replica waits.
    transfer_timeout: how long a transfer may make no progress; None for 10 s.
    silence_timeout: how long a peer may be silent; None: it follows what is seen
      (`silence`), and 5 s to call a coordinator that has started again.

  Returns:
    Both are shortened where `timeout` is too short for them: to an eighth and
    to a half of it.

  Example:
    >>> default = of(300.0)
    >>> default.transfer, default.mean, default.round, default.silence
    (10.0, 15.0, 20.0, 60.0)
    >>> of(16.0).round
    4.0
  """
  transfer = min(transfer_timeout or _TRANSFER, timeout / 8)
  reconnect = min(silence_timeout or _RECONNECT, timeout / 2)
  longest = reconnect
  if not silence_timeout:
    longest = max(reconnect, silence(timeout).ceiling)
  return Deadlines(
    transfer,
    _MEAN * transfer,
    2.0 * transfer,
    reconnect,
    longest,
    timeout,
    timeout + 3.0 * reconnect + transfer,
  )


def silence(timeout: float) -> Rule:
  """The rule for the silence of a connection.

  Heartbeats come every second, and a network outage of 3 s must be tolerated.

  Args:
    timeout: how long the run may make no progress.

  Example:
    >>> silence(300.0)
    Rule(floor=5.0, first=30.0, ceiling=60.0, factor=2.5, least=20)
  """
  most = timeout / 5
  return Rule(min(5.0, most), min(30.0, most), min(60.0, most))


def silence_of_peers(timeout: float, silence_timeout: float | None) -> Rule:
  """How long a peer may be silent: by `silence`, or no longer than was chosen.

  Args:
    timeout: how long the run may make no progress.
    silence_timeout: see `of`.

  Example:
    >>> silence_of_peers(300.0, 1.0)
    Rule(floor=1.0, first=1.0, ceiling=1.0, factor=2.5, least=20)
  """
  if silence_timeout is None:
    return silence(timeout)
  reconnect = of(timeout, None, silence_timeout).reconnect
  return Rule(reconnect, reconnect, reconnect)


def steps(timeout: float) -> Rule:
  """The rule for a step inside a replica, which others may wait for.

  Generous, because a slow step is ended: ten times the 99th percentile.

  Args:
    timeout: how long the run may make no progress.

  Example:
    >>> steps(300.0)
    Rule(floor=60.0, first=180.0, ceiling=180.0, factor=10.0, least=20)
  """
  most = 0.6 * timeout
  return Rule(min(60.0, most), most, most, factor=10.0)
