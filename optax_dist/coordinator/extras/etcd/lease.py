"""Who is the coordinator: whoever has the key that lives as long as etcd's lease.

All that a coordinator writes is compared with that key in the same transaction, so
one that has lost it, and does not know, writes nothing.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from optax_dist.coordinator.extras.etcd import client, place
from optax_dist.coordinator.extras.etcd.place import Etcd, Holder
from optax_dist.coordinator.server.log import LogError

# Seconds that one request may take, and one of a coordinator that ends.
_REQUEST_SECONDS, _FAREWELL = 2.0, 1.0
# How often it is kept alive while it lasts.
_BEATS = 5


class Lease:
  """The lease of one coordinator; made without it, and acquired later."""

  def __init__(
    self, where: Etcd, secret: bytes, on_lost: Callable[[], None] = lambda: None
  ):
    """Prepares to ask for it.

    Args:
      where: the keys.
      secret: the job's.
      on_lost: called from another thread when it is lost.

    Raises:
      ValueError: a certificate can't be used.
    """
    self._where, self._secret, self._on_lost = where, secret, on_lost
    self._asked = client.Client(where.servers)
    self._me = Holder(secrets.token_hex(16), "", *_process(os.getpid()))
    self._id, self._revision, self._until = 0, "", 0.0
    self._lost = ""
    self._ended = threading.Event()
    self._thread = threading.Thread(
      target=self._keep, name="optax-dist-lease", daemon=True
    )

  def acquire(self) -> bool:
    """Asks for it once; returns whether it is this coordinator's now.

    Raises:
      client.NoAnswer: it is not known.
      LogError: it can't be had, now or later.
    """
    try:
      return self._acquire()
    except client.Rejected as error:
      raise LogError(f"etcd refuses a request: {error}.") from None
    except place.Foreign as error:
      raise LogError(f"{error}.") from None

  def _acquire(self) -> bool:
    key = place.encoded(self._where.holder_key)
    pairs = self._ask("kv/range", {"key": key}).get("kvs")
    if pairs:
      holder = self._where.read_holder(self._secret, pairs[0])
      if holder.token != self._me.token:
        if _is_dead(holder):
          # Nobody needs to wait for it.
          self._ask("lease/revoke", {"ID": pairs[0]["lease"]})
        return False
    else:
      began = time.monotonic()
      seconds = round(self._where.lease)
      self._id = self._ask("lease/grant", {"TTL": seconds})["ID"]
      self._until = began + seconds
      self._ask(
        "kv/txn",
        {
          "compare": [{"key": key, "target": "CREATE", "create_revision": "0"}],
          "success": [{"request_put": self._put(self._me)}],
        },
      )
      pairs = self._ask("kv/range", {"key": key}).get("kvs")
      if not pairs:
        return False
      holder = self._where.read_holder(self._secret, pairs[0])
      if holder.token != self._me.token:
        return False  # Another one was faster.
    self._id, self._revision = pairs[0]["lease"], pairs[0]["create_revision"]
    self._thread.start()
    return True

  def announce(self, address: str) -> None:
    """Tells members where the coordinator is.

    Raises:
      LogError: the lease is lost.
    """
    self._me = msgspec.structs.replace(self._me, address=address)
    self.write([{"request_put": self._put(self._me)}], self._asked)

  def write(
    self,
    changes: list[dict[str, Any]],
    asked: client.Client,
    absent: str = "",
  ) -> dict[str, Any]:
    """Changes keys while the lease is this coordinator's; asks until it is known.

    Args:
      changes: etcd's requests, which may be carried out twice.
      asked: makes the request.
      absent: a key that must not exist, whose value is asked for if it does; ""
        for none.

    Returns:
      The answer of the transaction; it has succeeded if `absent` is "".

    Raises:
      LogError: the lease is lost.
      client.Rejected: the cluster refuses the request.
    """
    key = place.encoded(self._where.holder_key)
    compare: list[dict[str, Any]] = [
      {"key": key, "target": "CREATE", "create_revision": self._revision}
    ]
    asks: list[dict[str, Any]] = [{"request_range": {"key": key}}]
    if absent:
      other = place.encoded(absent)
      compare.append({"key": other, "target": "CREATE", "create_revision": "0"})
      asks.append({"request_range": {"key": other}})
    body = {"compare": compare, "success": changes, "failure": asks}
    while True:
      self.check()
      try:
        found = asked.ask("kv/txn", body, time.monotonic() + _REQUEST_SECONDS)
      except client.NoAnswer:
        continue
      if not found.get("succeeded"):
        self._check_holder(found["responses"][0]["response_range"])
      return found

  def check(self) -> None:
    """Raises `LogError` if it is lost, or has ended as far as this host knows."""
    if not self._lost and time.monotonic() >= self._until:
      self._lose("no etcd server has prolonged its lease in time")
    if self._lost:
      raise LogError(f"Another coordinator may live: {self._lost}.")

  @property
  def is_lost(self) -> bool:
    """Whether another coordinator may have it."""
    return bool(self._lost) or time.monotonic() >= self._until

  def release(self) -> None:
    """Gives it back, for another coordinator to have it at once."""
    self._ended.set()
    if self._thread.is_alive():
      self._thread.join(_REQUEST_SECONDS)
    if self._id:
      with contextlib.suppress(client.NoAnswer, client.Rejected):
        self._asked.ask(
          "lease/revoke", {"ID": self._id}, time.monotonic() + _FAREWELL
        )
    self._asked.close()

  def _check_holder(self, found: dict[str, Any]) -> None:
    pairs = found.get("kvs")
    if not pairs or pairs[0]["create_revision"] != self._revision:
      self._lose("it has lost its lease in etcd")
      self.check()

  def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return self._asked.ask(path, body, time.monotonic() + _REQUEST_SECONDS)

  def _put(self, holder: Holder) -> dict[str, Any]:
    key, value = self._where.holder_key, msgspec.json.encode(holder)
    return {
      "key": place.encoded(key),
      "value": place.sealed(self._secret, key, value),
      "lease": self._id,
    }

  def _lose(self, why: str) -> None:
    self._lost = self._lost or why
    self._on_lost()

  def _keep(self) -> None:
    """Keeps it alive; in a thread of its own, since the log may be waiting."""
    with client.Client(self._where.servers) as asked:
      while not self._ended.wait(self._where.lease / _BEATS):
        began = time.monotonic()
        if began >= self._until:
          self._lose("no etcd server has prolonged its lease in time")
          return
        try:
          found = asked.ask(
            "lease/keepalive",
            {"ID": self._id},
            min(self._until, began + _REQUEST_SECONDS),
          )
        except client.NoAnswer:
          continue
        except client.Rejected as error:
          self._lose(f"etcd refuses to prolong its lease: {error}")
          return
        seconds = float(found.get("result", {}).get("TTL", 0))
        if not seconds:
          self._lose("its lease in etcd has ended")
          return
        self._until = began + seconds


def _process(pid: int) -> tuple[str, int, str]:
  """Identifies a process: host, number there, and when it was started."""
  try:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    space = os.readlink("/proc/self/ns/pid")
    return f"{boot} {space}", pid, _stat(pid)[19]
  except (OSError, IndexError):  # Not Linux.
    return "", pid, ""


def _stat(pid: int) -> list[str]:
  text = pathlib.Path(f"/proc/{pid}/stat").read_text()
  return text.rpartition(")")[2].split()


def _is_dead(holder: Holder) -> bool:
  """Whether it was a process of this host, and has ended."""
  host, _, _ = _process(os.getpid())
  if not host or holder.host != host:
    return False
  try:
    fields = _stat(holder.pid)
  except OSError:
    return True
  return fields[0] == "Z" or fields[19] != holder.started
