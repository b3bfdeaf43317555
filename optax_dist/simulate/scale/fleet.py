"""What there is to train on: chips in groups, how they fail, what links them."""

from __future__ import annotations

import dataclasses
import math

from optax_dist.simulate.latency.distributions import Latency
from optax_dist.simulate.network import Network


@dataclasses.dataclass(frozen=True)
class Fleet:
  """Chips in groups of equal size; when one chip fails, its group stops.

  All times are in seconds.

  Attributes:
    chips: how many there are.
    chips_per_group: of those that compute one gradient together.
    step: how long a group computes for one gradient, as a `Latency`.
    failure_rate: failures per second of one chip.
    repair: until a failed group has working chips again.
    detect: until the others know of a failure.
    restart: until a program that is started anew can compute.
    save: for which all stand still while a checkpoint is saved.
    restore: until a checkpoint is loaded.
    reshard: until the state is laid out for another number of groups.
    catch_up: until a group that comes back has the others' state.
    nbytes: what groups exchange: a gradient, or the change of all parameters.
    network: between groups.

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
      if not 0 <= value < math.inf:
        raise ValueError(
          f"{name} must be a finite number of at least 0, got {value!r}."
        )
    if not self.step.mean < math.inf:
      raise ValueError(f"step must have a finite mean, got {self.step}.")

  @property
  def groups(self) -> int:
    """How many groups there are."""
    return self.chips // self.chips_per_group

  @property
  def group_failure_rate(self) -> float:
    """Failures per second of one group."""
    return self.failure_rate * self.chips_per_group

  @property
  def mean_time_between_failures(self) -> float:
    """Of all chips together, in seconds; infinite where none fails."""
    rate = self.failure_rate * self.chips
    return 1 / rate if rate else math.inf

  def exchange(self, groups: int) -> float:
    """Seconds for an exchange between so many groups."""
    return self.network.all_reduce(self.nbytes, groups)
