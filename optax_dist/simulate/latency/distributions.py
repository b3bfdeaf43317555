"""Distributions of the time to compute a gradient, and their names.

A *latency* is the distribution on one host; `hosts` returns the latency of each
host, which may differ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from scipy import special


class Latency(Protocol):
  """Seconds for one gradient.

  Attributes:
    mean: the expected value, possibly infinite.
    support: the possible values in rising order, if they are finitely many;
      None for a continuous distribution.
  """

  @property
  def mean(self) -> float: ...

  @property
  def support(self) -> np.ndarray | None: ...

  def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
    """Draws values, a float64 array `[size]`."""

  def survival(self, t: float) -> float:
    """The probability of taking longer than `t` seconds."""

  def hosts(self, n: int, rng: np.random.Generator) -> list[Latency]:
    """The latency of each of n hosts."""


def time_of(latency: Latency, survival: float, most: float) -> float:
  """When the survival function falls below a level, by bisection.

  Args:
    latency: the latency.
    survival: the level, from 0 to 1.
    most: seconds after which it has fallen below.
  """
  low, high = 0.0, most
  for _ in range(60):
    middle = (low + high) / 2
    if latency.survival(middle) > survival:
      low = middle
    else:
      high = middle
  return high


class Family(NamedTuple):
  """A kind of distribution; each field is a function of its parameters."""

  names: tuple[str, ...]
  draw: Callable[..., np.ndarray]
  survival: Callable[..., float]
  mean: Callable[..., float]
  support: Callable[..., list[float]] | None = None


def _lognormal_survival(t: float, mu: float, sigma: float) -> float:
  return special.ndtr((mu - math.log(t)) / sigma) if t > 0 else 1.0


FAMILIES = {
  "constant": Family(
    ("t",),
    lambda rng, size, t: np.full(size, t),
    lambda x, t: float(x < t),
    lambda t: t,
    lambda t: [t],
  ),
  "exponential": Family(
    ("mean",),
    lambda rng, size, mean: rng.exponential(mean, size),
    lambda x, mean: math.exp(-max(x, 0.0) / mean),
    lambda mean: mean,
  ),
  "shifted-exponential": Family(
    ("shift", "mean"),
    lambda rng, size, shift, mean: shift + rng.exponential(mean, size),
    lambda x, shift, mean: math.exp(-max(x - shift, 0.0) / mean),
    lambda shift, mean: shift + mean,
  ),
  "lognormal": Family(
    ("mu", "sigma"),
    lambda rng, size, mu, sigma: rng.lognormal(mu, sigma, size),
    _lognormal_survival,
    lambda mu, sigma: math.exp(mu + sigma**2 / 2),
  ),
  "pareto": Family(
    ("scale", "shape"),
    lambda rng, size, scale, shape: scale * (1 + rng.pareto(shape, size)),
    lambda x, scale, shape: (scale / max(x, scale)) ** shape,
    lambda scale, shape: scale * shape / (shape - 1) if shape > 1 else math.inf,
  ),
  "gamma": Family(
    ("shape", "scale"),
    lambda rng, size, shape, scale: rng.gamma(shape, scale, size),
    lambda x, shape, scale: float(special.gammaincc(shape, max(x, 0) / scale)),
    lambda shape, scale: shape * scale,
  ),
  "bernoulli": Family(
    ("fast", "slow", "p"),
    lambda rng, size, fast, slow, p: np.array([fast, slow])[
      (rng.random(size) < p).astype(np.intp)
    ],
    lambda x, fast, slow, p: p * (x < slow) + (1 - p) * (x < fast),
    lambda fast, slow, p: p * slow + (1 - p) * fast,
    lambda fast, slow, p: sorted({fast, slow}),
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
    parameters: of that family, in its order.

  Raises:
    ValueError: the family is unknown, or a parameter is invalid.

  Example:
    >>> latency = Distribution("shifted-exponential", (1.0, 0.5))
    >>> latency.mean, str(latency)
    (1.5, 'shifted-exponential:1,0.5')
  """

  family: str
  parameters: tuple[float, ...]

  def __post_init__(self) -> None:
    names = family_of(self.family).names
    if len(self.parameters) != len(names):
      raise ValueError(
        f"{self.family} takes {len(names)} numbers,"
        f" {self.family}:{','.join(names)}; got {len(self.parameters)}."
      )
    for name, value in zip(names, self.parameters, strict=True):
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

  @property
  def mean(self) -> float:
    return float(family_of(self.family).mean(*self.parameters))

  @property
  def support(self) -> np.ndarray | None:
    values = family_of(self.family).support
    return None if values is None else np.array(values(*self.parameters))

  def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
    """Draws values, a float64 array `[size]`."""
    return family_of(self.family).draw(rng, size, *self.parameters)

  def survival(self, t: float) -> float:
    """The probability of taking longer than `t` seconds."""
    return float(family_of(self.family).survival(t, *self.parameters))

  def hosts(self, n: int, rng: np.random.Generator) -> list[Latency]:
    """The latency of each of n hosts."""
    return [self] * n

  def __str__(self) -> str:
    return f"{self.family}:{','.join(f'{p:g}' for p in self.parameters)}"


class Empirical:
  """Recorded times, all equally likely.

  Example:
    >>> latency = Empirical([1.0, 3.0])
    >>> latency.mean, latency.survival(1.0)
    (2.0, 0.5)
  """

  def __init__(self, seconds: Sequence[float] | np.ndarray):
    """Creates a latency from recorded times.

    Args:
      seconds: one time per gradient.

    Raises:
      ValueError: there are none, or one is not positive and finite.
    """
    self.support = np.sort(np.asarray(seconds, np.float64))
    if not self.support.size:
      raise ValueError("an empirical latency needs recorded times, got none.")
    if not (self.support[0] > 0 and np.isfinite(self.support[-1])):
      raise ValueError(
        "recorded times must be finite and above 0, got"
        f" {self.support[0]:g} to {self.support[-1]:g}."
      )

  @property
  def mean(self) -> float:
    return float(self.support.mean())

  def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
    """Draws values, a float64 array `[size]`."""
    return self.support[rng.integers(self.support.size, size=size)]

  def survival(self, t: float) -> float:
    """The probability of taking longer than `t` seconds."""
    below = np.searchsorted(self.support, t, side="right")
    return 1.0 - float(below) / self.support.size

  def hosts(self, n: int, rng: np.random.Generator) -> list[Latency]:
    """The latency of each of n hosts."""
    return [self] * n

  def __str__(self) -> str:
    return f"{self.support.size} recorded times, mean {self.mean:.4g} s"


def family_of(name: str) -> Family:
  """The family with this name; raises an error that lists the known ones."""
  if name not in FAMILIES:
    known = [f"{n}:{','.join(f.names)}" for n, f in FAMILIES.items()]
    raise ValueError(
      f"a latency is one of {', '.join(known)},"
      f" slow-hosts:share,factor,NAME:PARAMETERS; got {name!r}."
    )
  return FAMILIES[name]
