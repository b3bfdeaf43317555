"""What a replica owes others: snapshots that it serves, and word of its step."""

from __future__ import annotations

from optax_dist.coordinator.protocol.client.means import SendMessage
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.messages import Applied, Report, Serve


class Serving:
  """Requests that are done as soon as the replica has the step."""

  def __init__(self, out: list[Effect], send: SendMessage):
    """Starts without requests.

    Args:
      out: the list to which effects are appended.
      send: sends a message to the coordinator.
    """
    self._out, self._send = out, send
    self._serves: list[Serve] = []
    self._report = -1

  def serve(self, message: Serve, step: int) -> None:
    """Serves a snapshot.

    Args:
      message: the request.
      step: the step of the replica's state; -1 if it has none of the run's.
    """
    self._serves.append(message)
    self.arrived_at(step)

  def report(self, message: Report, step: int) -> None:
    """Says that it has a step; `step` as above."""
    self._report = message.step
    self.arrived_at(step)

  def arrived_at(self, step: int) -> None:
    """Does what waits for this step."""
    self._out += [serve for serve in self._serves if serve.at_least <= step]
    self._serves = [serve for serve in self._serves if serve.at_least > step]
    if 0 <= self._report <= step:
      self._report = -1
      self._send(Applied(step))

  def forget(self) -> None:
    """Whoever has requested it is not connected any more."""
    self._serves, self._report = [], -1
