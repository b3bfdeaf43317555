"""The lease: the process that has its key in etcd is the coordinator.

Each write of a coordinator checks that key in the same transaction. So a coordinator
that has lost the lease, and does not know it yet, can't write.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from optax_dist.coordinator.extras.etcd import client, keys
from optax_dist.coordinator.server.log import LogError
from optax_dist.coordinator.transport import addresses

# Seconds that one request may take.
REQUEST_SECONDS = 2.0
# Seconds that the return of the lease may take, and the check whether its holder lives.
_FAREWELL, _CONNECT = 1.0, 0.5
# How often the lease is renewed in the time for which it lasts.
_BEATS = 5


class Holder(msgspec.Struct, frozen=True):
  """The holder of the lease.

  Attributes:
    token: a random text of that process.
    address: address of its transport; "" until it has read the log.
  """

  token: str
  address: str = ""

  @property
  def has_died(self) -> bool:
    """Whether it was a process of this host, and listens no more."""
    if not self.address:
      return False
    way = addresses.parse(self.address)[-1]
    try:
      if addresses.is_own(way.host):
        to = way.host, way.port
        socket.create_connection(to, _CONNECT).close()
    except ConnectionRefusedError:
      return True
    except OSError:
      pass
    return False


class Lease:
  """The lease of one coordinator; made without it, and acquired later.

  Attributes:
    where: the keys.
    secret: the job's.
    client: for the thread that it belongs to.
    trouble: why the last attempt to get it had no answer; "" if it had.
  """

  def __init__(
    self, url: str, secret: bytes, beat: Callable[[], None] = lambda: None
  ):
    """Prepares to ask for it.

    Args:
      url: the URL of the cluster.
      secret: the job's.
      beat: called again and again while etcd is waited for.

    Raises:
      ValueError: it is no such URL, or a certificate can't be used.
    """
    self.where, self.secret = keys.parse(url), secret
    self.client, self.trouble = client.Client(self.where), ""
    self._beat = beat
    self._token = secrets.token_hex(16)
    self._id, self._revision, self._until = 0, "", 0.0
    self._lost = ""
    self._ended = threading.Event()
    self._thread = threading.Thread(
      target=self._keep, name="optax-dist-lease", daemon=True
    )

  def acquire(self) -> bool:
    """Asks for it once; returns whether it is this coordinator's now.

    Raises:
      LogError, client.Rejected: it can't be had, now or later.
    """
    try:
      acquired, self.trouble = self._acquire(), ""
    except client.NoAnswer as error:
      self.trouble = str(error)
      return False
    except keys.Foreign as error:
      raise LogError(f"{error}.") from None
    return acquired

  def _acquire(self) -> bool:
    holder, pair = self._holder()
    if holder is None:
      began, seconds = time.monotonic(), round(self.where.lease)
      self._id = self._ask("lease/grant", {"TTL": seconds})["ID"]
      self._until = began + seconds
      absent = _created(self.where.holder_key, "0")
      put = {"request_put": self._put(Holder(self._token))}
      self._ask("kv/txn", {"compare": [absent], "success": [put]})
      holder, pair = self._holder()
    if holder is None or holder.token != self._token:
      if holder is not None and holder.has_died:
        # Its holder is dead, so there is no need to wait until the lease expires.
        self._ask("lease/revoke", {"ID": pair["lease"]})
      return False
    self._id, self._revision = pair["lease"], pair["create_revision"]
    self._thread.start()
    return True

  def announce(self, address: str) -> None:
    """Tells members where the coordinator is.

    Raises:
      LogError: the lease is lost.
      client.Rejected: the cluster refuses the request.
    """
    self.write({"request_put": self._put(Holder(self._token, address))})

  def write(self, change: dict[str, Any], absent: str = "") -> dict[str, Any]:
    """Changes keys while the lease is this coordinator's; asks until it is known.

    Args:
      change: etcd's request, which may be carried out twice.
      absent: a key that must not exist, whose value is asked for if it does; ""
        for none.

    Returns:
      The answer of the transaction; it has succeeded if `absent` is "".

    Raises:
      LogError: the lease is lost.
      client.Rejected: the cluster refuses the request.
    """
    mine = self.where.holder_key
    compare = [_created(mine, self._revision)]
    compare += [_created(absent, "0")] if absent else []
    asks = [
      {"request_range": {"key": keys.encoded(key)}}
      for key in (mine, absent)
      if key
    ]
    body = {"compare": compare, "success": [change], "failure": asks}
    while True:
      self.check()
      try:
        answer = self._ask("kv/txn", body)
      except client.NoAnswer:
        continue
      if not answer.get("succeeded"):
        pairs = answer["responses"][0]["response_range"].get("kvs")
        if not pairs or pairs[0]["create_revision"] != self._revision:
          self._lost = "it has lost its lease in etcd"
          self.check()
      return answer

  def check(self) -> None:
    """Raises `LogError` if it is lost, or has ended as far as this host knows."""
    self._beat()
    if not self._lost and time.monotonic() >= self._until:
      self._lost = "no etcd server has prolonged its lease in time"
    if self._lost:
      raise LogError(f"Another coordinator may live: {self._lost}.")

  def release(self) -> None:
    """Gives it back, for another coordinator to have it at once."""
    self._ended.set()
    if self._thread.is_alive():
      self._thread.join(REQUEST_SECONDS)
    if self._id:
      with contextlib.suppress(client.NoAnswer, client.Rejected):
        self.client.ask("lease/revoke", {"ID": self._id}, _FAREWELL)
    self.client.close()

  def _holder(self) -> tuple[Holder | None, dict[str, Any]]:
    """The holder of the lease, and its key-value pair."""
    pair = self.client.get(self.where.holder_key, REQUEST_SECONDS)
    return (
      (None, {})
      if pair is None
      else (holder_of(self.where, self.secret, pair), pair)
    )

  def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return self.client.ask(path, body, REQUEST_SECONDS)

  def _put(self, holder: Holder) -> dict[str, Any]:
    value = msgspec.json.encode(holder)
    pair = keys.sealed(self.secret, self.where.holder_key, value)
    return {**pair, "lease": self._id}

  def _keep(self) -> None:
    """Keeps it alive; in a thread of its own, since the log may be waiting."""
    with client.Client(self.where) as own:
      while not self._ended.wait(self.where.lease / _BEATS):
        began = time.monotonic()
        try:
          answer = own.ask("lease/keepalive", {"ID": self._id}, REQUEST_SECONDS)
        except client.NoAnswer:
          continue
        except client.Rejected as error:
          self._lost = f"{error}"
          return
        seconds = float(answer.get("TTL", 0))
        if not seconds:
          self._lost = "its lease in etcd has ended"
          return
        self._until = began + seconds


def holder_of(where: keys.Etcd, secret: bytes, pair: dict[str, Any]) -> Holder:
  """The holder of the lease.

  Args:
    where: the keys.
    secret: the job's secret.
    pair: key and value, as etcd returns them.

  Raises:
    keys.Foreign: no process of this job wrote it.
  """
  raw = keys.unseal(secret, where.holder_key, pair)
  return msgspec.json.decode(raw, type=Holder)


def _created(key: str, revision: str) -> dict[str, Any]:
  """The condition that a key was created then; "0" for one that is not there."""
  return {
    "key": keys.encoded(key),
    "target": "CREATE",
    "create_revision": revision,
  }
