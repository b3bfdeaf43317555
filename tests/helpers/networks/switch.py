"""A network in a process: packets between hosts, with delay, loss, rate and cuts.

Each host is a network namespace with one TUN device, whose packets this process
reads and writes. So nothing is needed of the kernel but namespaces and TUN, and
what a cable does wrong is decided in one place, from one seed.

Run as a program by `hosts.Hosts`: commands come in as lines of JSON, and each is
answered by a line.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI
# Packets that wait at a host's slow link; more are lost, as in any router.
_QUEUE = 1000
DEVICE = "wire"


@dataclasses.dataclass
class Link:
  """The properties of a host's link.

  Attributes:
    delay: seconds that a packet takes.
    rate: bytes per second; 0 for no bound.
    loss: the share of packets that are lost.
    free: when the packets before are out.
    waiting: how many these are, as times at which they are out.
  """

  delay: float = 0.0
  rate: float = 0.0
  loss: float = 0.0
  free: float = 0.0
  waiting: list[float] = dataclasses.field(default_factory=list)


class Switch:
  """Carries packets between hosts, by their addresses."""

  def __init__(self, namespaces: list[str], seed: int):
    """Opens a device in each namespace, which must exist."""
    self._devices = [_open_device(name) for name in namespaces]
    self._links = [Link() for _ in namespaces]
    self._cuts: set[tuple[int, int]] = set()
    self._random = random.Random(seed)
    self._coming: list[tuple[float, int, int, bytes]] = []
    self._sent = 0

  def command(self, request: dict) -> dict:
    """Does what `hosts.Hosts` asks for."""
    match request:
      case {"do": "shape", "host": host, **shape}:
        self._links[host] = Link(**shape)
      case {"do": "cut", "ways": ways}:
        self._cuts |= {(a, b) for a, b in ways}
      case {"do": "heal"}:
        self._cuts.clear()
      case {"do": "count"}:
        return {"packets": self._sent}
      case _:
        raise ValueError(f"no such command: {request}")
    return {}

  def run(self) -> None:
    """Carries packets until standard input is closed."""
    commands = sys.stdin.fileno()
    files = [*self._devices, commands]
    partial = b""
    while True:
      now = time.monotonic()
      while self._coming and self._coming[0][0] <= now:
        _, _, to, packet = heapq.heappop(self._coming)
        self._deliver(to, packet)
      wait = max(0.0, self._coming[0][0] - now) if self._coming else None
      ready, _, _ = select.select(files, [], [], wait)
      for file in ready:
        if file == commands:
          data = os.read(commands, 65536)
          if not data:
            return
          *lines, partial = (partial + data).split(b"\n")
          for line in lines:
            print(json.dumps(self.command(json.loads(line))), flush=True)
        else:
          self._take(self._devices.index(file))

  def _take(self, source: int) -> None:
    # Some packets at a time, so that none waits behind a single host's stream.
    for _ in range(64):
      try:
        packet = os.read(self._devices[source], 65536)
      except BlockingIOError:
        return
      to = _destination(packet)
      if to is None or not 0 <= to < len(self._devices):
        continue
      link = self._links[source]
      if (source, to) in self._cuts or self._random.random() < link.loss:
        continue
      now = time.monotonic()
      leaves = now
      if link.rate:
        link.waiting = [at for at in link.waiting if at > now]
        if len(link.waiting) >= _QUEUE:
          continue
        leaves = max(now, link.free) + len(packet) / link.rate
        link.free = leaves
        link.waiting.append(leaves)
      self._sent += 1
      if leaves + link.delay <= now:
        self._deliver(to, packet)
      else:
        entry = (leaves + link.delay, self._sent, to, packet)
        heapq.heappush(self._coming, entry)

  def _deliver(self, to: int, packet: bytes) -> None:
    # The host is off, or its queue is full: the packet is lost.
    with contextlib.suppress(OSError):
      os.write(self._devices[to], packet)


def _destination(packet: bytes) -> int | None:
  """The index of the host that a packet goes to; None for no host."""
  if packet[0] >> 4 == 4:
    return packet[19] - 1
  if packet[0] >> 4 == 6 and packet[24] == 0xFD:
    return packet[39] - 1
  return None


def _open_device(namespace: str) -> int:
  """Makes the device in a namespace; what is written to it arrives there."""
  libc = ctypes.CDLL(None, use_errno=True)
  with open("/proc/self/ns/net") as home, open(f"/run/netns/{namespace}") as ns:
    if libc.setns(ns.fileno(), _NEW_NETWORK):
      raise OSError(ctypes.get_errno(), f"can't enter namespace {namespace}")
    try:
      device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
      name = struct.pack("16sH22x", DEVICE.encode(), _TUN_WITHOUT_HEADER)
      fcntl.ioctl(device, _SET_INTERFACE, name)
    finally:
      libc.setns(home.fileno(), _NEW_NETWORK)
  return device


if __name__ == "__main__":
  switch = Switch(json.loads(sys.argv[1]), int(sys.argv[2]))
  print("{}", flush=True)
  switch.run()
