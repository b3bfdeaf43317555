"""The parts of a world as values: what an event makes of one process.

A world of `world` is one object that changes. Here each process is a value by
itself, and so are the store, each connection's messages and the checker; a state
of the whole is a row of their numbers. What an event makes of a process depends
on nothing else, so it is computed once, however many states the process is in
that state in.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import types
from typing import Any

from optax_dist import quorum
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol import notes
from optax_dist.coordinator.protocol.log import LEADER_KEY
from optax_dist.coordinator.protocol.node import Node
from tests.simulation import world as worlds

# Names a connection: who began it, to whom, and which of those that anyone still
# knows of.
ConnectionId = tuple[str, str, int]
# Why a connection was lost, in words, makes no other state.
_WHY = "it is lost"
# More requests to the store than that, and it is asked without end.
_MOST_REQUESTS = 400


class Numbers:
  """Numbers values: equal ones have the same number."""

  def __init__(self) -> None:
    self.values: list[Any] = []
    self._index: dict[Any, int] = {}

  def __call__(self, value: Any) -> int:
    key = value
    try:
      index = self._index.get(key)
    except TypeError:  # A `View` in it has dicts.
      index = self._index.get(key := repr(value))
    if index is None:
      index = self._index[key] = len(self.values)
      self.values.append(value)
    return index


# Values that can't change, shared by all states that have them.
_VALUES = Numbers()
_FROZEN: dict[type, bool] = {}


def _get_value(index: int) -> Any:
  return _VALUES.values[index]


def _is_value(value: Any) -> bool:
  kind = type(value)
  frozen = _FROZEN.get(kind)
  if frozen is None:
    params = getattr(kind, "__dataclass_params__", None)
    frozen = _FROZEN[kind] = params is not None and params.frozen
  return frozen


class Copier(pickle.Pickler):
  """Copies a process; values are shared, and its surroundings left out."""

  def __init__(self, buffer: io.BytesIO, local: Any):
    super().__init__(buffer, 5)
    self._local = local

  def persistent_id(self, value: Any) -> str | None:
    if value is self._local:
      return "surroundings"
    return None

  def reducer_override(self, value: Any) -> Any:
    if _is_value(value):
      return _get_value, (_VALUES(value),)
    return NotImplemented


class Thawer(pickle.Unpickler):
  def __init__(self, frozen: bytes, local: Any):
    super().__init__(io.BytesIO(frozen))
    self._local = local

  def persistent_load(self, name: str) -> Any:
    return self._local


class _Key(pickle.Pickler):
  """Bytes that are equal for equal processes, whatever is shared in them."""

  def reducer_override(self, value: Any) -> Any:
    if _is_value(value):
      return _get_value, (_VALUES(value),)
    if isinstance(value, types.MethodType):
      return str, (value.__name__,)
    if isinstance(value, worlds.Process | worlds.World):
      return str, ("",)
    if isinstance(value, worlds.Aggregation):
      # In whatever order gradients and means have come.
      found = {name: getattr(value, name) for name in value.__slots__}
      found["gradients"] = sorted(value.gradients.items())
      found["means"] = sorted(value.means.items())
      return str, (found,)
    if isinstance(value, quorum.State):
      # In whatever order replicas have joined and gradients have arrived.
      fields = vars(value).values()
      fields = [sorted(f.items()) if type(f) is dict else f for f in fields]
      return str, (repr(fields),)
    return NotImplemented


def key_of(value: Any) -> bytes:
  """Bytes that are equal for equal values."""
  buffer = io.BytesIO()
  pickler = _Key(buffer, 5)
  pickler.fast = True
  pickler.dump(value)
  return buffer.getvalue()


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
  """What others may know of a process, and what its invariants are about."""

  name: str
  index: int
  alive: bool
  over: str
  step: int
  version: int
  pending: ins.Submitted | None
  error: tuple[str, str] | None
  needs_since: float
  leaves_since: float
  fetching: tuple[int, str, float] | None
  means: tuple[tuple[Any, int], ...]
  term: int
  # Its connections, and those that it has had.
  peers: tuple[tuple[str, ConnectionId], ...]
  closed: frozenset[ConnectionId]
  stopped: bool
  computes: bool
  # The times of the world at which it, or what it waits for, has a deadline.
  deadline: float
  slow_at: float

  # As a `Process` has them, for the checker.

  @property
  def paused_until(self) -> float:
    return math.inf if self.stopped else 0.0

  @property
  def stopped_at(self) -> float:
    return math.inf

  @property
  def stranger(self) -> bool:
    return False

  @property
  def is_faulty(self) -> bool:
    return False

  @property
  def busy_until(self) -> float:
    return 0.0

  @property
  def inbox(self) -> tuple[ins.Input, ...]:
    return ()

  @property
  def node(self) -> Any:
    view = types.SimpleNamespace(term=self.term)
    return types.SimpleNamespace(follower=types.SimpleNamespace(view=view))

  @property
  def aggregations(self) -> Any:
    return {
      attempt: types.SimpleNamespace(means=range(count))
      for attempt, count in self.means
    }

  @property
  def connections(self) -> Any:
    return {
      peer: types.SimpleNamespace(open={"": connection not in self.closed})
      for peer, connection in self.peers
    }

  @property
  def running(self) -> bool:
    """Whether it lives, has something to do, and isn't stopped."""
    return self.alive and not self.over and not self.stopped


class _Always:
  """Draws the same number always: nothing here is left to chance."""

  def random(self) -> float:
    return 0.5


class _Notes:
  """Notes what the checker is to be told."""

  def __init__(self, local: Local):
    self._local = local

  def __getattr__(self, name: str) -> Any:
    def note(*args: Any) -> None:
      if name == "noted" and not isinstance(args[1], notes.Commit):
        return  # Of the journal, only commits are checked here.
      told = tuple(
        self._local.facts(a) if isinstance(a, worlds.Process) else a
        for a in args
      )
      self._local.out.append(("check", name, told))

    return note


class Local(worlds.World):
  """The surroundings of one process, which takes one event at a time.

  What leaves the process is in `out`, in order: ("net", peer, item), ("store",
  request), ("beat", value) and ("check", name, arguments).

  Attributes:
    out: what an event has led to outside.
    looked: what the process has looked at outside: "peers", "beat".
    peers: which connection each other process has to this one; and a number for
      a new one to it.
    beat: the leader's sign of life in the store.
  """

  def __init__(self, setting: worlds.Setting, index: int, names: list[str]):
    self.setting, self.seed, self.now = setting, 0, 0.0
    self.random = _Always()  # type: ignore[assignment]
    self.trace = self.transcript = None
    self.store_lost, self.begun, self.failed = False, {}, set()
    self.cuts = {}
    # So many were there before: a process is named and numbered by that.
    self.all = list(range(index))  # type: ignore[arg-type]
    self.by_name = {
      name: types.SimpleNamespace(name=name)  # type: ignore[misc]
      for name in names
    }
    self.checker = _Notes(self)
    self.out: list[tuple[Any, ...]] = []
    self.peers: dict[str, tuple[ConnectionId | None, int]] = {}
    self.beat: Any = None
    self.looked: set[str] = set()
    self._todo: list[tuple[Any, tuple[Any, ...]]] = []
    self._index, self._name = index, names[index]

  def create(self) -> worlds.Process:
    """The process, before its first event."""
    start = worlds.digest(self.seed, 0)
    process: Any = worlds.Process(self, self._name, self._index, start)
    process.offset = 0.0  # So that no time is rounded.
    # So long a log is not trimmed in a small run.
    process.config = dataclasses.replace(process.config, block=64)
    process.node = Node(process.config)
    process.stopped, process.computes = False, None
    process.slow, process.closed = [], frozenset()
    return process

  # As values.

  def freeze(self, process: worlds.Process) -> bytes:
    buffer = io.BytesIO()
    Copier(buffer, self).dump(process)
    return buffer.getvalue()

  def thaw(self, frozen: bytes) -> worlds.Process:
    return Thawer(frozen, self).load()

  def key(self, process: worlds.Process) -> bytes:
    """Bytes that are equal for equal states of the process."""
    state = dict(vars(process))
    del state["world"], state["config"]
    state["closed"] = sorted(process.closed)  # type: ignore[attr-defined]
    state["connections"] = sorted(process.connections.items())
    early = process.early.items()
    state["early"] = sorted((repr(k), sorted(map(repr, v))) for k, v in early)
    return key_of(state)

  def facts(self, process: Any) -> Facts:
    deadline = process.node.deadline() if process.alive else math.inf
    if deadline < math.inf:
      time = deadline - process.offset
      while process.offset + time < deadline:
        time = math.nextafter(time, math.inf)
      deadline = time
    means = ((a, len(g.means)) for a, g in process.aggregations.items())
    return Facts(
      process.name,
      process.index,
      process.alive,
      process.over,
      process.step,
      process.version,
      process.pending,
      process.error,
      process.needs_since,
      process.leaves_since,
      process.fetching,
      tuple(sorted(means, key=str)),
      process.node.follower.view.term,
      tuple(sorted(process.connections.items())),
      process.closed,
      process.stopped,
      process.computes is not None,
      deadline,
      min([time for time, _, _ in process.slow], default=math.inf),
    )

  # Events.

  def take(self, process: Any, event: tuple[Any, ...]) -> None:
    """Lets an event happen, and all that concerns only the process itself."""
    match event:
      case ("started",):
        self.input(process, ins.Started(f"nonce of {process.name}"))
      case ("net", peer, ("accept", connection)):
        self._accept(process, peer, connection)
      case ("net", peer, ("lose", connection, how)):
        self._lose(process, peer, connection, how)
      case ("net", peer, ("deliver", connection, item)):
        self._delivered(process, peer, connection, item)
      case ("answer", answer):
        self.input(process, answer)
      case ("compute",):
        args, process.computes = process.computes, None
        self.computed(process, *args)
      case ("due",):
        self.input(process, ins.TimePassed())
      case ("slow",):
        slow = min(process.slow, key=lambda s: s[0])
        process.slow.remove(slow)
        getattr(self, slow[1])(process, *slow[2])
      case ("stop",):
        process.stopped = True
        for peer, connection in sorted(process.connections.items()):
          silent = ("lose", connection, "silent")
          self.out.append(("net", peer, silent))
      case ("go on",):
        process.stopped = False
      case _:
        raise AssertionError(event)
    # Nobody can tell when a process does what concerns only itself.
    while self._todo:
      action, args = self._todo.pop(0)
      action(*args)
    if process.node._requests > _MOST_REQUESTS:
      self.out.append(("check", "fail", ("A6", "the store is asked endlessly")))
    # What is over, and texts for people, make no other state.
    process.slow = [s for s in process.slow if _matters(process, *s[1:])]
    process.node.follower._heard = None

  def reset(self) -> None:
    """After an error: what was to follow does not."""
    self._todo.clear()

  def at(self, time: float, action: Any, *args: Any) -> None:
    match action.__name__:
      case "computed":
        args[0].computes = args[1:]
      case "check_moves" | "fetch_times_out":
        args[0].slow.append((time, action.__name__, args[1:]))
      case "input" | "next_gradient" | "go_on_later" | "quit" | "snapshot":
        self._todo.append((action, args))
      case _:
        raise AssertionError(action.__name__)

  def delay(self, mean: float) -> float:
    return 0.0

  def set_timer(self, process: worlds.Process) -> None:
    if process.alive and process.node.deadline() == math.inf:
      waits = process.suspended or process.pending is not None
      waits = waits or process.waits_for_newer()
      if waits and not process.node.follower.over:
        what = f"{process.name} waits without a deadline"
        self.out.append(("check", "fail", ("A6", what)))

  # Connections: each end is a part of its process.

  def connect(self, process: Any, peer: str) -> None:
    if peer in process.connections or peer == process.name:
      return
    self.looked.add("peers")
    theirs, free = self.peers[peer]
    if theirs is not None and theirs not in process.closed:
      # The other one is just connecting to this one.
      process.connections[peer] = theirs
      return
    connection = (process.name, peer, free)
    process.connections[peer] = connection
    self.out.append(("net", peer, ("accept", connection)))

  def send(self, process: Any, peer: str, item: Any) -> None:
    if isinstance(item, msg.NeedsSnapshot):
      process.needs_since = self.now
    connection = process.connections.get(peer)
    if connection is not None:
      self.out.append(("net", peer, ("deliver", connection, item)))

  def _accept(self, process: Any, peer: str, connection: ConnectionId) -> None:
    if connection in process.closed:
      return
    known = process.connections.get(peer)
    if known is not None and known != connection:
      self._lose(process, peer, known, "replaced")
    process.connections[peer] = connection

  def _delivered(
    self, process: Any, peer: str, connection: ConnectionId, item: Any
  ) -> None:
    if connection in process.closed:
      return
    if process.connections.get(peer) != connection:
      self._accept(process, peer, connection)
    if isinstance(item, tuple):
      self.array(process, self.by_name[peer], *item)
    else:
      self.input(process, ins.Received(peer, item))

  def _lose(
    self, process: Any, peer: str, connection: ConnectionId, how: str
  ) -> None:
    if connection in process.closed or not process.alive:
      return
    process.closed |= {connection}
    if process.connections.get(peer) == connection:
      del process.connections[peer]
    if how in worlds._CLOSES:
      self.out.append(("net", peer, ("lose", connection, "broken")))
    for aggregation in list(process.aggregations.values()):
      self.peer_lost(process, aggregation, peer)
    if process.fetching is not None and process.fetching[1] == peer:
      transfer = process.fetching[0]
      process.fetching = None
      self.input(process, ins.SnapshotFailed(transfer, _WHY))
    self.forget(process, peer)
    process.losing.append(peer)
    self.input(process, ins.PeerLost(peer, how, _WHY))

  def disconnect(self, process: Any, peer: str, reason: str) -> None:
    connection = process.connections.pop(peer, None)
    if connection is None:
      return
    process.closed |= {connection}
    self.out.append(("net", peer, ("lose", connection, "left")))
    self.forget(process, peer)
    for aggregation in list(process.aggregations.values()):
      self.peer_lost(process, aggregation, peer)

  def close(self, process: worlds.Process, how: str, reason: str) -> None:
    process.alive = False
    for peer, connection in sorted(process.connections.items()):
      self.out.append(("net", peer, ("lose", connection, how)))
    process.connections.clear()
    self.checker.died(process)

  # The store.

  def request(self, process: worlds.Process, effect: fx.Put | fx.Get) -> None:
    if effect.key != LEADER_KEY:
      self.out.append(("store", effect))
      return
    # A hint, which decides nothing: it is read and written at once.
    answer: ins.Input
    if isinstance(effect, fx.Put):
      self.beat = effect.value
      self.out.append(("beat", effect.value))
      answer = ins.PutAnswered(effect.request, "done")
    else:
      self.looked.add("beat")
      answer = ins.GetAnswered(effect.request, True, self.beat)
    self.at(self.now, self.input, process, answer)

  def on_delete(self, process: worlds.Process, effect: fx.Delete) -> None:
    raise AssertionError("the log of a small run is trimmed")


def _matters(process: Any, name: str, args: tuple[Any, ...]) -> bool:
  """Whether a deadline of a transfer is still one."""
  if name == "check_moves":
    return not args[0].ended
  return process.fetching is not None and process.fetching[0] == args[0]


def store_acts(
  store: dict[str, Any], request: fx.Put | fx.Get
) -> tuple[bool, ins.Input]:
  """What the store makes of a request: whether it has put it, and the answer."""
  if isinstance(request, fx.Get):
    value = store.get(request.key)
    return False, ins.GetAnswered(request.request, True, value)
  if request.overwrite or request.key not in store:
    store[request.key] = request.value
    return True, ins.PutAnswered(request.request, "done")
  return False, ins.PutAnswered(request.request, "conflict")


def lost(answer: ins.Input) -> ins.Input:
  """What a process is told where this answer of the store is lost."""
  if isinstance(answer, ins.PutAnswered):
    return ins.PutAnswered(answer.request, "unknown")
  assert isinstance(answer, ins.GetAnswered)
  return ins.GetAnswered(answer.request, False, None)
