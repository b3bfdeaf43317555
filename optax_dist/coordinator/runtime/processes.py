"""The processes of a replica: here one, which does all by itself.

A replica may be a JAX program of several processes, an optional part that then
calls `use` with `Processes` of its own. These differ in who decides, which part of
an array is here, and when the training loops see an event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from optax_dist.coordinator import strategies
from optax_dist.coordinator.protocol import codec, messages
from optax_dist.coordinator.protocol.client.client import Client
from optax_dist.coordinator.protocol.config import Config, Me
from optax_dist.coordinator.runtime.inbox import TrainingInbox
from optax_dist.coordinator.runtime.states import Shards, State


class Core(Protocol):
  """What decides, one input at a time; see `protocol.client.client.Client`."""

  def step(self, given: Any, now: float, /) -> Sequence[Any]:
    """Processes an input; returns the effects, in order."""
    ...

  def deadline(self) -> float:
    """When `TimePassed` must be the next input, at the latest."""
    ...

  @property
  def stalled(self) -> bool:
    """Whether other replicas wait, as far as this one knows."""
    ...

  def missing(self, now: float) -> str:
    """What it is waiting for, for an error message."""
    ...


class Parts(NamedTuple):
  """What this process has of the arrays of its replica.

  Attributes:
    shared: the state to start from, on the devices of all processes.
    inner: the state of the replica's own optimizer, likewise; None for none.
    apply: the strategy's `apply`, compiled for it.
    gradient: the shards of gradients; None if this process has all of them.
    state: the shards of both states, likewise.
    agreement: what replicas must agree on besides, as pairs of name and text.
  """

  shared: Any
  inner: Any
  apply: Callable[..., Any]
  gradient: Shards | None = None
  state: Shards | None = None
  agreement: tuple[tuple[str, str], ...] = ()


class Processes:
  """The processes of this replica, as one of them sees them: here it is the only one.

  Attributes:
    index: which one this is, from 0.
    count: how many there are.
    codec: of all messages on the connections of this process.
    may_restart: whether others may take the place of those that are lost.
  """

  index, count, may_restart = 0, 1, True
  codec: codec.Codec[Any] = messages.MESSAGES

  def name(self, replica: object) -> object:
    """What a process of this replica is called."""
    return replica

  def gather(self, text: str) -> list[str]:
    """A short text of each process, in order; all of them call this."""
    return [text]

  def meet(self, own: tuple[str, str], digest: str) -> tuple[str, str]:
    """Exchanges addresses; all of them call this.

    Args:
      own: name and address of this process.
      digest: fingerprint of its part of the shared state.

    Returns:
      The replica's address, and a digest of all.
    """
    return own[1], digest

  def core(self, config: Config, me: Me) -> Core:
    """The core of this process, after `meet`."""
    return Client(config, me)

  def parts(
    self,
    strategy: strategies.Strategy,
    params: Any,
    shared: Any,
    inner: Any = None,
  ) -> Parts:
    """What this process has of the arrays.

    Args:
      strategy: computes the update.
      params: the initial parameters.
      shared: the initial state.
      inner: that of the replica's own optimizer; None for none.

    Raises:
      ValueError: parameters are sharded in a way that can't be exchanged.
    """
    return Parts(shared, inner, strategy.apply)

  def inbox(
    self, published: State, enqueue: Callable[[Any], None], timeout: float
  ) -> TrainingInbox:
    """What the training loop reads.

    Args:
      published: the first state.
      feed: queues an input for the core.
      timeout: seconds that another process may take to reach the same point
        of the program.
    """
    return TrainingInbox(published)


_program = Processes()


def use(processes: Processes) -> None:
  """Makes these the processes of the replica that this JAX program is."""
  global _program
  _program = processes


def of_this_program() -> Processes:
  """The processes of this JAX program, as one replica: one, unless `use` says so."""
  return _program
