"""Hosts on one machine: network namespaces, joined by a switch or a bridge.

What runs in a host sees that host's addresses only. `Hosts` are made for one test
and removed with it. Making them needs the rights of root; a test asks
`not_permitted()` first, and is skipped with its reason.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

import switch

_COUNTER = itertools.count()
_NETWORK = "10.203.0"
# A folder of files for each namespace, which stand in place of those in /etc.
_ETC = pathlib.Path("/etc/netns")


@functools.cache
def not_permitted() -> str:
  """Why hosts can't be made here; "" where they can."""
  for command in ("ip", "unshare"):
    if shutil.which(command) is None:
      return f"there is no command {command!r} (Debian: iproute2, util-linux)"
  if not os.path.exists("/dev/net/tun"):
    return "there is no /dev/net/tun"
  name = f"odtry{os.getpid()}"
  made = _run("ip", "netns", "add", name)
  if made.returncode:
    return f"network namespaces are not permitted: {made.stderr.strip()}"
  device = _run(
    "ip", "netns", "exec", name, "ip", "tuntap", "add", "x", "mode", "tun"
  )
  _run("ip", "netns", "del", name)
  if device.returncode:
    return f"TUN devices are not permitted: {device.stderr.strip()}"
  return ""


def _run(*command: str) -> subprocess.CompletedProcess:
  return subprocess.run(command, capture_output=True, text=True, check=False)


def _must(*command: str) -> None:
  done = _run(*command)
  if done.returncode:
    raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class Hosts:
  """Some hosts that reach each other.

  Args:
    count: how many.
    seed: of the losses.
    bridged: whether the kernel joins them, at full speed: then nothing can be
      delayed, lost or cut, only `rate` is kept.
    rate: with `bridged`, bits per second out of each host; 0 for no bound.
    versions: of IP, that they have addresses of; each knows all of them as host0,
      host1 and so on, by addresses of the first of these versions.
  """

  def __init__(
    self,
    count: int,
    *,
    seed: int = 0,
    bridged: bool = False,
    rate: float = 0.0,
    versions: Sequence[int] = (4, 6),
  ):
    self.versions = versions
    prefix = f"od{os.getpid() % 100000}x{next(_COUNTER)}"
    self.names = [f"{prefix}n{i}" for i in range(count)]
    self._bridge = f"{prefix}b"
    self._switch: subprocess.Popen | None = None
    self._processes: list[subprocess.Popen] = []
    try:
      for name in self.names:
        _must("ip", "netns", "add", name)
        _must("ip", "-n", name, "link", "set", "lo", "up")
        self._name_all(name)
      if bridged:
        self._join_by_bridge(rate)
      else:
        self._join_by_switch(seed)
    except BaseException:
      self.close()
      raise

  def __enter__(self) -> Hosts:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def address(self, host: int, version: int = 4) -> str:
    """A host's address, of IP version 4 or 6."""
    return f"fd00::{host + 1:x}" if version == 6 else f"{_NETWORK}.{host + 1}"

  def start(
    self, host: int, command: Sequence[str], **options
  ) -> subprocess.Popen:
    """Starts a process in a host; the arguments are those of `Popen`."""
    process = subprocess.Popen(
      ["ip", "netns", "exec", self.names[host], *command], **options
    )
    self._processes.append(process)
    return process

  def python(self, host: int, *arguments: str, **options) -> subprocess.Popen:
    """Starts this Python in a host."""
    return self.start(host, [sys.executable, *arguments], **options)

  def shape(
    self,
    hosts: Sequence[int] | None = None,
    *,
    delay: float = 0.0,
    rate: float = 0.0,
    loss: float = 0.0,
  ) -> None:
    """Says what the way out of hosts is like, from now on.

    Args:
      hosts: which; None for all.
      delay: seconds one way: a round trip between two such hosts takes twice
        that.
      rate: bits per second; 0 for no bound.
      loss: the share of packets that are lost.
    """
    for host in range(len(self.names)) if hosts is None else hosts:
      self._ask(do="shape", host=host, delay=delay, rate=rate / 8, loss=loss)

  def cut(self, some: Sequence[int], others: Sequence[int], *, both=True):
    """Lets no packet through from some to others, and back if `both`."""
    ways = [(a, b) for a in some for b in others if a != b]
    self._ask(do="cut", ways=ways + ([(b, a) for a, b in ways] if both else []))

  def vanish(self, host: int) -> None:
    """Cuts a host off from all others."""
    self.cut([host], [i for i in range(len(self.names)) if i != host])

  def heal(self) -> None:
    """Ends all cuts."""
    self._ask(do="heal")

  def packets(self) -> int:
    """How many packets were let through so far."""
    return self._ask(do="count")["packets"]

  def close(self) -> None:
    """Kills what still runs in the hosts, and removes them."""
    for process in self._processes:
      if process.poll() is None:
        process.kill()
      process.wait()
    if self._switch is not None:
      with contextlib.suppress(BrokenPipeError):  # A signal ended it, too.
        self._switch.stdin.close()
      self._switch.wait(60)
      self._switch.stdout.close()
      self._switch = None
    for name in self.names:
      _run("ip", "netns", "del", name)
      shutil.rmtree(_ETC / name, ignore_errors=True)
    _run("ip", "link", "del", self._bridge)

  def _name_all(self, name: str) -> None:
    """Writes what `ip netns exec` puts in place of /etc/hosts."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    for host in range(len(self.names)):
      lines.append(f"{self.address(host, self.versions[0])} host{host}")
    folder = _ETC / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts").write_text("".join(f"{line}\n" for line in lines))

  def _join_by_switch(self, seed: int) -> None:
    self._switch = subprocess.Popen(
      [sys.executable, switch.__file__, json.dumps(self.names), str(seed)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    self._answer()
    for host, name in enumerate(self.names):
      self._configure(name, switch.DEVICE, host)

  def _join_by_bridge(self, rate: float) -> None:
    _must("ip", "link", "add", self._bridge, "type", "bridge")
    _must("ip", "link", "set", self._bridge, "up")
    for host, name in enumerate(self.names):
      port = f"{self._bridge}{host}"
      _must(
        *("ip", "link", "add", port, "type", "veth"),
        *("peer", "name", switch.DEVICE, "netns", name),
      )
      _must("ip", "link", "set", port, "master", self._bridge, "up")
      if rate:
        _must(
          *("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev"),
          *(switch.DEVICE, "root", "tbf", "rate", f"{rate:.0f}bit"),
          *("burst", "256kb", "latency", "50ms"),
        )
      self._configure(name, switch.DEVICE, host)

  def _configure(self, name: str, device: str, host: int) -> None:
    for version in self.versions:
      bits = 24 if version == 4 else 64
      address = f"{self.address(host, version)}/{bits}"
      # Without "nodad" an address of version 6 can't be bound for a second.
      how = ["nodad"] if version == 6 else []
      _must("ip", "-n", name, "addr", "add", address, "dev", device, *how)
    _must("ip", "-n", name, "link", "set", device, "up")

  def _ask(self, **request) -> dict:
    if self._switch is None:
      raise ValueError("only hosts that are joined by a switch can do that")
    self._switch.stdin.write(json.dumps(request) + "\n")
    self._switch.stdin.flush()
    return self._answer()

  def _answer(self) -> dict:
    line = self._switch.stdout.readline()
    if not line:
      raise OSError(f"the switch has ended: {self._switch.wait()}")
    return json.loads(line)
