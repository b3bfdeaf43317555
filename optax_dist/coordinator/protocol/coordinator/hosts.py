"""The launchers of a job's hosts: who they are, and which replicas never joined.

    launcher   Host (its rank, and what has ended)   ->
               <-   Refused: there is another one of this rank, or of other options
               <-   Stalled: that of another host of its replica is gone
               <-   Ended, as all members are told

A replica that has ended before it joined is not known to the run, which would wait
for it. Nothing of this is in a log: launchers call the next coordinator, too.
"""

from __future__ import annotations

from typing import NamedTuple

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.entries import Ended, Process, ReplicaId
from optax_dist.coordinator.protocol.history import History


class Absent(NamedTuple):
  """Whom nobody must wait for.

  Attributes:
    replicas: those that have ended, and count as lost if they never joined.
    given_up: why some of them do not start again; "" if they do.
    members: processes that were members, and have ended: a coordinator that has
      started again need not wait for their calls.
  """

  replicas: tuple[ReplicaId, ...] = ()
  given_up: str = ""
  members: tuple[Process, ...] = ()


class Hosts:
  """The launchers of a run.

  Attributes:
    absent: what all of them have said.

  Example:
    >>> hosts = Hosts()
    >>> hosts.called("a", msg.Host("", 0, "", "the first", (0,), ended=(0,)))
    []
    >>> hosts.absent.replicas
    (0,)
    >>> (sent,) = hosts.called("b", msg.Host("", 0, "", "the second", (0,)))
    >>> sent.peers, type(sent.message).__name__
    (('b',), 'Refused')
  """

  def __init__(self) -> None:
    """Starts before anybody has called."""
    self.absent = Absent()
    # By rank.
    self._here: dict[int, tuple[Process, msg.Host]] = {}
    self._reports: dict[int, Absent] = {}
    # Who knows that the run has ended.
    self._know_the_end: set[Process] = set()

  def coming(self, history: History) -> set[ReplicaId]:
    """The replicas that launchers have started, and that have not joined yet."""
    joined = {member.replica for member in history.members.values()}
    hosts = self._here.values()
    coming = {replica for _, host in hosts for replica in host.coming}
    return coming - joined - history.departed.keys()

  @property
  def launchers(self) -> set[Process]:
    """The launchers that are connected."""
    return {process for process, _ in self._here.values()}

  def called(self, peer: Process, host: msg.Host) -> list[fx.Send]:
    """A launcher has called, or says what has changed."""
    for rank, (process, other) in self._here.items():
      why = ""
      if rank != host.rank and other.options != host.options:
        why = (
          f"this launcher has {host.options}, and that of rank {rank}"
          f" ({other.launcher}) has {other.options}. Start all with the same"
        )
      elif rank == host.rank and process != peer:
        why = (
          f"another launcher has rank {rank} of this job ({other.launcher}). Give"
          " each host a --node-rank of its own, or end that one first"
        )
      if why:
        return [fx.Send((peer,), msg.Refused(why))]
    self._here[host.rank] = peer, host
    said = Absent(host.ended, host.given_up, host.ended_members)
    self._report(host.rank, said)
    return []

  def lost(self, peer: Process, how: str) -> list[fx.Send]:
    """A process is not connected any more."""
    self._know_the_end.discard(peer)
    for rank, (process, host) in self._here.items():
      if process == peer:
        del self._here[rank]
        # Those that have joined have connections of their own.
        self._report(rank, Absent(host.replicas, host.given_up))
        return self._missed(host) if host.given_up or how != "left" else []
    return []

  def _report(self, rank: int, said: Absent) -> None:
    self._reports[rank] = said
    reports = self._reports.values()
    self.absent = Absent(
      tuple(replica for report in reports for replica in report.replicas),
      "; ".join(report.given_up for report in reports if report.given_up),
      tuple(process for report in reports for process in report.members),
    )

  def _missed(self, host: msg.Host) -> list[fx.Send]:
    """Tells the launchers of replicas that have processes on a host that is gone."""
    sent = []
    for process, other in self._here.values():
      shared = {*other.replicas} & {*host.replicas}
      if shared:
        text = (
          f"the launcher of rank {host.rank} ({host.launcher}) is gone, and replica"
          f" {', '.join(map(str, sorted(shared)))} needs its processes there: it waits"
          " until that launcher is started again"
        )
        sent.append(fx.Send((process,), msg.Stalled(0, 0.0, text)))
    return sent

  def ended(self, ended: Ended) -> list[fx.Send]:
    """Tells launchers whose replicas have no part in the run of its end."""
    new = sorted(self.launchers - self._know_the_end)
    self._know_the_end.update(new)
    return [fx.Send(tuple(new), ended)] if new else []
