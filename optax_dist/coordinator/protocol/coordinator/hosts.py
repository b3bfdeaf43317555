"""The launchers of a job's hosts: who they are, and which replicas never joined.

    launcher   Host (its rank, and what has ended)   ->
               <-   Refused: there is another one, which has answered `Rival`
               <-   Stalled: that of another host of its replica is gone
               <-   Ended, as all members are told

A replica that has ended before it joined is not known to the run, which would wait
for it. Nothing of this is in a log: launchers call the next coordinator, too.
"""

from __future__ import annotations

from typing import TypeAlias

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.entries import Ended, Process
from optax_dist.coordinator.protocol.inputs import NeverJoined

# A run, and the rank of a host.
_Key: TypeAlias = tuple[str, int]


class Hosts:
  """The launchers of all runs.

  Example:
    >>> hosts = Hosts()
    >>> hosts.called("a", msg.Host("", 0, "", "the first", (0,)))
    []
    >>> hosts.called("b", msg.Host("", 0, "", "the second", (0,)))
    [Send(peers=('a',), message=Rival(launcher='the second'))]
    >>> (sent,) = hosts.called("a", msg.Host("", 0, "", "the first", (0,)))
    >>> sent.peers, type(sent.message).__name__
    (('b',), 'Refused')
  """

  def __init__(self) -> None:
    """Starts before anybody has called."""
    self._here: dict[_Key, tuple[Process, msg.Host]] = {}
    # Launchers that have the rank of another one, which is asked if it lives.
    self._rivals: dict[_Key, tuple[Process, msg.Host]] = {}
    self._reports: dict[_Key, NeverJoined] = {}
    # Who knows that the run has ended.
    self._know_the_end: set[Process] = set()

  def has(self, peer: Process) -> bool:
    """Whether a process is a launcher."""
    known = (*self._here.values(), *self._rivals.values())
    return any(process == peer for process, _ in known)

  def called(self, peer: Process, host: msg.Host) -> list[fx.Send]:
    """A launcher has called, says what has changed, or that it lives."""
    key = host.run, host.rank
    for (run, rank), (_, other) in self._here.items():
      same = rank == host.rank or other.options == host.options
      if run == host.run and not same:
        text = (
          f"this launcher has {host.options}, and that of rank {rank}"
          f" ({other.launcher}) has {other.options}. Start all with the same"
        )
        return [fx.Send((peer,), msg.Refused(text))]
    holder = self._here.get(key)
    if holder is not None and holder[0] != peer:
      self._rivals[key] = peer, host
      return [fx.Send((holder[0],), msg.Rival(host.launcher))]
    self._here[key] = peer, host
    self._reports[key] = NeverJoined(
      host.ended, host.given_up, host.ended_members
    )
    rival = self._rivals.pop(key, None)
    if rival is None:
      return []
    text = (
      f"another launcher has rank {host.rank} of this job ({host.launcher}). Give"
      " each host a --node-rank of its own, or end that one first"
    )
    return [fx.Send((rival[0],), msg.Refused(text))]

  def run_of(self, peer: Process) -> str | None:
    """The run of a launcher; None for another process, or a rival."""
    for (run, _), (process, _) in self._here.items():
      if process == peer:
        return run
    return None

  def lost(self, peer: Process, how: str) -> list[fx.Send]:
    """A process is not connected any more."""
    self._know_the_end.discard(peer)
    for key, (rival, _) in self._rivals.items():
      if rival == peer:
        del self._rivals[key]
        return []
    for key, (process, host) in self._here.items():
      if process == peer:
        del self._here[key]
        # Those that have joined have connections of their own.
        self._reports[key] = NeverJoined(host.replicas, host.given_up)
        if key in self._rivals:
          return self.called(*self._rivals.pop(key))
        return self._missed(host) if host.given_up or how != "left" else []
    return []

  def _missed(self, host: msg.Host) -> list[fx.Send]:
    """Tells the launchers of replicas that have processes on a host that is gone."""
    sent = []
    for process, other in self._here.values():
      shared = {*other.replicas} & {*host.replicas}
      if other.run == host.run and shared:
        text = (
          f"the launcher of rank {host.rank} ({host.launcher}) is gone, and replica"
          f" {', '.join(map(str, sorted(shared)))} needs its processes there: it waits"
          " until that launcher is started again"
        )
        sent.append(fx.Send((process,), msg.Stalled(0, 0.0, text)))
    return sent

  def ended(self, run: str, ended: Ended) -> list[fx.Send]:
    """Tells launchers whose replicas have no part in the run of its end."""
    here = {peer for (name, _), (peer, _) in self._here.items() if name == run}
    new = sorted(here - self._know_the_end)
    self._know_the_end.update(new)
    return [fx.Send(tuple(new), ended)]

  def never_joined(self, run: str) -> NeverJoined:
    """The replicas of a run that have ended before they joined, if they never did."""
    reports = [
      report for (name, _), report in self._reports.items() if name == run
    ]
    return NeverJoined(
      tuple(replica for report in reports for replica in report.replicas),
      "; ".join(report.given_up for report in reports if report.given_up),
      tuple(process for report in reports for process in report.ended_members),
    )
