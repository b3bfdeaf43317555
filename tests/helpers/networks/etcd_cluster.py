"""Etcd servers on loopback, started and killed by tests."""

import contextlib
import json
import pathlib
import shutil
import signal
import subprocess
import time
import urllib.request

import pytest

from optax_dist.coordinator.transport import addresses

needs_etcd = pytest.mark.skipif(
  shutil.which("etcd") is None,
  reason="needs etcd; on Debian: apt-get install etcd-server",
)


class Cluster:
  """Some servers that know each other.

  Attributes:
    endpoints: host:port of each.
  """

  def __init__(self, folder: pathlib.Path, count: int = 3, args=()):
    free = addresses.free_ports(2 * count)
    self._clients, self._peers = free[:count], free[count:]
    self.endpoints = [f"127.0.0.1:{port}" for port in self._clients]
    self._folder, self._args = folder, args
    self._processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
      for index in range(count):
        self.start(index)
      for index in range(count):
        self.wait(index)
    except BaseException:
      self.close()
      raise

  @property
  def url(self) -> str:
    """As `join` takes it."""
    return f"etcd://{','.join(self.endpoints)}"

  def start(self, index: int) -> None:
    """Starts a server, on what it had stored."""
    name = f"server{index}"
    client = f"http://127.0.0.1:{self._clients[index]}"
    peer = f"http://127.0.0.1:{self._peers[index]}"
    everyone = ",".join(
      f"server{i}=http://127.0.0.1:{port}" for i, port in enumerate(self._peers)
    )
    with (self._folder / f"{name}.log").open("ab") as log:
      self._processes[index] = subprocess.Popen(
        [
          *("etcd", "--name", name),
          *("--data-dir", str(self._folder / name)),
          *("--listen-client-urls", client, "--advertise-client-urls", client),
          *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
          *("--initial-cluster", everyone),
          *("--heartbeat-interval", "50", "--election-timeout", "500"),
          *self._args,
        ],
        stdout=log,
        stderr=log,
      )

  def wait(self, index: int, seconds: float = 90.0) -> None:
    """Waits until a server takes requests."""
    end = time.monotonic() + seconds
    while True:
      with contextlib.suppress(OSError):
        self.post(index, "kv/range", {"key": "YQ=="})
        return
      assert time.monotonic() < end, f"etcd server {index} does not start"
      time.sleep(0.05)

  def post(self, index: int, path: str, body: object) -> dict:
    """Makes a separate request."""
    request = urllib.request.Request(
      f"http://{self.endpoints[index]}/v3/{path}", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=60.0) as answer:
      return json.load(answer)

  def leader(self) -> int:
    """The server that leads the others, once there is one."""
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
      for index in self._processes:
        with contextlib.suppress(OSError):
          status = self.post(index, "maintenance/status", {})
          if status.get("leader") == status["header"]["member_id"]:
            return index
      time.sleep(0.05)
    raise AssertionError("etcd has no leader")

  def kill(self, index: int) -> None:
    """Ends a server without notice."""
    process = self._processes.pop(index)
    process.kill()
    process.wait(60.0)

  def pause(self, index: int) -> None:
    """Stops a server; its connections stay."""
    self._processes[index].send_signal(signal.SIGSTOP)

  def resume(self, index: int) -> None:
    """Continues a stopped server."""
    self._processes[index].send_signal(signal.SIGCONT)

  def forget(self, index: int) -> None:
    """Removes what a killed server had stored."""
    shutil.rmtree(self._folder / f"server{index}")

  def close(self) -> None:
    """Ends all servers."""
    for index in list(self._processes):
      self.resume(index)
      self.kill(index)
