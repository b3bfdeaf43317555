"""The options of a run; only the journal may differ per replica."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any

from optax_dist.coordinator.aggregation import wire_formats as wires
from optax_dist.coordinator.protocol import arrivals
from optax_dist.coordinator.protocol import deadlines as dl
from optax_dist.coordinator.transport import interface as transports

# Limits in seconds: the longest is some 30 years, which every clock can wait
# for; the shortest lets an event loop do other work between two heartbeats.
_LONGEST, _SHORTEST_SILENCE = 1e9, 0.05


@dataclasses.dataclass(frozen=True)
class Options:
  """Deadlines in seconds, sizes in bytes; see `join`.

  Deadlines that are None adapt to what is observed (docs/coordinator.md).

  Attributes:
    timeout: how long the run may make no progress while a replica waits.
    attempt_timeout: how long a transfer of a gradient, mean or snapshot may
      make no progress; None: 10 s. At most an eighth of `timeout` is used.
    leader_timeout: silence of the leader after which another replica takes
      over, and of any replica after which it is lost; None: two and a half
      times the 99th percentile of its silences, at least 5 s. At most half of
      `timeout` is used.
    step_timeout: how long a step may take inside a replica until its watchdog
      gives it up; 0 for no watchdog; None: ten times the 99th percentile, while
      others wait, if a launcher restarts the replica; otherwise it is only
      logged.
    stall_warning: time to wait before the missing replicas are logged.
    inline_bytes: gradients up to this size are sent inline, in the messages.
    wire: wire format of gradients and means; one of `wire_formats.WIRES`.
    fingerprint_every: steps between comparisons of all replicas; 0 for none.
    journal: path that the leader writes events to; None for no journal.
    config: any JSON object to record in the journal.
    run: a name that keeps runs on one store apart: two models that train at the
      same time, or a job that starts again while its store stays up.
  """

  timeout: float = 300.0
  attempt_timeout: float | None = None
  leader_timeout: float | None = None
  step_timeout: float | None = None
  stall_warning: float = 10.0
  inline_bytes: int = 64 << 10
  wire: str = "float32"
  fingerprint_every: int = 0
  journal: str | os.PathLike[str] | None = None
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  run: str = ""

  def __post_init__(self) -> None:
    most = f"positive seconds, at most {_LONGEST:.0e}"
    seconds = lambda x: _is_number(x) and 0 < x <= _LONGEST
    self._check("timeout", seconds, most)
    for name in ("attempt_timeout", "leader_timeout"):
      self._check(name, lambda x: x is None or seconds(x), most)
    self._check(
      "leader_timeout",
      lambda x: x is None or x >= _SHORTEST_SILENCE,
      f"at least {_SHORTEST_SILENCE} seconds",
    )
    self._check(
      "step_timeout",
      lambda x: x is None or x == 0 or seconds(x),
      "seconds, 0 or more (0 for no watchdog)",
    )
    self._check(
      "stall_warning",
      lambda x: _is_number(x) and x >= 0,
      "seconds, 0 or more",
    )
    self._check(
      "attempt_timeout",
      lambda x: (x or 0.0) <= self.timeout,
      f"at most timeout={self.timeout!r}",
    )
    self._check(
      "inline_bytes",
      lambda x: _is_whole(x) and 0 <= x <= 1 << 20,
      "an integer from 0 to 1048576",
    )
    self._check(
      "fingerprint_every",
      lambda x: _is_whole(x) and x >= 0,
      "an integer, 0 or more",
    )
    path = lambda x: isinstance(x, str | os.PathLike) and bool(os.fspath(x))
    self._check("journal", lambda x: x is None or path(x), "a path or None")
    self._check("config", lambda x: isinstance(x, Mapping), "a mapping")
    self._check("run", lambda x: isinstance(x, str), "a name")
    wires.codec(self.wire, "float32")  # type: ignore[arg-type]

  def _check(
    self, name: str, fits: Callable[[Any], bool], allowed: str
  ) -> None:
    value = getattr(self, name)
    if not fits(value):
      raise ValueError(f"{name} must be {allowed}, got {value!r}.")

  # What follows from them.

  @property
  def deadlines(self) -> dl.Deadlines:
    """How long everybody waits."""
    return dl.of(self.timeout, self.attempt_timeout, self.leader_timeout)

  @property
  def silence(self) -> arrivals.Rule:
    """How long a peer may be silent."""
    if self.leader_timeout is None:
      return dl.silence(self.timeout)
    return transports.fixed(self.deadlines.pace)

  @property
  def steps(self) -> float | arrivals.Rule:
    """How long a step may take inside a replica, or the rule that finds it."""
    if self.step_timeout is None:
      return dl.steps(self.timeout)
    return self.step_timeout


def of(user: str, settings: Mapping[str, Any]) -> Options:
  """Creates options from keyword arguments.

  Args:
    user: the function they were passed to, for the message.
    settings: fields of `Options`.

  Raises:
    TypeError: there is no such field.
    ValueError: a value is invalid.
  """
  known = [field.name for field in dataclasses.fields(Options)]
  for name in settings.keys() - known:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise TypeError(f"{user} got an unexpected argument {name!r}.{hint}")
  return Options(**settings)


def _is_number(value: object) -> bool:
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)
