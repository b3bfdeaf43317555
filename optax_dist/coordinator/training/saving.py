"""The common step at which all replicas save."""

from __future__ import annotations

from optax_dist.coordinator.outcome import Outcome
from optax_dist.coordinator.runtime.states import State


class Saving:
  """Announces that step once, and keeps its state for a slow replica.

  Attributes:
    state: the state to save; None: that of the parameters.
  """

  def __init__(self) -> None:
    self.state: State | None = None
    # The last step announced to be saved.
    self._announced = -1

  def announce(self, outcome: Outcome, to_save: State, step: int) -> Outcome:
    """Announces once that the common step has been reached.

    Args:
      outcome: what to announce it with.
      to_save: the last state that all save.
      step: that of the parameters.
    """
    if not self._announced < to_save.step <= step:
      self.state = None
      return outcome
    # Held before it is looked at: a newer one may replace it meanwhile.
    self.state, self._announced = to_save, to_save.step
    return outcome._replace(save=to_save.step)

  def steps(self, step: int) -> tuple[int, ...]:
    """The steps of the parameters and of the state to save."""
    return (step,) if self.state is None else (step, self.state.step)
