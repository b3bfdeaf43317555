"""A fleet of chips: groups, failures, and the network between them."""

from __future__ import annotations

import dataclasses
import math
import numbers

from optax_dist.simulate.latency.distributions import Latency
from optax_dist.simulate.network import Network


@dataclasses.dataclass(frozen=True)
class Fleet:
  """Chips in groups of equal size; when one chip fails, its group stops.

  All times are in seconds.

  Attributes:
    chips: number of chips.
    chips_per_group: number of chips that compute one gradient together.
    step: time of a group for one gradient, as a `Latency`.
    failure_rate: failures per second of one chip.
    repair: time until a failed group has working chips again.
    detect: time until the others detect a failure.
    restart: time until a restarted program can compute.
    save: time for which all groups stop to save a checkpoint.
    restore: time to load a checkpoint.
    reshard: time to reshard the state for another number of groups.
    catch_up: time until a returning group has the others' state.
    nbytes: what groups exchange: a gradient, or the change of all parameters.
    network: network between groups.

  Raises:
    ValueError: a number is out of range.

  Example:
    >>> from optax_dist import simulate
    >>> fleet = Fleet(1024, 8, simulate.parse_latency("constant:1"),
    ...   failure_rate=1e-7, repair=600.0)
    >>> fleet.groups, round(fleet.mean_time_between_failures)
    (128, 9766)
  """

  chips: int
  chips_per_group: int
  step: Latency
  failure_rate: float
  repair: float
  detect: float = 0.0
  restart: float = 0.0
  save: float = 0.0
  restore: float = 0.0
  reshard: float = 0.0
  catch_up: float = 0.0
  nbytes: float = 0.0
  network: Network = dataclasses.field(default_factory=Network)

  def __post_init__(self) -> None:
    for name in ("chips", "chips_per_group"):
      value = getattr(self, name)
      if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}.")
    if self.chips % self.chips_per_group:
      raise ValueError(
        f"chips must be a multiple of chips_per_group, got {self.chips} and"
        f" {self.chips_per_group}."
      )
    for name in (
      "failure_rate",
      "repair",
      "detect",
      "restart",
      "save",
      "restore",
      "reshard",
      "catch_up",
      "nbytes",
    ):
      value = getattr(self, name)
      is_number = isinstance(value, numbers.Real)
      if not is_number or not 0 <= value < math.inf:
        raise ValueError(
          f"{name} must be a finite number of at least 0, got {value!r}."
        )
    mean = getattr(self.step, "mean", None)
    if not isinstance(mean, numbers.Real) or not mean < math.inf:
      raise ValueError(
        f"step must be a latency with a finite mean, got {self.step}."
      )

  @property
  def groups(self) -> int:
    """The number of groups."""
    return self.chips // self.chips_per_group

  @property
  def group_failure_rate(self) -> float:
    """Failures per second of one group."""
    return self.failure_rate * self.chips_per_group

  @property
  def mean_time_between_failures(self) -> float:
    """The mean seconds between failures of any chip; may be infinite."""
    rate = self.failure_rate * self.chips
    return 1 / rate if rate else math.inf

  def exchange(self, groups: int) -> float:
    """Seconds for an exchange between this many groups."""
    return self.network.all_reduce(self.nbytes, groups)
