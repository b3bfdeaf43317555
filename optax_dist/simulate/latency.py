"""How long a gradient takes: distributions, hosts, and their names.

A *latency* is the distribution on one host; `hosts` returns the latency of each
host, which may differ.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from optax_dist._internal import checks


class Host(Protocol):
  """Seconds for one gradient on a host."""

  def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
    """Draws values, a float64 array `[size]`."""


class Latency(Protocol):
  """Seconds for one gradient on each host."""

  def hosts(self, n: int, rng: np.random.Generator) -> list[Host]:
    """The latency of each of n hosts."""


class Family(NamedTuple):
  """A kind of distribution.

  Attributes:
    names: the names of its parameters.
    draw: draws values, given a generator, their number and the parameters.
  """

  names: tuple[str, ...]
  draw: Callable[..., np.ndarray]


FAMILIES = {
  "constant": Family(
    ("t",),
    lambda rng, size, t: np.full(size, t),
  ),
  "exponential": Family(
    ("mean",),
    lambda rng, size, mean: rng.exponential(mean, size),
  ),
  "shifted-exponential": Family(
    ("shift", "mean"),
    lambda rng, size, shift, mean: shift + rng.exponential(mean, size),
  ),
  "lognormal": Family(
    ("mu", "sigma"),
    lambda rng, size, mu, sigma: rng.lognormal(mu, sigma, size),
  ),
  "pareto": Family(
    ("scale", "shape"),
    lambda rng, size, scale, shape: scale * (1 + rng.pareto(shape, size)),
  ),
  "gamma": Family(
    ("shape", "scale"),
    lambda rng, size, shape, scale: rng.gamma(shape, scale, size),
  ),
  "bernoulli": Family(
    ("fast", "slow", "p"),
    lambda rng, size, fast, slow, p: np.array([fast, slow])[
      (rng.random(size) < p).astype(np.intp)
    ],
  ),
}
# Parameters that may be 0, or anything; all others must be positive.
_AT_LEAST_0 = ("shift", "p")
_ANY = ("mu",)


@dataclasses.dataclass(frozen=True)
class Distribution:
  """A latency from a named family, equal on every host.

  Attributes:
    family: a key of `FAMILIES`.
    parameters: the parameters of that family, in its order.

  Raises:
    ValueError: the family is unknown, or a parameter is invalid.

  Example:
    >>> str(Distribution("shifted-exponential", (1.0, 0.5)))
    'shifted-exponential:1,0.5'
  """

  family: str
  parameters: tuple[float, ...]

  def __post_init__(self) -> None:
    names = _family(self.family).names
    checks.kind(
      "parameters", self.parameters, tuple | list, "a tuple of numbers"
    )
    if len(self.parameters) != len(names):
      raise ValueError(
        f"{self.family} takes {len(names)} numbers,"
        f" {self.family}:{','.join(names)}; got {len(self.parameters)}."
      )
    for name, value in zip(names, self.parameters, strict=True):
      checks.kind(name, value, numbers.Real, f"a number of {self.family}")
      least = "" if name in _ANY else "above 0"
      least = "of at least 0" if name in _AT_LEAST_0 else least
      wrong = not math.isfinite(value)
      wrong |= least == "above 0" and value <= 0
      wrong |= least == "of at least 0" and value < 0
      if wrong:
        raise ValueError(
          f"{name} of {self.family} must be a finite number {least}".rstrip()
          + f", got {value:g}."
        )
      if name == "p" and value > 1:
        raise ValueError(
          f"p of {self.family} must be at most 1, got {value:g}."
        )

  def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
    """Draws values, a float64 array `[size]`.

    Raises:
      ValueError: one is infinite, or all are 0: a double has no such numbers.
    """
    values = _family(self.family).draw(rng, size, *self.parameters)
    if size and not (np.isfinite(values).all() and values.any()):
      raise ValueError(
        f"the times of {self} are too long or too short to compute with."
      )
    return values

  def hosts(self, n: int, rng: np.random.Generator) -> list[Host]:
    """Creates n equal hosts."""
    return [self] * n

  def __str__(self) -> str:
    return f"{self.family}:{','.join(f'{p:g}' for p in self.parameters)}"


@dataclasses.dataclass(frozen=True)
class Scaled:
  """A host that takes `factor` times longer."""

  base: Host
  factor: float

  def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
    """Draws values, a float64 array `[size]`."""
    return self.factor * self.base.draw(rng, size)


@dataclasses.dataclass(frozen=True)
class SlowHosts:
  """Some hosts are permanently slow.

  Attributes:
    share: the fraction of slow hosts, 0 to 1.
    factor: how many times longer they take.
    base: the latency of the others.

  Raises:
    ValueError: share or factor is invalid.

  Example:
    >>> rng = np.random.default_rng(0)
    >>> slow = parse_latency("slow-hosts:0.25,10,constant:2")
    >>> sorted(float(host.draw(rng, 1)[0]) for host in slow.hosts(4, rng))
    [2.0, 2.0, 2.0, 20.0]
  """

  share: float
  factor: float
  base: Latency

  def __post_init__(self) -> None:
    checks.fraction("share of slow-hosts", self.share)
    checks.rate("factor of slow-hosts", self.factor, positive=True)
    check_latency("base", self.base)

  def hosts(self, n: int, rng: np.random.Generator) -> list[Host]:
    """Creates n hosts; `rng` chooses the slow ones."""
    hosts = self.base.hosts(n, rng)
    for i in rng.permutation(n)[: round(self.share * n)]:
      hosts[i] = Scaled(hosts[i], self.factor)
    return hosts

  def __str__(self) -> str:
    return f"slow-hosts:{self.share:g},{self.factor:g},{self.base}"


def parse_latency(text: str) -> Latency:
  """Parses a latency from its name and numbers, as on the command line.

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
  checks.kind("text", text, str, "NAME:PARAMETERS")
  name, _, rest = text.strip().partition(":")
  if name == "slow-hosts":
    share, factor, base = (*rest.split(",", 2), "", "", "")[:3]
    if not base:
      raise ValueError(
        "slow-hosts takes slow-hosts:share,factor,NAME:PARAMETERS, got"
        f" {text!r}."
      )
    return SlowHosts(_number(share), _number(factor), parse_latency(base))
  _family(name)
  parts = rest.split(",") if rest else []
  return Distribution(name, tuple(map(_number, parts)))


def check_latency(name: str, value: object) -> None:
  """Checks a latency.

  Raises:
    ValueError: it is something else.
  """
  if not callable(getattr(value, "hosts", None)):
    raise ValueError(
      f"`{name}` must be a latency, as from simulate.parse_latency, got"
      f" {value!r:.100}."
    )


def _family(name: str) -> Family:
  """The family with this name; raises an error that lists the known ones."""
  if not isinstance(name, str) or name not in FAMILIES:
    known = [f"{n}:{','.join(f.names)}" for n, f in FAMILIES.items()]
    raise ValueError(
      f"a latency is one of {', '.join(known)},"
      f" slow-hosts:share,factor,NAME:PARAMETERS; got {name!r:.100}."
    )
  return FAMILIES[name]


def _number(text: str) -> float:
  try:
    return float(text)
  except ValueError:
    raise ValueError(
      f"the parameters of a latency are numbers, got {text!r}."
    ) from None
