"""The launchers of a job's hosts, and the replicas that never joined.

    launcher   Host (its rank, and which replicas have ended)   ->
               <-   Refused: another launcher has this rank, or other options
               <-   Stalled: the launcher of another host of its replica is gone
               <-   Ended, which members get, too

The log does not know a replica that has ended before it joined, so without the
launchers' reports the run would wait for it. These reports are not in the log:
launchers call the next coordinator, too.
"""

from __future__ import annotations

from typing import NamedTuple

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.entries import Process, ReplicaId
from optax_dist.coordinator.protocol.history import History


class Absent(NamedTuple):
  """The replicas and processes that launchers know to have ended.

  Attributes:
    replicas: replicas that have ended; they count as lost if they never joined.
    given_up: why some of the replicas are not started again; "" if all are.
    members: processes that were members, and have ended: a coordinator that has
      started again need not wait for their calls.
  """

  replicas: tuple[ReplicaId, ...] = ()
  given_up: str = ""
  members: tuple[Process, ...] = ()


class Hosts:
  """The launchers of a run.

  Attributes:
    absent: the reports of all launchers, together.

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
    """Starts before any launcher has called."""
    self.absent = Absent()
    # Connected launchers and their last reports, by rank.
    self._here: dict[int, tuple[Process, msg.Host]] = {}
    self._reports: dict[int, Absent] = {}

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
    """A launcher has called, or reports a change."""
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
    for rank, (process, host) in self._here.items():
      if process == peer:
        del self._here[rank]
        # All replicas of this host count as ended; those that have joined are judged by
        # their own connections.
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
    """Warns launchers that share a replica with a host whose launcher is gone."""
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
