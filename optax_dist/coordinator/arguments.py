"""Checks of each argument of `join`, before any is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from optax_dist._internal import checks
from optax_dist.coordinator.protocol import codec, entries
from optax_dist.coordinator.training import preemption
from optax_dist.coordinator.transport import addresses, handshake, tls


def check(given: Mapping[str, Any]) -> None:
  """Checks arguments by themselves; None stands for what was left out.

  Args:
    given: all arguments, or some of them.

  Raises:
    ValueError: one is not what it can be; the message names it.

  Example:
    >>> check({"coordinator_address": "10.0.0.1:29300", "replica": None})
    >>> check({"coordinator_address": 29300})
    Traceback (most recent call last):
    ValueError: `coordinator_address` must be a string, got 29300.
  """
  for name, check_value in _CHECKS.items():
    if given.get(name) is not None:
      check_value(name, given[name])


def _text(name: str, value: Any) -> None:
  checks.kind(name, value, str, "a string")


def _secret(name: str, value: Any) -> None:
  checks.kind(name, value, str | bytes, "a string or bytes")
  handshake.check_secret(value.encode() if isinstance(value, str) else value)


def _ports(name: str, value: Any) -> None:
  addresses.parse_ports(f"{value}")


_CHECKS: Mapping[str, Callable[[str, Any], object]] = {
  "replicas_to_aggregate": checks.count,
  "total_num_replicas": lambda name, value: checks.count(
    name, value, most=codec.MOST_NAMED
  ),
  "coordinator_address": _text,
  "replica": lambda name, value: checks.count(name, value, least=0),
  "lower_on_leave": checks.flag,
  "lower_on_loss": checks.flag,
  "lineage": lambda name, value: entries.as_lineage(value),
  "secret": _secret,
  "certificates": lambda name, value: checks.kind(
    name, value, tls.Certificates, "Certificates(certificate, key, authority)"
  ),
  "bind": _text,
  "ports": _ports,
  "advertise": _text,
  "start_coordinator": checks.flag,
  "on_sigterm": lambda name, value: checks.one_of(
    name, value, preemption.MODES
  ),
}
