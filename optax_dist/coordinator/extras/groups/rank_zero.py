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
from optax_dist.coordinator.protocol.client.client import Client
from optax_dist.coordinator.protocol.entries import Member, Process

# What a process reports of an order, or of its own program.
_Answer: TypeAlias = (
  ins.Submitted
  | ins.Aggregated
  | ins.AggregateFailed
  | ins.SnapshotFetched
  | ins.SnapshotFailed
  | ins.FingerprintTaken
)
# Orders that all processes answer, or that give up the answers to an earlier one.
_Asked: TypeAlias = (
  fx.Aggregate | fx.Release | fx.FetchSnapshot | fx.TakeFingerprint
)


class RankZero:
  """The core of a replica with several processes, in its process 0.

  Attributes:
    core: the protocol core.
    over: whether the replica has lost a process, and ends.
  """

  def __init__(
    self,
    core: Client,
    workers: Sequence[Process],
    *,
    patience: float,
  ):
    """Creates the core.

    Args:
      core: the protocol core.
      workers: names of processes 1, 2 and so on of this replica.
      patience: seconds to wait for another process of the replica to start, or
        to submit after the first one.
    """
    self.core = core
    self.over = False
    self._ranks = {p: rank for rank, p in enumerate(workers, 1)}
    self._everyone = {0, *self._ranks.values()}
    self._patience = patience
    self._out: list[commands.Effect] = []
    # Processes that are not connected yet, and inputs held until they are: a
    # replica takes part as a whole.
    self._absent = set(self._ranks.values())
    self._held: list[commands.Input] = []
    # What processes have reported of the same event, until all have.
    self._reports: dict[Hashable, dict[int, _Answer]] = {"submitted": {}}
    # Since when a process waits for another one.
    self._since: float | None = None
    self._ended = False

  def step(self, input_: commands.Input, now: float) -> list[commands.Effect]:
    """Processes an input; returns the effects, in order."""
    if not self.over:
      self._handle(input_, now)
    if not self.over:
      self._check_waiting(now)
    effects, self._out = self._out, []
    return effects

  def deadline(self) -> float:
    """When `TimePassed` must be the next input, at the latest."""
    if self.over:
      return math.inf
    waits = math.inf if self._since is None else self._since + self._patience
    return min(self.core.deadline(), waits)

  @property
  def stalled(self) -> bool:
    """Whether other replicas wait, as far as this one knows."""
    return self.core.stalled

  def missing(self, now: float) -> str:
    """What the replica is waiting for, for an error message."""
    lacks = self._lacking()
    if lacks and self._since is not None:
      names = " and ".join(f"process {rank}" for rank in lacks)
      waited = f"{now - self._since:.1f} s"
      return f"for {names} of its own replica, since {waited}"
    return self.core.missing(now)

  # Inputs.

  def _handle(self, input_: commands.Input, now: float) -> None:
    match input_:
      case ins.Received(peer, message) if isinstance(
        message, commands.REPORTS + commands.ORDERS
      ):
        rank = self._ranks.get(peer)
        if rank is None:
          text = f"{peer} is no process of this replica, and reports {message}"
          self._out.append(fx.Log("warning", text))
        else:
          self._report(rank, message, now)
      case _ if isinstance(input_, commands.REPORTS):
        self._report(0, input_, now)
      case ins.PeerLost(peer, how, reason) if peer in self._ranks:
        rank = self._ranks[peer]
        if not self._ended:
          self._lose(f"its process {rank} is lost ({how}: {reason})", now)
      case _ if self._absent:
        if not isinstance(input_, ins.TimePassed):
          self._held.append(input_)
      case commands.Advance():
        for peer in self._ranks:
          self._out.append(commands.send(peer, input_))
      case _:
        self._decide(input_, now)

  def _report(
    self, rank: int, what: commands.Order | commands.Report, now: float
  ) -> None:
    """Handles what has happened in a process, this one included."""
    match what:
      case commands.Present():
        self._absent.discard(rank)
        if not self._absent:
          held, self._held = self._held, []
          for earlier in held:
            self._handle(earlier, now)
      case ins.Aborted(reason):
        self._lose(f"its process {rank} has failed: {reason}", now)
      case _ if isinstance(what, commands.REPORTS):
        self._answered(rank, cast(_Answer, what), now)
      case _:
        text = f"process {rank} of this replica gives orders: {what}"
        self._out.append(fx.Log("warning", text))

  def _answered(self, rank: int, answer: _Answer, now: float) -> None:
    """Decides once all processes have answered, or one has failed."""
    key = _event(answer)
    reports = self._reports.get(key)
    if reports is None:
      return  # It was cancelled, or has failed elsewhere.
    if isinstance(answer, ins.AggregateFailed | ins.SnapshotFailed):
      del self._reports[key]
      self._decide(answer, now)
      return
    reports[rank] = answer
    if reports.keys() == self._everyone:
      self._forget(key)
      self._decide_together([reports[i] for i in sorted(reports)], now)

  def _forget(self, key: Hashable) -> None:
    self._reports.pop(key, None)
    # The next submission is awaited at any time.
    self._reports.setdefault("submitted", {})

  def _decide_together(self, answers: Sequence[Any], now: float) -> None:
    """Gives the core what all processes have reported, as one input."""
    input_: ins.Input = answers[0]
    match input_:
      case ins.Submitted():
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
      case ins.SnapshotFetched(transfer):
        if any(other != input_ for other in answers):
          text = f"its processes were sent different steps: {answers}"
          input_ = ins.SnapshotFailed(transfer, text)
      case ins.FingerprintTaken(step):
        digests = [answer.digest for answer in answers]
        input_ = ins.FingerprintTaken(step, commands.combined(digests))
    self._decide(input_, now)

  # Waits.

  def _check_waiting(self, now: float) -> None:
    lacks = self._lacking()
    if not lacks or self._ended:
      self._since = None
    elif self._since is None:
      self._since = now
    elif now >= self._since + self._patience:
      names = " and ".join(f"process {rank}" for rank in lacks)
      self._lose(
        f"{names} did not come to the same place of the program in"
        f" {self._patience:.1f} s",
        now,
      )

  def _lacking(self) -> list[int]:
    """Processes that others wait for."""
    submitted = self._reports["submitted"]
    return [
      rank
      for rank in sorted(self._everyone)
      if rank in self._absent or (submitted and rank not in submitted)
    ]

  def _lose(self, reason: str, now: float) -> None:
    """Ends the replica: its processes can't continue without each other."""
    reason = f"The replica can't go on: {reason}."
    self._decide(ins.Aborted(reason), now)
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
        _, own = commands.place_of(peer, address, 0)
        self._out.append(fx.Connect(peer, own))
      case fx.Aggregate() | fx.FetchSnapshot() | fx.TakeFingerprint():
        self._reports[_event(effect)] = {}
        self._all(effect)
      case fx.Release():
        self._forget(_event(effect))
        self._all(effect)
      case fx.Left() | fx.Finished() | fx.Fail():
        self._ended = True
        failed = isinstance(effect, fx.Fail)
        self._drop_submission("lost" if failed else "finished")
        self._all(effect)
      case _ if isinstance(effect, commands.ORDERS):
        self._all(effect)
      case _:
        self._out.append(effect)

  def _drop_submission(self, reason: str) -> None:
    """Drops a submission that is too late for the remaining processes."""
    mine = self._reports["submitted"].get(0)
    self._forget("submitted")
    if isinstance(mine, ins.Submitted):
      self._all(fx.Resolved(mine.sequence, reason, 0))

  def _all(self, effect: commands.Effect) -> None:
    for peer, rank in self._ranks.items():
      order = cast(commands.Order, at_rank(effect, rank))
      self._out.append(commands.send(peer, order))
    self._out.append(at_rank(effect, 0))


def _event(of: _Answer | _Asked) -> Hashable:
  """What an answer or an order is of: the same for all processes."""
  match of:
    case ins.Submitted():
      return "submitted"
    case fx.TakeFingerprint(step) | ins.FingerprintTaken(step):
      return "fingerprint", step
    case fx.FetchSnapshot() | ins.SnapshotFetched() | ins.SnapshotFailed():
      return "snapshot", of.transfer
    case _:
      return "mean", of.round


def _step_of(submitted: _Answer) -> _Answer:
  """What the submissions of all processes of a replica have in common."""
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
    case fx.ServeSnapshot():
      to, address = commands.place_of(effect.to, effect.address, rank)
      return codec.replace(effect, to=to, address=address)
    case fx.FetchSnapshot():
      source, address = commands.place_of(effect.source, effect.address, rank)
      return codec.replace(effect, source=source, address=address)
    case _:
      return effect


def _peer(peer: Member, rank: int) -> Member:
  name, address = commands.place_of(peer.process, peer.address, rank)
  return codec.replace(peer, process=name, address=address)
