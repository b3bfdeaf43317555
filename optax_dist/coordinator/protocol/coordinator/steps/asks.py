"""What members are asked to compute next, as the policy has it."""

from __future__ import annotations

from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.coordinator.members import Members
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox
from optax_dist.coordinator.protocol.coordinator.steps.gradients import (
  Gradients,
)
from optax_dist.coordinator.protocol.coordinator.steps.ruling import Ruling
from optax_dist.coordinator.protocol.entries import Incarnation, ReplicaId
from optax_dist.coordinator.protocol.history import History
from optax_dist.coordinator.protocol.policies.policy import Policy


class Asks:
  """Passes on what the policy asks of members."""

  def __init__(
    self,
    policy: Policy,
    ruling: Ruling,
    gradients: Gradients,
    history: History,
    members: Members,
    out: Outbox,
  ):
    """Starts without having asked for anything.

    Args:
      policy: decides it.
      ruling: the rules.
      gradients: those that members have sent.
      history: says who is lost.
      members: the members.
      out: where messages go.
    """
    self._policy, self._ruling, self._gradients = policy, ruling, gradients
    self._history, self._members, self._out = history, members, out

  def members_changed(self) -> None:
    """The quorum may be another one."""
    lost = len(self._history.lost())
    self._policy.members_changed(self._ruling.state, lost)
    self.announce()

  def tokens(self, tokens: dict[ReplicaId, int]) -> None:
    """The rules have given these tokens."""
    for incarnation, count in self.of_connected(tokens).items():
      self._policy.ask(incarnation, count)
    self.announce()

  def announce(self) -> None:
    """Tells members what to compute next, unless another message has."""
    for ask in self._policy.announcements():
      state = self._members.get(ask.incarnation)
      if state is None:
        continue
      arrival = self._gradients.accepted.get(ask.incarnation)
      inside = -1 if arrival is None else arrival.message.sequence
      asked = msg.RequestGradients(
        self._ruling.step, inside, ask.gradients, ask.lease
      )
      self._out.notify(state, asked)

  def call(self, step: int) -> None:
    """Calls all members that have no gradient in a step that begins."""
    others = [
      state
      for state in self._members
      if state.member.incarnation not in self._gradients.accepted
    ]
    self._out.notify_all(others, msg.Call(step))

  def of_connected(
    self, tokens: dict[ReplicaId, int]
  ) -> dict[Incarnation, int]:
    """The tokens of members that are connected."""
    if not tokens:
      return {}
    states = {state.member.replica: state for state in self._members}
    connected = {}
    for replica, count in tokens.items():
      state = states.get(replica)
      if state is not None and state.is_connected:
        connected[state.member.incarnation] = count
    return connected
