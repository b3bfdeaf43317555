"""The options of a run; only the journal may differ per replica."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import os
from collections.abc import Mapping
from typing import Any

from optax_dist.coordinator.aggregation import wire_formats as wires
from optax_dist.coordinator.protocol import arrivals
from optax_dist.coordinator.protocol import deadlines as dl

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
    wire: wire format of gradients; one of `wire_formats.WIRES`.
    mean_wire: wire format of the mean, one of `wire_formats.WIRES`. A low-bit one
      needs a low-bit `wire`: the replica that averages a slice adds the
      quantization error of its mean to the next one. None: as the gradients, but
      at least 4 bits, and bfloat16 if the strategy does not add means up.
    error_feedback: decay, from 0 to 1, of the quantization error that is added
      to the next gradient, or mean, with a low-bit wire format.
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
  mean_wire: str | None = None
  error_feedback: float = 1.0
  fingerprint_every: int = 0
  journal: str | os.PathLike[str] | None = None
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  run: str = ""

  def __post_init__(self) -> None:
    for name in ("timeout", "attempt_timeout", "leader_timeout"):
      value = getattr(self, name)
      if value is None and name != "timeout":
        continue
      if not (_is_number(value) and 0 < value <= _LONGEST):
        raise ValueError(
          f"{name} must be positive seconds, at most {_LONGEST:.0e}, got"
          f" {value!r}."
        )
    if (self.leader_timeout or math.inf) < _SHORTEST_SILENCE:
      raise ValueError(
        f"leader_timeout must be at least {_SHORTEST_SILENCE} seconds, got"
        f" {self.leader_timeout!r}."
      )
    if self.step_timeout is not None and not (
      _is_number(self.step_timeout) and 0 <= self.step_timeout <= _LONGEST
    ):
      raise ValueError(
        "step_timeout must be seconds, 0 or more (0 for no watchdog), got"
        f" {self.step_timeout!r}."
      )
    if not (_is_number(self.stall_warning) and self.stall_warning >= 0):
      raise ValueError(
        f"stall_warning must be seconds, 0 or more, got {self.stall_warning!r}."
      )
    if (self.attempt_timeout or 0.0) > self.timeout:
      raise ValueError(
        f"attempt_timeout must be at most timeout={self.timeout!r}, got "
        f"{self.attempt_timeout!r}."
      )
    if not (_is_whole(self.inline_bytes) and 0 <= self.inline_bytes <= 1 << 20):
      raise ValueError(
        "inline_bytes must be an integer from 0 to 1048576, got"
        f" {self.inline_bytes!r}."
      )
    if not (_is_whole(self.fingerprint_every) and self.fingerprint_every >= 0):
      raise ValueError(
        "fingerprint_every must be an integer, 0 or more, got"
        f" {self.fingerprint_every!r}."
      )
    if self.journal is not None and not (
      isinstance(self.journal, str | os.PathLike) and os.fspath(self.journal)
    ):
      raise ValueError(f"journal must be a path or None, got {self.journal!r}.")
    if not isinstance(self.config, Mapping):
      raise ValueError(f"config must be a mapping, got {self.config!r}.")
    if not isinstance(self.run, str):
      raise ValueError(f"run must be a name, got {self.run!r}.")
    wires.codec(self.wire, "float32")  # type: ignore[arg-type]
    if self.mean_wire is not None:
      wires.check_mean_wire(self.wire, self.mean_wire)
    if not (_is_number(self.error_feedback) and 0 <= self.error_feedback <= 1):
      raise ValueError(
        f"error_feedback must be from 0 to 1, got {self.error_feedback!r}."
      )
    if self.error_feedback != 1 and not wires.feeds_back(self.wire):
      raise ValueError(
        f"error_feedback={self.error_feedback!r} is for wires of few bits; what"
        f" wire={self.wire!r} leaves out is not fed back."
      )

  # What follows from them.

  @property
  def deadlines(self) -> dl.Deadlines:
    """How long everybody waits."""
    return dl.of(self.timeout, self.attempt_timeout, self.leader_timeout)

  @property
  def silence(self) -> float | arrivals.Rule:
    """How long a peer may be silent, or the rule that finds it."""
    if self.leader_timeout is None:
      return dl.silence(self.timeout)
    return self.deadlines.pace

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
