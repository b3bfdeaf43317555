"""Process 0 of a replica with several processes: it speaks for all of them.

It stands between the protocol's core and the driver. Effects of the core on
arrays become orders to all processes; an event on arrays becomes an input of
the core once it has happened in all of them, or failed in one. Neither the core
nor the other replicas know that there are several processes, except for the
addresses.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias, cast

from optax_dist.coordinator.extras.groups import commands
from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.client.client import Client
from optax_dist.coordinator.protocol.entries import Member, Process

# Orders that all processes answer, or that cancel the answers to an earlier order.
_Asked: TypeAlias = fx.Aggregate | fx.Release | msg.Fetch | fx.TakeFingerprint


class RankZero:
  """The core of a replica with several processes, in its process 0.

  Attributes:
    core: the protocol core.
    over: whether the replica has lost a process, and ends.
  """

  def __init__(
    self,
    core: Client,
    workers: Sequence[tuple[Process, str]],
    timeout: float,
  ):
    """Creates the core.

    Args:
      core: the protocol core.
      workers: names and addresses of processes 1, 2 and so on of this replica.
      timeout: seconds in which all of them must connect.
    """
    self.core = core
    self.over = False
    self._workers = tuple(workers)
    self._ranks = {p: rank for rank, (p, _) in enumerate(workers, 1)}
    self._everyone = {0, *self._ranks.values()}
    # Processes that have yet to say that they hear this one.
    self._unheard = set(self._ranks.values())
    self._timeout, self._begins_by = timeout, math.inf
    self._out: list[commands.Effect] = []
    # The processes' reports of each event, until all processes have reported it.
    self._reports: dict[Hashable, dict[int, commands.Answer]] = {}
    self._ended = False

  def step(self, input_: commands.Input, now: float) -> list[commands.Effect]:
    """Processes an input; returns the effects, in order."""
    if not self.over:
      self._handle(input_, now)
    effects, self._out = self._out, []
    return effects

  def deadline(self) -> float:
    """When `TimePassed` must be the next input, at the latest."""
    if self.over:
      return math.inf
    return self._begins_by if self._unheard else self.core.deadline()

  @property
  def stalled(self) -> bool:
    """Whether other replicas wait, as far as this one knows."""
    return self.core.stalled

  def missing(self, now: float) -> str:
    """What the replica is waiting for, for an error message."""
    submitted = self._reports.get("submitted")
    if not submitted:
      return self.core.missing(now)
    lacks = sorted(self._everyone - submitted.keys())
    names = " and ".join(f"process {rank}" for rank in lacks)
    return f"for {names} of its own replica"

  # Inputs.

  def _handle(self, input_: commands.Input, now: float) -> None:
    match input_:
      case ins.Started():
        self._begins_by = now + self._timeout
        for peer, address in self._workers:
          self._out.append(fx.Connect(peer, address))
          self._out.append(commands.send(peer, commands.Ready()))
      case ins.Received(peer, message) if peer in self._ranks:
        self._reported(self._ranks[peer], message, now)
      case ins.PeerLost(peer, how, reason) if peer in self._ranks:
        rank = self._ranks[peer]
        if not self._ended:
          self._lose(f"its process {rank} is lost ({how}: {reason})", now)
      case commands.Advance():
        for peer in self._ranks:
          self._out.append(commands.send(peer, input_))
      case msg.Leave(lost=True) | commands.Signalled():
        self._reported(0, input_, now)
      case _ if isinstance(input_, commands.ANSWERS):
        self._reported(0, input_, now)
      case ins.TimePassed() if self._unheard:
        if now >= self._begins_by:
          lacks = " and ".join(f"process {r}" for r in sorted(self._unheard))
          self._lose(f"its {lacks} can't be reached", now)
      case _:
        self._decide(input_, now)

  def _reported(self, rank: int, what: object, now: float) -> None:
    """Handles what has happened in a process, this one included."""
    match what:
      case commands.Ready() if self._unheard:
        self._unheard.discard(rank)
        if not self._unheard:
          self._decide(ins.Started(), now)
      case commands.Signalled():
        self._all(what)
      case msg.Leave(reason=reason):
        self._lose(f"its process {rank} has failed: {reason}", now)
      case _ if isinstance(what, commands.ANSWERS):
        self._answered(rank, cast(commands.Answer, what), now)
      case _:
        text = f"process {rank} of this replica gives orders: {what}"
        self._out.append(fx.Log(text))

  def _answered(self, rank: int, answer: commands.Answer, now: float) -> None:
    """Decides once all processes have answered, or one has failed."""
    key = _event(answer)
    if isinstance(answer, msg.SubmitGradient):  # It answers no order.
      self._reports.setdefault(key, {})
    reports = self._reports.get(key)
    if reports is None:
      return  # The order was cancelled, or has failed in another process.
    reports[rank] = answer
    failed = isinstance(answer, msg.Failed | ins.SnapshotFailed)
    if failed or reports.keys() == self._everyone:
      del self._reports[key]
    if failed:
      self._decide(answer, now)
    elif reports.keys() == self._everyone:
      self._decide_together([reports[i] for i in sorted(reports)], now)

  def _decide_together(self, answers: Sequence[Any], now: float) -> None:
    """Gives the core what all processes have reported, as one input."""
    input_: ins.Input = answers[0]
    match input_:
      case msg.SubmitGradient():
        for rank, other in enumerate(answers):
          if _step_of(other) != _step_of(input_):
            self._lose(
              "its processes do not take the same steps: process 0 submits"
              f" {_step_of(input_)}, process {rank} {_step_of(other)}",
              now,
            )
            return
        finite = all(answer.finite for answer in answers)
        input_ = codec.replace(input_, finite=finite)
      case msg.Fingerprint(step):
        digests = [answer.digest for answer in answers]
        input_ = msg.Fingerprint(step, commands.combined(digests))
    self._decide(input_, now)

  def _lose(self, reason: str, now: float) -> None:
    """Ends the replica: its processes can't continue without each other."""
    reason = f"The replica can't go on: {reason}."
    self._decide(msg.Leave(True, reason), now)
    self._all(commands.EndGroup(reason))
    self.over = True

  # Effects.

  def _decide(self, input_: ins.Input, now: float) -> None:
    """Gives the core an input, and makes all processes execute its effects."""
    for effect in self.core.step(input_, now):
      self._carry_out(effect)

  def _carry_out(self, effect: fx.Effect) -> None:
    match effect:
      case fx.Connect(peer, address):
        _, own = commands.address_of(peer, address, 0)
        self._out.append(fx.Connect(peer, own))
      case fx.Aggregate() | msg.Fetch() | fx.TakeFingerprint():
        self._reports[_event(effect)] = {}
        self._all(effect)
      case fx.Release():
        self._reports.pop(_event(effect), None)
        self._all(effect)
      case fx.Left() | fx.Finished() | fx.Fail():
        # A submission that waits for other processes is too late for them.
        self._reports.pop("submitted", None)
        self._ended = True
        self._all(effect)
      case fx.Send() | fx.Disconnect() | fx.Log():
        self._out.append(effect)
      case _:
        self._all(effect)

  def _all(self, effect: commands.Effect) -> None:
    for peer, rank in self._ranks.items():
      self._out.append(commands.send(peer, at_rank(effect, rank)))
    self._out.append(at_rank(effect, 0))


def _event(of: commands.Answer | _Asked) -> Hashable:
  """The event that an answer or an order belongs to; the same in all processes."""
  match of:
    case msg.SubmitGradient():
      return "submitted"
    case fx.TakeFingerprint(step) | msg.Fingerprint(step):
      return "fingerprint", step
    case msg.Fetch() | ins.SnapshotFetched() | ins.SnapshotFailed():
      return "snapshot", of.transfer
    case _:
      return "mean", of.round


def _step_of(submitted: commands.Answer) -> commands.Answer:
  """A submission reduced to the fields that are equal in all processes."""
  return codec.replace(
    submitted, finite=True, batches="", compute=None, timings=None
  )


def at_rank(effect: commands.Effect, rank: int) -> commands.Effect:
  """An effect with the addresses of the processes of this rank.

  Process r of each replica exchanges its shards with process r of the others.
  """
  match effect:
    case fx.Aggregate():
      return codec.replace(
        effect,
        peers=tuple(_peer(peer, rank) for peer in effect.peers),
        readers=tuple(_peer(peer, rank) for peer in effect.readers),
      )
    case msg.Serve():
      to, address = commands.address_of(effect.to, effect.address, rank)
      return codec.replace(effect, to=to, address=address)
    case msg.Fetch():
      source, address = commands.address_of(effect.source, effect.address, rank)
      return codec.replace(effect, source=source, address=address)
    case _:
      return effect


def _peer(peer: Member, rank: int) -> Member:
  name, address = commands.address_of(peer.process, peer.address, rank)
  return codec.replace(peer, process=name, address=address)
