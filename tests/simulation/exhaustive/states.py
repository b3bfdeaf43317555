"""The states of a small run, and what may happen in each.

A state is a row of numbers: of each process, of what is on the way on each
connection, of what each process asks of the store and has yet to be answered, of
the store, of the checker, of the time, and of what may still go wrong. So states
are cheap to compare, and what leads from one to the next is looked up wherever
its parts have met before.
"""

from __future__ import annotations

import dataclasses
import io
import math
import struct
import types
from typing import Any

from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol.entries import Committed, Ended
from tests.simulation import world as worlds
from tests.simulation.exhaustive import parts
from tests.simulation.invariants import Checker, Violation

# A choice: what happens, and to which process; then of which peer it is, and
# after how much of what it sends a process is killed.
Choice = tuple[Any, ...]
State = tuple[int, ...]

NET, STORE, BEAT, CHECK = range(4)
_SENT = (NET, STORE)
EMPTY = 0
# By then all who can must be done.
_LATEST = worlds.TIMEOUT + 100.0


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
  """What an event makes of a process, and what leaves it, in order."""

  process: int
  outputs: tuple[tuple[int, ...], ...]
  looked: frozenset[str]
  error: str = ""


class _Seen:
  """What the checker sees of a state."""

  def __init__(self, setting: worlds.Setting):
    self.setting, self.quiet_at = setting, 0.0
    self.looked = False
    self.facts: list[parts.Facts] = []
    self.time = 0.0
    # The store is never lost or silent here, and nobody reads a transcript.
    self.store_lost, self.store_lost_at = False, math.inf
    self.store_silent_since = math.inf
    self.transcript = None

  def sum(self, gradients: tuple[Any, ...], weights: tuple[float, ...]) -> int:
    """The sum of a step; no run is deterministic here."""
    return worlds.digest(gradients, weights)

  @property
  def all(self) -> list[parts.Facts]:
    self.looked = True
    return self.facts

  @property
  def by_name(self) -> dict[str, parts.Facts]:
    self.looked = True
    return {facts.name: facts for facts in self.facts}

  @property
  def now(self) -> float:
    self.looked = True
    return self.time

  def blocked_until(self, a: Any, b: Any) -> float:
    return 0.0

  def was_calm(self, since: float) -> bool:
    """No state here remembers for how long it was."""
    return False

  def strike_at_the_end(self) -> None:
    """Nothing strikes here but what a space has."""

  def tell(self, text: str) -> None:
    """Nobody reads a transcript of all orders of events."""


class _Checker(Checker):
  """Asks what excuses a failure when there is one, not at each death.

  So what commutes for the processes does for the checker.
  """

  def died(self, process: Any) -> None:
    pass

  def excuse(self) -> str:
    holders = self.holders
    living = {p.name for p in self.world.all if p.alive}
    self.holders = {s: names & living for s, names in holders.items()}
    found = super().excuse()
    self.holders = holders
    return found

  # What rests on who was heard from lately, which no state here remembers: the
  # schedules of faults check it.

  def deposed(self, leader: Any, process: Any) -> None:
    pass

  def may_have_failed(self, step: int, number: int) -> bool:
    return True

  def removed(self, leader: Any, process: Any, left: bool, reason: str) -> None:
    pass

  def copied(self, leader: Any, commit: Committed) -> None:
    pass

  def saves(self, leader: Any, commit: Committed) -> None:
    pass

  def how_it_ended(self, end: Ended) -> None:
    pass  # Whose wish it was is not among the facts.

  # Of the means, only those in the log: facts have no gradients.

  def submitted(self, process: Any, submitted: ins.Submitted) -> None:
    sent = (
      struct.unpack("<q", submitted.payload) if submitted.payload else (-1,)
    )
    process = types.SimpleNamespace(
      name=process.name, gradients={submitted.sequence: sent[0]}
    )
    super().submitted(process, submitted)

  def applied(self, process: Any) -> None:
    pass

  # What is inside the core, or in the journal beside commits: the schedules of
  # faults check it.

  def look_inside(self, process: Any, note: Any) -> None:
    pass

  def sums_as_asked(self, process: Any) -> None:
    pass

  def one_goes(self, leader: Any) -> None:
    pass

  def has_all(self, process: Any, attempt: Any) -> None:
    pass

  def could_have(self, process: Any) -> int:
    return -1


class States:
  """The states of a space: their parts by number, and what leads where.

  Attributes:
    n: how many processes there are.
    facts: what is known of each process, by its number.
    items: what is on the way, and requests, by number.
    queues: rows of those.
    stores: what stands in the store.
    calls: what the checker is told.
  """

  def __init__(self, setting: worlds.Setting):
    n = self.n = setting.replicas
    self.names = [f"{'abcdefgh'[index]}0" for index in range(n)]
    self.place = {name: index for index, name in enumerate(self.names)}
    self.locals = [
      parts.Local(setting, index, self.names) for index in range(n)
    ]
    # Where in a state what is.
    self.net = n
    self.requests = n + n * n
    self.answers = self.requests + n
    self.store, self.beat, self.checker, self.now = range(
      self.answers + n, self.answers + n + 4
    )
    # Who may be killed, be stopped and miss an answer, as bits.
    self.kills, self.stops, self.losses = range(self.now + 1, self.now + 4)
    self.size = self.losses + 1

    self.items = parts.Numbers()
    self.queues = parts.Numbers()
    self.queues(())
    self.stores = parts.Numbers()
    self.beats = parts.Numbers()
    self.beats(None)
    self.times = parts.Numbers()
    self.times(0.0)
    self.calls = parts.Numbers()
    # Processes and checkers by number.
    self.frozen: list[bytes] = []
    self.facts: list[parts.Facts] = []
    self._process_numbers: dict[Any, int] = {}
    self._checkers: list[bytes] = []
    self._checker_numbers: dict[Any, int] = {}
    self._results: dict[Any, Result | None] = {}
    self._forgot: dict[Any, int] = {}
    self._checked: dict[Any, tuple[int, str] | None] = {}
    self._stored: dict[tuple[int, int], tuple[int, int, int]] = {}
    self._seen = _Seen(setting)
    self._finish = self.calls(("finish", ()))

  def first(self) -> State:
    """Before any process has started."""
    row = [0] * self.size
    row[self.store] = self.stores(())
    row[self.checker] = self._checker_number(_Checker(self._seen))
    row = [*row]
    for p, local in enumerate(self.locals):
      row[p] = self._process_number(p, local.create())
    for p in range(self.n):
      row = list(self._give(tuple(row), p, ("started",)))
    return tuple(row)

  # Numbers.

  def _process_number(self, p: int, process: Any) -> int:
    local = self.locals[p]
    key: Any = (p, process.over)
    if process.alive:
      key = (p, local.key(process))
    number = self._process_numbers.get(key)
    if number is None:
      number = self._process_numbers[key] = len(self.frozen)
      self.frozen.append(local.freeze(process) if process.alive else b"")
      self.facts.append(local.facts(process))
    return number

  def _checker_number(self, checker: Checker) -> int:
    state = {k: v for k, v in vars(checker).items() if k != "world"}
    key = parts.key_of(_sorted(state))
    number = self._checker_numbers.get(key)
    if number is None:
      number = self._checker_numbers[key] = len(self._checkers)
      buffer = io.BytesIO()
      parts.Copier(buffer, self._seen).dump(checker)
      self._checkers.append(buffer.getvalue())
    return number

  # One process takes an event.

  def result(self, state: State, p: int, event: tuple[Any, ...]) -> Result:
    """What an event makes of a process; computed once."""
    key = (state[p], event, state[self.now])
    if key in self._results:
      found = self._results[key]
      if found is not None:
        return found
    else:
      found = self._compute(state, p, event)
      self._results[key] = None if found.looked else found
      if not found.looked:
        return found
    # It looks at others.
    peers = tuple([self._peer(state, p, q) for q in range(self.n)])
    full = (*key, peers, state[self.beat])
    found = self._results.get(full)
    if found is None:
      found = self._compute(state, p, event)
      self._results[full] = found
    return found

  def _peer(self, state: State, p: int, q: int) -> tuple[Any, int]:
    """Another process's connection to this one, and a number for a new one."""
    name, peer = self.names[p], self.names[q]
    theirs = dict(self.facts[state[q]].peers).get(name)
    known = self._known(state, p, q)
    free = 1
    while (name, peer, free) in known:
      free += 1
    return theirs, free

  def _known(self, state: State, p: int, q: int) -> set[Any]:
    """The connections of two processes that one of them still knows of."""
    found = set()
    for a in (p, q):
      facts = self.facts[state[a]]
      found |= facts.closed
      found |= {connection for _, connection in facts.peers}
    return found | self._on_the_way(state, p, q) | self._on_the_way(state, q, p)

  def _on_the_way(self, state: State, p: int, q: int) -> set[Any]:
    queue = self.queues.values[state[self.net + p * self.n + q]]
    return {self.items.values[item][1] for item in queue}

  def _forget(self, row: list[int], p: int) -> None:
    """Forgets connections that it has closed, and that nobody else knows of."""
    facts = self.facts[row[p]]
    if not facts.closed:
      return
    known: set[Any] = set()
    for q in range(self.n):
      if q != p:
        known |= self._on_the_way(tuple(row), q, p)
        known |= {c for _, c in self.facts[row[q]].peers}
    kept = facts.closed & known
    if kept == facts.closed:
      return
    key = (row[p], kept)
    number = self._forgot.get(key)
    if number is None:
      process: Any = self.locals[p].thaw(self.frozen[row[p]])
      process.closed = kept
      number = self._forgot[key] = self._process_number(p, process)
    row[p] = number

  def _compute(self, state: State, p: int, event: tuple[Any, ...]) -> Result:
    local = self.locals[p]
    local.now = self.times.values[state[self.now]]
    local.out, local.looked = [], set()
    local.beat = self.beats.values[state[self.beat]]
    for q, peer in enumerate(self.names):
      local.peers[peer] = self._peer(state, p, q)
    process = local.thaw(self.frozen[state[p]])
    match event:
      case ("net", q, item):
        event = ("net", self.names[q], self.items.values[item])
      case ("answer", item):
        event = ("answer", self.items.values[item])
      case ("lose answer", item):
        event = ("answer", parts.lost(self.items.values[item]))
    try:
      local.take(process, event)
    except Violation as error:
      return Result(0, (), frozenset(local.looked), str(error))
    except Exception as error:
      local.reset()
      looked = frozenset(local.looked)
      return Result(0, (), looked, f"core: {error!r}")
    outputs = tuple([self._output(out) for out in local.out])
    number = self._process_number(p, process)
    return Result(number, outputs, frozenset(local.looked))

  def _output(self, out: tuple[Any, ...]) -> tuple[int, ...]:
    match out:
      case ("net", peer, item):
        return NET, self.place[peer], self.items(item)
      case ("store", request):
        return STORE, self.items(request)
      case ("beat", value):
        return BEAT, self.beats(value)
      case ("check", name, args):
        return CHECK, self.calls((name, args))
    raise AssertionError(out)

  def _give(self, state: State, p: int, event: tuple[Any, ...]) -> State:
    result = self.result(state, p, event)
    if result.error:
      raise Violation(result.error)
    return self._then(state, p, result.process, result.outputs)

  def _then(self, state: State, p: int, process: int, outputs: Any) -> State:
    """A process has changed, and this leaves it."""
    n, row = self.n, list(state)
    before, after = self.facts[row[p]], self.facts[process]
    row[p] = process
    for out in outputs:
      kind = out[0]
      if kind == CHECK:
        self._check(row, out[1])
      elif kind == NET:
        self._send(row, p, out[1], out[2])
      elif kind == STORE:
        self._push(row, self.requests + p, out[1])
      else:
        row[self.beat] = out[1]
    if not after.alive:
      self._nobody_hears(row, p)
    elif after.closed != before.closed:
      # What comes on a connection that it has closed, nobody hears.
      for q in range(n):
        at = self.net + q * n + p
        if row[at] != EMPTY:
          queue = self.queues.values[row[at]]
          kept = [
            i for i in queue if self.items.values[i][1] not in after.closed
          ]
          row[at] = self.queues(tuple(kept))
    for q in range(n):
      if self.facts[row[q]].alive:
        self._forget(row, q)
    return tuple(row)

  def _push(self, row: list[int], at: int, item: int) -> None:
    row[at] = self.queues((*self.queues.values[row[at]], item))

  def _send(self, row: list[int], p: int, to: int, item: int) -> None:
    facts = self.facts[row[to]]
    kind, connection, *_ = self.items.values[item]
    if not facts.alive:
      if kind == "accept":
        self._unreachable(row, p, to, connection)
    elif connection not in facts.closed:
      self._push(row, self.net + p * self.n + to, item)

  def _unreachable(
    self, row: list[int], p: int, to: int, connection: Any
  ) -> None:
    """Who connects to a dead process will know."""
    facts = self.facts[row[p]]
    if facts.alive and connection not in facts.closed:
      item = self.items(("lose", connection, "unreachable"))
      self._push(row, self.net + to * self.n + p, item)

  def _nobody_hears(self, row: list[int], p: int) -> None:
    row[self.answers + p] = EMPTY
    for q in range(self.n):
      at = self.net + q * self.n + p
      queue, row[at] = self.queues.values[row[at]], EMPTY
      for item in queue:
        kind, connection, *_ = self.items.values[item]
        if kind == "accept":
          self._unreachable(row, q, p, connection)
    for flag in (self.kills, self.stops, self.losses):
      row[flag] &= ~(1 << p)

  # The checker.

  def _check(self, row: list[int], call: int) -> None:
    key: Any = (row[self.checker], call)
    found = self._checked.get(key)
    if found is None:
      if key in self._checked:
        key = (*key, *row[: self.n], row[self.now])
        found = self._checked.get(key)
      if found is None:
        found, looked = self._call(row, call)
        if looked and len(key) == 2:
          self._checked[key] = None
          key = (*key, *row[: self.n], row[self.now])
        self._checked[key] = found
    row[self.checker], error = found
    if error:
      raise Violation(error)

  def _call(self, row: list[int], call: int) -> tuple[tuple[int, str], bool]:
    name, args = self.calls.values[call]
    seen = self._seen
    seen.facts = [self.facts[i] for i in row[: self.n]]
    seen.time = self.times.values[row[self.now]]
    told = []
    for arg in args:
      if isinstance(arg, parts.Facts):
        seen.facts[arg.index] = arg
      elif name == "put" and not told:
        arg = seen.facts[self.place[arg]]
      told.append(arg)
    checker = parts.Thawer(self._checkers[row[self.checker]], seen).load()
    seen.looked = False
    try:
      getattr(checker, name)(*told)
    except AssertionError as error:
      return (row[self.checker], str(error) or repr(error)), seen.looked
    return (self._checker_number(checker), ""), seen.looked

  # What may happen.

  def choices(self, state: State) -> list[Choice]:
    """What may happen next."""
    n, now = self.n, self.times.values[state[self.now]]
    found: list[Choice] = []
    wakes = math.inf
    if now > _LATEST:
      return []
    for p in range(n):
      facts = self.facts[state[p]]
      if state[self.requests + p] != EMPTY:
        found.append(("store", p))
      if not facts.running:
        continue
      found += self._inputs(state, p, facts, now)
      wakes = min(wakes, facts.deadline, facts.slow_at)
    if not found and wakes < math.inf:
      found.append(("time", 0))
    for p in range(n):
      found += self._faults(state, p)
    return found

  def _inputs(
    self, state: State, p: int, facts: parts.Facts, now: float
  ) -> list[Choice]:
    n, found = self.n, []
    for q in range(n):
      if state[self.net + q * n + p] != EMPTY:
        found.append(("net", p, q))
    if state[self.answers + p] != EMPTY:
      found.append(("answer", p))
    if facts.computes:
      found.append(("compute", p))
    if facts.deadline <= now:
      found.append(("due", p))
    if facts.slow_at <= now:
      found.append(("slow", p))
    return found

  def _faults(self, state: State, p: int) -> list[Choice]:
    facts, bit, found = self.facts[state[p]], 1 << p, []
    if not facts.alive:
      return []
    if facts.stopped:
      found.append(("go on", p))
    elif state[self.losses] & bit and state[self.answers + p] != EMPTY:
      found.append(("lose answer", p))
    if state[self.stops] & bit and not facts.stopped:
      found.append(("stop", p))
    if state[self.kills] & bit:
      found.append(("kill", p))
      if facts.running:
        now = self.times.values[state[self.now]]
        for choice in self._inputs(state, p, facts, now):
          event, _ = self.event(state, choice)
          outputs = self.result(state, p, event).outputs
          sent = sum(out[0] in _SENT for out in outputs)
          for count in range(1, sent):
            found.append(("kill amid", p, choice, count))
    return found

  def outcome(self, state: State) -> Any:
    """The description of an end."""
    frozen = self._checkers[state[self.checker]]
    checker = parts.Thawer(frozen, self._seen).load()
    ended = tuple([self.facts[p].over for p in state[: self.n]])
    told = {key: one.outcome for key, one in checker.submissions.items()}
    return ended, self.stores.values[state[self.store]], tuple(_sorted(told))

  def event(self, state: State, choice: Choice) -> tuple[Any, int]:
    """The event of a process's own, and the place of its queue."""
    match choice:
      case ("net", p, q):
        at = self.net + q * self.n + p
        return ("net", q, self.queues.values[state[at]][0]), at
      case (("answer" | "lose answer") as kind, p):
        at = self.answers + p
        return (kind, self.queues.values[state[at]][0]), at
      case _:
        return choice[:1], -1

  def take(self, state: State, choice: Choice) -> State:
    """Lets it happen."""
    kind, p, *rest = choice
    if kind == "store":
      return self._store_acts(state, p)
    if kind == "time":
      return self._let_time_pass(state)
    if kind == "kill":
      return self._kill(state, p, ())
    if kind == "kill amid":
      inner, count = rest
      event, at = self.event(state, inner)
      return self._kill(
        self._pop(state, at), p, self.result(state, p, event).outputs, count
      )
    event, at = self.event(state, choice)
    state = self._pop(state, at)
    if kind == "lose answer":
      state = _with(state, self.losses, 0)
    elif kind == "stop":
      state = _with(state, self.stops, 0)
    return self._give(state, p, event)

  def _pop(self, state: State, at: int) -> State:
    if at < 0:
      return state
    return _with(state, at, self.queues(self.queues.values[state[at]][1:]))

  def _kill(self, state: State, p: int, outputs: Any, count: int = 0) -> State:
    """A process is killed when so many of its messages are out."""
    facts = self.facts[state[p]]
    said = []
    for out in outputs:
      count -= out[0] in _SENT
      if count < 0:
        break
      said.append(out)
    begun = [connection for _, connection in facts.peers]
    to = {c: self.place[peer] for peer, c in facts.peers}
    for out in said:
      if out[0] == NET:
        item = self.items.values[out[2]]
        if item[0] == "accept":
          begun.append(item[1])
          to[item[1]] = out[1]
        elif item[0] == "lose" and item[1] in begun:
          begun.remove(item[1])
    for connection in begun:
      item = self.items(("lose", connection, "broken"))
      said.append((NET, to[connection], item))
    dead = dataclasses.replace(
      facts, alive=False, peers=(), deadline=math.inf, slow_at=math.inf
    )
    said.append((CHECK, self.calls(("died", (dead,)))))
    number = self._process_numbers.get((p, ""))
    if number is None:
      number = self._process_numbers[p, ""] = len(self.frozen)
      self.frozen.append(b"")
      self.facts.append(dead)
    state = _with(state, self.kills, 0)
    return self._then(state, p, number, said)

  def _store_acts(self, state: State, p: int) -> State:
    at = self.requests + p
    queue = self.queues.values[state[at]]
    key = (state[self.store], queue[0])
    found = self._stored.get(key)
    request = self.items.values[queue[0]]
    if found is None:
      store = dict(self.stores.values[state[self.store]])
      put, answer = parts.store_acts(store, request)
      after = self.stores(tuple(sorted(store.items(), key=lambda i: i[0])))
      call = -1
      if put:
        call = self.calls(("put", (self.names[p], request.key, request.value)))
      found = self._stored[key] = (after, self.items(answer), call)
    row = list(self._pop(state, at))
    row[self.store] = found[0]
    if found[2] >= 0:
      self._check(row, found[2])
    if self.facts[row[p]].alive:
      self._push(row, self.answers + p, found[1])
    return tuple(row)

  def _let_time_pass(self, state: State) -> State:
    running = [self.facts[p] for p in state[: self.n]]
    now = min(min(f.deadline, f.slow_at) for f in running if f.running)
    row = list(_with(state, self.now, self.times(now)))
    if now > _LATEST and not any(f.stopped for f in running if f.alive):
      self._check(row, self._finish)
    return tuple(row)


def _with(state: State, at: int, value: int) -> State:
  return (*state[:at], value, *state[at + 1 :])


def _sorted(value: Any) -> Any:
  """The same, with all in order that has none."""
  if isinstance(value, dict):
    return [(k, _sorted(value[k])) for k in sorted(value)]
  if isinstance(value, set | frozenset):
    return sorted(value)
  return value
