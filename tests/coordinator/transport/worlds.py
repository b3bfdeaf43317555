"""Transports for tests, driven in turn from one thread."""

import time

import issued
import proxies

from optax_dist.coordinator.transport import interface, sockets, tls

SECRET = b"a secret of a test"


def certificates(folder):
  """Files of an authority and of one replica."""
  paths = [folder / name for name in ("me.pem", "me.key", "ca.pem")]
  if not paths[0].exists():
    return issued.Authority(folder).issue()
  return tls.Certificates(*map(str, paths))


def tcp_only(transport):
  """The address of a transport without its socket of this host."""
  ways = transport.address.split(",")
  return ",".join(way for way in ways if not way.startswith("unix:"))


class VirtualClock:
  """Seconds that pass as transports are polled, many in each real one."""

  #: Seconds of each turn of a world.
  STEP = 0.25

  def __init__(self):
    self._seconds = 0.0

  def __call__(self):
    return self._seconds

  def advance(self, seconds=STEP):
    self._seconds += seconds


class World:
  """Some transports of one kind, and all events that came out of each.

  Attributes:
    kind: of all transports.
    clock: the clock of sockets, and of this world; by default the real one.
  """

  def __init__(self, kind, folder=None, limits=None, clock=time.monotonic):
    self.kind = kind
    self.clock = clock
    self._folder = folder
    self._limits = limits
    self._proxies = []
    self._made = []
    self.all = {}
    self.events = {}

  def add(self, name, **options):
    options.setdefault("limits", self._limits)
    if self.kind != "unix":
      options.setdefault("secret", SECRET)
      options.setdefault("bind", "127.0.0.1")
      options.setdefault("ports", [0])
    if self.kind == "tls":
      options["certificates"] = certificates(self._folder)
    run = options.pop("run", None)
    made = sockets.Transport(name, time_source=self.clock, **options)
    if run is not None:
      made.use_run(run)
    self._made.append(made)
    self.all[name] = made
    self.events[name] = []
    return made

  def address(self, name):
    made = self.all[name]
    return made.address if self.kind == "unix" else tcp_only(made)

  def connect(self, one, other):
    self.all[one].connect(other, self.address(other))

  def proxy(self, transport):
    """A network before the port of a transport, which this world drives."""
    target = f"127.0.0.1:{transport.port}"
    self._proxies.append(proxies.Proxy(target, self.clock))
    return self._proxies[-1]

  def pair(self):
    """Two connected transports, a and b."""
    return self.connected("a", "b")

  def connected(self, *names):
    """Transports of these names, each connected to all others."""
    made = [self.add(name) for name in names]
    for index, name in enumerate(names):
      for other in names[:index]:
        self.connect(name, other)
    for name in names:
      self.wait_for(name, interface.PeerUp, len(names) - 1)
    self.clear()
    return made

  def clear(self):
    for events in self.events.values():
      events.clear()

  def run(self, seconds):
    """Advances time, and delivers what is in flight, however short it is."""
    until, turns = self.clock() + seconds, 0
    while self.clock() < until or turns < 20:
      self._turn()
      turns += 1

  def run_until(self, condition, timeout=90.0):
    """Lets time pass until something is so; returns what it is."""
    until = time.monotonic() + timeout
    while not (result := condition()):
      if time.monotonic() > until:
        raise TimeoutError(f"It did not happen; events: {self.events}")
      self._turn()
    return result

  def _turn(self):
    anything = []
    for proxy in self._proxies:
      proxy.carry()
    for name, transport in self.all.items():
      anything = transport.poll(0)
      self.events[name] += anything
    if isinstance(self.clock, VirtualClock):
      self.clock.advance()
    if not anything:
      time.sleep(0.0003)

  def of(self, name, kind):
    """Events of a kind that this one had."""
    return [e for e in self.events[name] if isinstance(e, kind)]

  def wait_for(self, name, kind, count=1):
    self.run_until(lambda: len(self.of(name, kind)) >= count)
    return self.of(name, kind)

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.close()

  def close(self):
    for transport in self._made:
      transport.close()
    for proxy in self._proxies:
      proxy.close()


def lost(world, name):
  """How this one lost its peers."""
  return [e.how for e in world.of(name, interface.PeerLost)]


def received(transport, peer, transfer):
  """How many bytes have come of an array that is expected; 0 if none is."""
  result = transport._sessions[peer].receiving._arrays.get(transfer)
  return result.received if result else 0


def give_up(world, transport, peer, reason):
  """Ends the attempts to reach a peer once one has failed for a reason.

  As the end of their time would, which some attempts need more of than others.
  """
  dial = transport._connections.dialer.dials[peer]
  world.run_until(lambda: reason in dial.reason)
  dial.until = 0.0
