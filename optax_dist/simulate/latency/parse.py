"""Parses latencies given as text, as on the command line."""

from __future__ import annotations

from optax_dist.simulate.latency.distributions import (
  Distribution,
  Latency,
  family_of,
)
from optax_dist.simulate.latency.hosts import SlowHosts


def parse_latency(text: str) -> Latency:
  """Parses a latency from its name and numbers.

  Args:
    text: `NAME:PARAMETERS`, with a name in `FAMILIES`; or
      `slow-hosts:SHARE,FACTOR,NAME:PARAMETERS`, where that share of the hosts
      always takes that many times longer.

  Returns:
    The latency.

  Raises:
    ValueError: the text is invalid; the message says what is expected.

  Example:
    >>> str(parse_latency("pareto:1,2.5"))
    'pareto:1,2.5'
    >>> parse_latency("exponential:1,2")
    Traceback (most recent call last):
    ValueError: exponential takes 1 numbers, exponential:mean; got 2.
  """
  name, _, rest = text.strip().partition(":")
  if name == "slow-hosts":
    share, factor, base = (*rest.split(",", 2), "", "", "")[:3]
    if not base:
      raise ValueError(
        "slow-hosts takes slow-hosts:share,factor,NAME:PARAMETERS, got"
        f" {text!r}."
      )
    return SlowHosts(_number(share), _number(factor), parse_latency(base))
  family_of(name)
  parts = rest.split(",") if rest else []
  return Distribution(name, tuple(map(_number, parts)))


def _number(text: str) -> float:
  try:
    return float(text)
  except ValueError:
    raise ValueError(
      f"the parameters of a latency are numbers, got {text!r}."
    ) from None
