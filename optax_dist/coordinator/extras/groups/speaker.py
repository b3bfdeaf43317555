"""Process 0 of a replica with several processes: it speaks for all of them.

It stands between the protocol's core and the driver. Effects of the core on
arrays become orders to all processes; an event on arrays becomes an input of
the core once it has happened in all of them, or failed in one. Neither the core
nor the other replicas know that there are several processes, except for the
addresses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from optax_dist.coordinator.extras.groups import orders
from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol.entries import AttemptId, Process
from optax_dist.coordinator.protocol.node import Node


@dataclasses.dataclass(slots=True)
class _Aggregation:
  """An attempt: the processes that have its mean."""

  done: set[int]
  told: bool = False


@dataclasses.dataclass(slots=True)
class _Fetch:
  """A snapshot being fetched: the step that each process has received."""

  transfer: int
  steps: dict[int, int]


class Speaker:
  """The core of a replica with several processes, in its process 0.

  Attributes:
    core: the protocol core.
    over: whether the replica has lost a process, and ends.
  """

  def __init__(
    self,
    core: Node,
    companions: Sequence[Process],
    *,
    patience: float,
  ):
    """Creates the core.

    Args:
      core: the protocol core.
      companions: names of processes 1, 2 and so on of this replica.
      patience: seconds to wait for another process of the replica to start, or
        to submit after the first one.
    """
    self.core = core
    self.over = False
    self._companions = tuple(companions)
    self._ranks = {p: rank for rank, p in enumerate(companions, 1)}
    self._everyone = set(range(len(companions) + 1))
    self._patience = patience
    self._out: list[orders.Wanted] = []
    # Answers from the store are held until all processes can be reached: a
    # replica takes part as a whole.
    self._knows_run = False
    self._held: list[ins.Input] = []
    # Orders for processes that are not there yet.
    self._kept: dict[Process, list[orders.Order]] = {p: [] for p in companions}
    # What each process has submitted.
    self._ready: dict[int, ins.Submitted] = {}
    # Since when a process waits for another one.
    self._since: float | None = None
    self._attempts: dict[AttemptId, _Aggregation] = {}
    self._fetch: _Fetch | None = None
    self._prints: dict[int, dict[int, str]] = {}
    self._ended = False

  def step(self, given: orders.Given, now: float) -> list[orders.Wanted]:
    """Processes an input; returns the effects, in order."""
    if not self.over:
      self._handle(given, now)
    if not self.over:
      self._check_waiting(now)
    wanted, self._out = self._out, []
    return wanted

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

  def _handle(self, given: orders.Given, now: float) -> None:
    match given:
      case orders.Heard(peer, what):
        rank = self._ranks.get(peer)
        if rank is None:
          text = f"{peer} is no process of this replica, and reports {what}"
          self._out.append(fx.Log("warning", text))
        else:
          self._report(rank, what, now)
      case orders.Advance():
        self._tell(given)
      case _ if isinstance(given, orders.REPORTS):
        self._report(0, given, now)
      case ins.PeerLost(peer, how, reason) if peer in self._ranks:
        rank = self._ranks[peer]
        if peer not in self._kept and not self._ended:
          self._lose(f"its process {rank} is lost ({how}: {reason})", now)
      case ins.GetAnswered() | ins.PutAnswered() if (
        self._knows_run and self._kept
      ):
        self._held.append(given)
      case _:
        self._decide(given, now)

  def _report(
    self, rank: int, what: orders.Order | orders.Report, now: float
  ) -> None:
    """Handles what has happened in a process, this one included."""
    match what:
      case orders.Present():
        peer = self._companions[rank - 1]
        self._out.append(orders.Tell(peer, orders.Welcomed()))
        for order in self._kept.pop(peer, ()):
          self._out.append(orders.Tell(peer, order))
        if not self._kept:
          held, self._held = self._held, []
          for answer in held:
            self._decide(answer, now)
      case ins.Submitted():
        self._ready[rank] = what
        self._submit(now)
      case ins.Aggregated(attempt):
        self._mean_here(rank, attempt, now)
      case ins.AggregateFailed():
        self._mean_failed(what, now)
      case ins.SnapshotFetched(transfer, step):
        self._snapshot_here(rank, transfer, step, now)
      case ins.SnapshotFailed():
        self._snapshot_failed(what, now)
      case ins.FingerprintTaken(step, digest):
        self._fingerprint(rank, step, digest, now)
      case ins.SaveWanted():
        self._decide(what, now)
      case ins.Aborted(reason):
        self._lose(f"its process {rank} goes: {reason}", now)
      case _:
        text = f"process {rank} of this replica gives orders: {what}"
        self._out.append(fx.Log("warning", text))

  def _submit(self, now: float) -> None:
    """Submits a gradient once all processes have submitted their shards."""
    if self._ready.keys() != self._everyone:
      return
    mine = self._ready[0]
    for rank, theirs in self._ready.items():
      if _step_of(theirs) != _step_of(mine):
        self._lose(
          "its processes do not take the same steps: process 0 submits"
          f" {_step_of(mine)}, process {rank} {_step_of(theirs)}",
          now,
        )
        return
    finite = all(ready.finite for ready in self._ready.values())
    self._ready.clear()
    self._decide(codec.replace(mine, finite=finite), now)

  def _mean_here(self, rank: int, attempt: AttemptId, now: float) -> None:
    found = self._attempts.get(attempt)
    if found is None:
      return  # It was cancelled meanwhile.
    found.done.add(rank)
    if found.done == self._everyone and not found.told:
      found.told = True
      self._decide(ins.Aggregated(attempt), now)

  def _mean_failed(self, failed: ins.AggregateFailed, now: float) -> None:
    found = self._attempts.get(failed.attempt)
    if found is not None and not found.told:
      found.told = True
      self._decide(failed, now)

  def _snapshot_here(
    self, rank: int, transfer: int, step: int, now: float
  ) -> None:
    found = self._fetch
    if found is None or found.transfer != transfer:
      return
    found.steps[rank] = step
    if found.steps.keys() != self._everyone:
      return
    if len(set(found.steps.values())) > 1:
      text = f"its processes were sent different steps: {found.steps}"
      self._snapshot_failed(ins.SnapshotFailed(transfer, text), now)
    else:
      self._decide(ins.SnapshotFetched(transfer, step), now)

  def _snapshot_failed(self, failed: ins.SnapshotFailed, now: float) -> None:
    found = self._fetch
    if found is not None and found.transfer == failed.transfer:
      self._fetch = None
      self._decide(failed, now)

  def _fingerprint(self, rank: int, step: int, digest: str, now: float) -> None:
    found = self._prints.setdefault(step, {})
    found[rank] = digest
    if found.keys() == self._everyone:
      del self._prints[step]
      digests = [found[rank] for rank in sorted(found)]
      taken = ins.FingerprintTaken(step, orders.combined(digests))
      self._decide(taken, now)

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
    return [
      rank
      for rank, peer in enumerate(("", *self._companions))
      if peer in self._kept or (self._ready and rank not in self._ready)
    ]

  def _lose(self, reason: str, now: float) -> None:
    """Ends the replica: its processes can't continue without each other."""
    reason = f"The replica can't go on: {reason}."
    self._decide(ins.Aborted(reason), now)
    self._tell(orders.EndGroup(reason))
    self._out.append(orders.EndGroup(reason))
    self.over = True

  # Effects.

  def _decide(self, input_: ins.Input, now: float) -> None:
    """Gives the core an input, and makes all processes execute its effects."""
    for effect in self.core.step(input_, now):
      self._carry_out(effect)

  def _carry_out(self, effect: fx.Effect) -> None:
    match effect:
      case fx.UseRun():
        self._knows_run = True
        self._out.append(effect)
      case fx.Connect(peer, address):
        _, own = orders.place_of(peer, address, 0)
        self._out.append(fx.Connect(peer, own))
      case fx.Aggregate(attempt) | fx.Collect(attempt):
        self._attempts[attempt] = _Aggregation(set())
        self._all(effect)
      case fx.Cancel(attempt) | fx.Release(attempt):
        found = self._attempts.pop(attempt, None)
        if found is not None and found.done != self._everyone:
          # It is still running in some process.
          effect = fx.Cancel(attempt)
        self._all(effect)
      case fx.FetchSnapshot(transfer):
        self._fetch = _Fetch(transfer, {})
        self._all(effect)
      case fx.Restore():
        self._fetch = None
        self._all(effect)
      case fx.Left() | fx.Finished():
        self._ended = True
        self._drop_submission("finished")
        self._all(effect)
      case fx.Fail(error, reason):
        self._ended = True
        self._drop_submission("lost")
        self._tell(orders.Failure(error, reason))
        self._out.append(effect)
      case _ if isinstance(effect, orders.ORDERS):
        self._all(effect)
      case _:
        self._out.append(effect)

  def _drop_submission(self, reason: str) -> None:
    """Drops a submission that is too late for the remaining processes."""
    mine = self._ready.get(0)
    self._ready.clear()
    if mine is not None:
      self._all(fx.Resolved(mine.sequence, reason, 0))

  def _all(self, effect: fx.Effect) -> None:
    for peer, rank in self._ranks.items():
      self._tell_one(peer, at_rank(effect, rank))  # type: ignore[arg-type]
    self._out.append(at_rank(effect, 0))

  def _tell(self, order: orders.Order) -> None:
    for peer in self._companions:
      self._tell_one(peer, order)

  def _tell_one(self, peer: Process, order: orders.Order) -> None:
    if peer in self._kept:
      self._kept[peer].append(order)
    else:
      self._out.append(orders.Tell(peer, order))


def _step_of(submitted: ins.Submitted) -> ins.Submitted:
  """What the submissions of all processes of a replica have in common."""
  return codec.replace(
    submitted, finite=True, batches="", compute=None, timings=None
  )


def at_rank(effect: fx.Effect, rank: int) -> fx.Effect:
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
    case fx.Collect():
      peers = tuple(_peer(peer, rank) for peer in effect.peers)
      return codec.replace(effect, peers=peers)
    case fx.ServeSnapshot():
      to, address = orders.place_of(effect.to, effect.address, rank)
      return codec.replace(effect, to=to, address=address)
    case fx.FetchSnapshot():
      source, address = orders.place_of(effect.source, effect.address, rank)
      return codec.replace(effect, source=source, address=address)
    case _:
      return effect


def _peer(peer: fx.Peer, rank: int) -> fx.Peer:
  name, address = orders.place_of(peer.process, peer.address, rank)
  return fx.Peer(peer.incarnation, name, address)
