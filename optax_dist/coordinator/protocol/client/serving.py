"""What a replica owes others: snapshots that it serves, and word of its step."""

from __future__ import annotations

from optax_dist.coordinator.protocol.client.means import Tell
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.messages import Applied, Report, Serve


class Serving:
  """Requests that are done as soon as the replica has the step."""

  def __init__(self, out: list[Effect], tell: Tell):
    """Starts without requests.

    Args:
      out: the list to which effects are appended.
      tell: sends a message to the coordinator.
    """
    self._out, self._tell = out, tell
    self._serves: list[Serve] = []
    self._report = -1

  def serve(self, message: Serve, step: int) -> None:
    """Serves a snapshot.

    Args:
      message: the request.
      step: the step of the replica's state; -1 if it has none of the run's.
    """
    self._serves.append(message)
    self._serve(message, step)

  def report(self, message: Report, step: int) -> None:
    """Says that it has a step; `step` as above."""
    if step >= message.step:
      self._tell(Applied(step))
    else:
      self._report = message.step

  def arrived_at(self, step: int, can_serve: bool) -> None:
    """Does what waits for this step.

    Args:
      step: the step.
      can_serve: whether the state is one to be served.
    """
    for serve in self._serves[:]:
      self._serve(serve, step if can_serve else -1)
    if 0 <= self._report <= step:
      self._report = -1
      self._tell(Applied(step))

  def forget(self) -> None:
    """Whoever has requested it is not connected any more."""
    self._serves, self._report = [], -1

  def _serve(self, serve: Serve, step: int) -> None:
    if step >= serve.at_least:
      self._serves.remove(serve)
      self._out.append(serve)
