"""A coordinator in etcd: it waits for the lease, and has the run's logs then."""

from __future__ import annotations

from collections.abc import Callable

from optax_dist.coordinator.extras.etcd import client, place
from optax_dist.coordinator.extras.etcd.lease import Lease
from optax_dist.coordinator.extras.etcd.log import EtcdLog


class Standby:
  """One of the processes that may be the coordinator; `str` is its URL.

  Attributes:
    host: the host of an etcd server.
    on_lost: called from another thread when the lease is lost.
    trouble: why the last attempt to get the lease had no answer.
  """

  def __init__(self, url: str, secret: bytes):
    """Prepares to wait.

    Args:
      url: of the cluster.
      secret: the job's.

    Raises:
      ValueError: it is no such URL, or a certificate can't be used.
    """
    self._where, self._secret = place.parse(url), secret
    self.host, self.trouble = self._where.host, ""
    self.on_lost: Callable[[], None] = lambda: None
    self._lease = Lease(self._where, secret, lambda: self.on_lost())

  def __str__(self) -> str:
    return str(self._where)

  def acquire(self) -> bool:
    """Asks for the lease once; returns whether this is the coordinator now.

    Raises:
      LogError: it can't be had, now or later.
    """
    try:
      acquired = self._lease.acquire()
    except client.NoAnswer as error:
      self.trouble = str(error)
      return False
    self.trouble = ""
    return acquired

  def log(self, run: str) -> EtcdLog:
    """The log of a run."""
    return EtcdLog(self._where, run, self._secret, self._lease)

  def announce(self, address: str) -> None:
    """Tells members where it listens.

    Raises:
      LogError: the lease is lost.
    """
    self._lease.announce(address)

  def check(self) -> None:
    """Raises `LogError` if another coordinator may have the lease."""
    self._lease.check()

  def release(self) -> None:
    """Gives the lease back, if it has it."""
    self._lease.release()
