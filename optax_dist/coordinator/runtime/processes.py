"""The processes of a replica: here a single one.

A replica may be a JAX program of several processes. An optional part then calls `use`
with `Processes` of its own, which differ in which process decides, which part of an
array a process has, and when the training loops see an event.
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
  """The part that decides, one input at a time, such as `Client` of the protocol."""

  def step(self, given: Any, now: float, /) -> Sequence[Any]:
    """Processes an input; returns the effects, in order."""
    ...

  def deadline(self) -> float:
    """When `TimePassed` must be the next input, at the latest."""
    ...

  @property
  def stalled(self) -> bool:
    """Whether other replicas wait, as far as this replica knows."""
    ...

  def missing(self, now: float) -> str:
    """What the replica is waiting for, for an error message."""
    ...


class Parts(NamedTuple):
  """A process's part of the arrays of its replica.

  Attributes:
    shared: the state to start from, on the devices of all processes.
    inner: the state of the replica's own optimizer, likewise; None for none.
    apply: the strategy's `apply`, compiled for these arrays.
    gradient: its shards of gradients; None if it has whole gradients.
    state: its shards of both states; None if it has whole states.
    agreement: more on which replicas must agree, as pairs of name and text.
  """

  shared: Any
  inner: Any
  apply: Callable[..., Any]
  gradient: Shards | None = None
  state: Shards | None = None
  agreement: tuple[tuple[str, str], ...] = ()


class Processes:
  """The processes of this replica, from the view of one of them; here the only one.

  Attributes:
    index: index of this process, from 0.
    count: how many processes there are.
    codec: encodes all messages on the connections of this process.
    may_restart: whether other processes may replace lost ones.
  """

  index, count, may_restart = 0, 1, True
  codec: codec.Codec[Any] = messages.MESSAGES

  def name(self, replica: object) -> object:
    """The name of this process of a replica."""
    return replica

  def gather(self, text: str) -> list[str]:
    """Gathers a short text of each process, in order; all processes call this."""
    return [text]

  def meet(self, own: tuple[str, str], digest: str) -> tuple[str, str]:
    """Exchanges addresses; all processes call this.

    Args:
      own: name and address of this process.
      digest: fingerprint of its part of the shared state.

    Returns:
      The replica's address, and a digest of the whole state.
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
    """The part of the arrays that this process has.

    Args:
      strategy: computes the update.
      params: the initial parameters.
      shared: the initial state.
      inner: the state of the replica's own optimizer; None for none.

    Raises:
      ValueError: parameters are sharded in a way that can't be exchanged.
    """
    return Parts(shared, inner, strategy.apply)

  def inbox(
    self, published: State, enqueue: Callable[[Any], None], timeout: float
  ) -> TrainingInbox:
    """Creates the inbox that the training loop reads.

    Args:
      published: the first state.
      enqueue: queues an input for the core.
      timeout: seconds that another process may take to reach the same point
        of the program.
    """
    return TrainingInbox(published)


_program = Processes()


def use(processes: Processes) -> None:
  """Sets the processes of the replica which this JAX program is."""
  global _program
  _program = processes


def of_this_program() -> Processes:
  """The processes of the replica which this JAX program is, as set by `use`."""
  return _program
