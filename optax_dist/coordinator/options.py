"""The options of a run; only the journal may differ per replica."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Mapping
from typing import Any

from optax_dist._internal import checks
from optax_dist.coordinator import journal as journals
from optax_dist.coordinator.aggregation import wire_formats as wires
from optax_dist.coordinator.protocol import deadlines as dl
from optax_dist.coordinator.protocol import liveness

# Seconds that leave an event loop time for other work between two heartbeats.
_SHORTEST_SILENCE = 0.05
# Bytes of JSON.
_MOST_CONFIG = 1 << 20
# The coordinator keeps the mean of each of the last 64 steps, and a message has some 20
# sums in a deterministic run.
_MOST_INLINE = 128 << 10
# Sample counts start from this at most, and still fit into a message's 64 bits.
_MOST_SAMPLES = 2**62
# Arguments of TensorFlow's optimizers, and what does the same here.
_ELSEWHERE = {
  "variable_averages": (
    "averages of parameters belong to the optimizer, as"
    " optax.chain(optimizer, optax_dist.params_ema(decay)), and"
    " optax_dist.averaged_params(replica.opt_state, replica.params) reads them"
  ),
  "variables_to_average": "it is optax_dist.params_ema(decay, mask=...)",
  "num_updates": "it is optax_dist.params_ema(decay, num_updates=True)",
}


@dataclasses.dataclass(frozen=True)
class Options:
  """Deadlines in seconds, sizes in bytes; see `join`.

  Deadlines that are None adapt to what is observed (docs/coordinator.md).

  Attributes:
    timeout: how long the run may make no progress while a replica waits.
    transfer_timeout: how long a transfer of a gradient, mean or snapshot may
      make no progress; None: 10 s. At most an eighth of `timeout` is used.
    silence_timeout: silence of a connection after which its peer is lost, and
      the time that members have to call a coordinator that has started again;
      None: two and a half times the 99th percentile of the silences, at least
      5 s. At most half of `timeout` is used.
    step_timeout: how long a step may take inside a replica until its watchdog
      evicts the replica; 0 for no watchdog; None: ten times the 99th
      percentile, while others wait, if a launcher restarts the replica;
      otherwise it is only logged.
    stall_warning: time to wait before the missing replicas are logged.
    inline_bytes: gradients up to this size are sent inline, in the messages; at
      most 128 KiB.
    wire: wire format of gradients and means; one of `wire_formats.WIRES`.
    fingerprint_every: steps between comparisons of all replicas; 0 for none.
    max_skipped: with `data`, samples that may be skipped because gradients on
      them are not finite, before the end of the data is an error; None: as many
      as a step has.
    journal: path that the coordinator writes events to; None for no journal.
    config: any JSON object to record in the journal.
    run: a name that keeps runs of one coordinator apart: two models that train at the
      same time, say.
  """

  timeout: float = 300.0
  transfer_timeout: float | None = None
  silence_timeout: float | None = None
  step_timeout: float | None = None
  stall_warning: float = 10.0
  inline_bytes: int = 64 << 10
  wire: str = "float32"
  fingerprint_every: int = 0
  max_skipped: int | None = None
  journal: str | os.PathLike[str] | None = None
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  run: str = ""

  def __post_init__(self) -> None:
    adaptive = ("transfer_timeout", "silence_timeout", "step_timeout")
    for name in ("timeout", *adaptive, "stall_warning"):
      value = getattr(self, name)
      if value is not None or name not in adaptive:
        checks.rate(name, value, positive=name != "step_timeout")
        checks.at_most(name, value, dl.LONGEST)
    if self.transfer_timeout is not None:
      checks.at_most("transfer_timeout", self.transfer_timeout, self.timeout)
    checks.count("inline_bytes", self.inline_bytes, least=0)
    checks.at_most("inline_bytes", self.inline_bytes, _MOST_INLINE)
    checks.count("fingerprint_every", self.fingerprint_every, least=0)
    if self.max_skipped is not None:
      checks.count("max_skipped", self.max_skipped, least=0, most=_MOST_SAMPLES)
    checks.one_of("wire", self.wire, wires.WIRES)
    silence = self.silence_timeout
    if silence is not None and silence < _SHORTEST_SILENCE:
      raise ValueError(
        f"`silence_timeout` must be at least {_SHORTEST_SILENCE} seconds, got"
        f" {silence!r}."
      )
    if self.journal is not None:
      checks.path("journal", self.journal)
    checks.kind("config", self.config, Mapping, "a mapping")
    checks.kind("run", self.run, str, "a name")
    for name in ("journal", "run"):
      try:
        os.fspath(getattr(self, name) or "").encode()
      except UnicodeEncodeError:
        raise ValueError(
          f"`{name}` must be in UTF-8, to be sent to the coordinator; got"
          f" {getattr(self, name)!r}."
        ) from None
    nbytes = len(journals.to_json("config", dict(self.config)))
    if nbytes > _MOST_CONFIG:
      raise ValueError(
        f"`config` must have at most {_MOST_CONFIG:,} bytes of JSON, since replicas"
        f" send it to their coordinator; got {nbytes:,}."
      )

  # Derived values.

  @functools.cached_property
  def longest_wait(self) -> float:
    """Seconds that a replica waits for others: more than its core."""
    times = self.timeout, self.transfer_timeout, self.silence_timeout
    return dl.of(*times).replica + 1.0

  @property
  def silence(self) -> liveness.Rule:
    """How long a peer may be silent."""
    return dl.silence_of_peers(self.timeout, self.silence_timeout)

  @property
  def steps(self) -> liveness.Rule:
    """How long a step may take inside a replica."""
    if self.step_timeout is None:
      return dl.steps(self.timeout)
    limit = self.step_timeout
    return liveness.Rule(limit, limit, limit)


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
    if name in _ELSEWHERE:
      raise TypeError(f"{user} has no argument {name!r}: {_ELSEWHERE[name]}.")
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise TypeError(f"{user} got an unexpected argument {name!r}.{hint}")
  return Options(**settings)
