"""A coordinator and clients in one room, with a transcript of their messages.

There is no network, and no time passes by itself. Messages arrive at once, but for
those of a process that is held. A script's lines are commands:

    run needed=2 replicas=3 inline_bytes=8     the numbers of the run
    run needed=1 replicas=2 samples=4          samples are leased, one a gradient
    start a b c                                replicas, whose processes start
    bring checkpoint 1                         the state that later ones start with
    submit a | submit a 1 | submit a nan       a gradient (on an earlier step)
    submit a sum=2 | submit a sum=3 more       a sum (that extends the one taken)
    submit a long                              a gradient with a byte too many
    submit a 1 0-1                             one on sample 0, which is leased to a
    stranger c                                 a replica of another job starts
    again a2                                   of the program that all others were of
    absent 1 2 | absent 1 given up             these have ended, and never joined
    absent 1 again                             and they start again
    coming 1 | coming                          these are started, and have not joined
    ended b                                    its process has, says its launcher
    means | means b                            means that are under way are there
    fail b a                                   b gets nothing of a
    snapshots                                  snapshots that are fetched are there
    leave a | finish a | save a | abort a      what a training loop wants
    set a rate 0.1                             a hyperparameter
    fingerprint a 5f | fingerprint a 5f 1      the digest of its state (of a step)
    kill coordinator | restart | lose 1        it ends; starts; forgets records
    kill a | break a | hold a | let a          processes and their connections
    renew a                                    a has lost its connection, and calls
    silent a | wake a                          it is not heard; it is there again
    wait 5 | late 5                            seconds; nobody has looked at the clock
"""

from __future__ import annotations

import collections
from typing import Any

from optax_dist import ledger
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.client.client import Client
from optax_dist.coordinator.protocol.codec import Struct
from optax_dist.coordinator.protocol.config import Config, Me
from optax_dist.coordinator.protocol.coordinator.coordinator import Coordinator
from optax_dist.coordinator.protocol.entries import (
  Job,
  Member,
  Part,
  Record,
  RoundId,
  Rules,
  Start,
  run_id,
)
from optax_dist.coordinator.protocol.history import History

_CHIEF = "coordinator"
# Effects and fields that a reader of a transcript does not need.
_UNTOLD = (fx.WriteJournal, fx.UseRun, fx.Connect, fx.Release, fx.Apply)
_LEFT_OUT = frozenset(
  {
    "job",
    "nonce",
    "address",
    "details",
    "progress",
    "lineage",
    "batches",
    "compute",
    "timings",
    "peers",
    "stacks",
  }
)


def short(value: Any) -> str:
  """A struct, without the fields that say nothing."""
  match value:
    case RoundId():
      early = " early" if value.early else ""
      return f"<{value.epoch}.{value.step}.{value.number}{early}>"
    case Part():
      late = f" -{value.staleness}" if value.staleness else ""
      several = f" x{value.count}" if value.count > 1 else ""
      return f"{value.replica}{several}{late}"
    case Member():
      return f"{value.process} as {value.incarnation}"
    case Start():
      return f"{value.digest} at {value.step}"
    case tuple():
      return "[" + ", ".join(map(short, value)) + "]"
    case bytes():
      return f"{len(value)} bytes"
    case Struct():
      fields = []
      for name in value.__struct_fields__:
        result = getattr(value, name)
        empty = result is None or (
          (isinstance(result, str | bytes | tuple) or name == "changes")
          and not result
        )
        if name not in _LEFT_OUT and not empty and result is not False:
          what = "" if result is True else f"={short(result)}"
          fields.append(name + what)
      return type(value).__name__ + (f"({', '.join(fields)})" if fields else "")
    case _:
      return repr(value) if isinstance(value, str) else str(value)


class Room:
  """The processes in the room, and the transcript of the last command."""

  def __init__(self) -> None:
    self.now = 0.0
    self.log: list[Record] = []
    self.starts = 0
    self.told: list[str] = []
    self.rules = Rules()
    self.data: ledger.Batches | None = None
    self.chief: Coordinator | None = None
    self.clients: dict[str, Client] = {}
    self.queue: collections.deque[tuple[str, str, Any]] = collections.deque()
    self.held: dict[str, list[tuple[str, str, Any]]] = {}
    self.connected: set[str] = set()
    self.away: set[str] = set()
    self.rounds: dict[str, dict[RoundId, fx.Aggregate]] = {}
    self.fetches: dict[str, int] = {}
    self.served: dict[int, int] = {}
    self.sequences: collections.Counter[str] = collections.Counter()
    self.incarnations: collections.Counter[str] = collections.Counter()
    self.steps: dict[str, int] = {}
    self.brought = Start(0, "start")

  def execute(self, line: str) -> list[str]:
    """Carries out a command; returns what was written down."""
    self.told = []
    what, *arguments = line.split()
    getattr(self, f"do_{what}")(*arguments)
    self.deliver()
    return self.told or ["nothing"]

  # Commands.

  def do_run(self, *numbers: str) -> None:
    fields: dict[str, Any] = {"timeout": 100.0, "silence_timeout": 5.0}
    samples = 0
    for number in numbers:
      name, _, value = number.partition("=")
      if name == "samples":
        samples = int(value)
        continue
      name = {
        "needed": "replicas_to_aggregate",
        "replicas": "total_num_replicas",
      }.get(name, name)
      fields[name] = (
        {"yes": True, "no": False}.get(value)
        if value
        in (
          "yes",
          "no",
        )
        else int(value)
      )
    self.rules = Rules(**fields)
    if samples:
      self.data = ledger.Batches(samples, self.rules.replicas_to_aggregate)
    self.do_restart()

  def do_restart(self) -> None:
    history = History()
    for record in self.log:
      history.apply(record)
    self.starts += 1
    self.chief = Coordinator(self.config, history, f"nonce {self.starts}")
    self.give(_CHIEF, ins.Started())

  def do_start(self, *names: str) -> None:
    for name in names:
      self.begin(name, "the one")
      self.deliver()

  def do_stranger(self, name: str) -> None:
    self.begin(name, "another one")

  def do_again(self, name: str) -> None:
    assert self.chief is not None
    history = self.chief.history
    run = run_id(history.nonce, history.beginnings)
    count = history.next_incarnation
    self.begin(name, "the one", tuple((run, i) for i in range(count)))

  def do_bring(self, digest: str, step: str) -> None:
    self.brought = Start(int(step), digest)

  def do_absent(self, *told: str) -> None:
    replicas = tuple(int(word) for word in told if word.isdigit())
    given_up = "it has no disk" if "up" in told else ""
    coming = replicas if "again" in told else ()
    self.launch(ended=replicas, given_up=given_up, coming=coming)

  def do_coming(self, *replicas: str) -> None:
    self.launch(coming=tuple(map(int, replicas)))

  def do_ended(self, name: str) -> None:
    self.launch(ended_members=(name,))

  def launch(self, **said: Any) -> None:
    """A report of the launcher of the only host."""
    host = msg.Host("", 0, "", "the launcher", **said)
    self.give(_CHIEF, ins.Received("launcher", host))

  def do_submit(self, name: str, *how: str) -> None:
    count, step, compute, data = 1, self.steps[name], None, ()
    for word in how:
      if word.isdigit():
        step = int(word)
      elif word.startswith("sum="):
        count = int(word[4:])
      elif word.startswith("took="):
        compute = float(word[5:])
      elif word[0].isdigit():
        first, _, last = word.partition("-")
        data = ((int(first), int(last)),)
    finite = "nan" not in how
    size = (self.rules.inline_bytes or 0) + ("long" in how)
    self.sequences[name] += 1
    submitted = msg.SubmitGradient(
      self.sequences[name] - 1,
      self.incarnations[name],
      step,
      count,
      finite,
      b"g" * size if finite else b"",
      compute=compute,
      data=data,
    )
    self.give(name, submitted)

  def do_means(self, *names: str) -> None:
    for name in names or [*self.clients]:
      for round_ in list(self.rounds[name]):
        self.give(name, msg.Done(round_))
        self.rounds[name].pop(round_, None)

  def do_fail(self, name: str, other: str) -> None:
    for round_, aggregate in list(self.rounds[name].items()):
      failed = [m.incarnation for m in aggregate.peers if m.process == other]
      del self.rounds[name][round_]
      self.give(name, msg.Failed(round_, failed[0], "nothing came"))

  def do_snapshots(self) -> None:
    for name, transfer in list(self.fetches.items()):
      if transfer in self.served:
        del self.fetches[name]
        step = self.served[transfer]
        self.give(name, ins.SnapshotFetched(transfer, step))

  def do_leave(self, name: str) -> None:
    self.give(name, msg.Leave(lost=False))

  def do_finish(self, name: str) -> None:
    self.give(name, msg.Finish("enough"))

  def do_save(self, name: str) -> None:
    self.give(name, msg.Save())

  def do_set(self, name: str, what: str, value: str) -> None:
    self.give(name, msg.SetHyperparams(((what, float(value)),)))

  def do_abort(self, name: str) -> None:
    self.give(name, msg.Leave(True, "an exception"))

  def do_fingerprint(self, name: str, digest: str, step: str = "") -> None:
    at = int(step or self.steps[name])
    self.give(name, msg.Fingerprint(at, digest))

  def do_kill(self, name: str) -> None:
    if name == _CHIEF:
      self.chief = None
      self.queue.clear()
      gone, self.connected = self.connected, set()
      for one in sorted(gone):
        self.give(one, ins.PeerLost(_CHIEF, "broken", "it was killed"))
    else:
      del self.clients[name]
      self.connected.discard(name)
      self.give(_CHIEF, ins.PeerLost(name, "broken", "it was killed"))

  def do_lose(self, records: str) -> None:
    del self.log[len(self.log) - int(records) :]

  def do_break(self, name: str) -> None:
    self.connected.discard(name)
    self.give(_CHIEF, ins.PeerLost(name, "broken", "reset"))
    self.give(name, ins.PeerLost(_CHIEF, "broken", "reset"))

  def do_silent(self, name: str) -> None:
    self.away.add(name)
    self.connected.discard(name)
    self.give(_CHIEF, ins.PeerLost(name, "silent", "nothing was heard of it"))

  def do_wake(self, name: str) -> None:
    self.away.discard(name)
    self.give(name, ins.PeerLost(_CHIEF, "broken", "it was closed"))

  def do_renew(self, name: str) -> None:
    self.give(name, ins.PeerLost(_CHIEF, "silent", "not a byte came"))
    self.do_wait("0.5")  # Its call is on the way, on a new connection.
    lost = ins.PeerLost(name, "replaced", "it has connected anew")
    self.give(_CHIEF, lost)

  def do_hold(self, name: str) -> None:
    self.held[name] = []

  def do_let(self, name: str) -> None:
    self.queue.extend(self.held.pop(name))

  def do_late(self, seconds: str) -> None:
    self.now += float(seconds)

  def do_wait(self, seconds: str) -> None:
    end, inputs = self.now + float(seconds), 0
    while True:
      inputs += 1
      assert inputs < 10_000, "busy without end"
      due = {
        n: self.core(n).deadline()
        for n in (_CHIEF, *self.clients)
        if self.core(n) and n not in self.away
      }
      first = min(due, key=lambda n: due[n], default="")
      if not first or due[first] > end:
        break
      self.now = max(self.now, due[first])
      self.give(first, ins.TimePassed())
      self.deliver()
    self.now = end

  # What happens then.

  def begin(
    self, name: str, optimizer: str, follows: tuple[tuple[str, int], ...] = ()
  ) -> None:
    replica, start = "abcdefgh".index(name[0]), self.brought
    me = Me(
      *(name, replica, f"at {name}", start, _CHIEF, "at the coordinator"),
      follows=follows,
    )
    job = Job((("optimizer", optimizer),), self.rules, data=self.data)
    self.clients[name] = Client(self.config(job), me)
    self.rounds[name], self.steps[name] = {}, start.step
    self.give(name, ins.Started())

  def config(self, job: Job) -> Config:
    return Config(job, lambda parts, payloads: b"m" * len(payloads[0]))

  def core(self, name: str) -> Any:
    return self.chief if name == _CHIEF else self.clients.get(name)

  def tell(self, who: str, what: str) -> None:
    self.told.append(f"{who:<12}{what}")

  def give(self, name: str, input_: ins.Input) -> None:
    core = self.core(name)
    if core is not None:
      for effect in core.step(input_, self.now):
        self.effect(name, effect)

  def deliver(self) -> None:
    while self.queue:
      sender, receiver, message = self.queue.popleft()
      waits = [end for end in (sender, receiver) if end in self.held]
      if waits:
        self.held[waits[0]].append((sender, receiver, message))
        continue
      end = sender if receiver == _CHIEF else receiver
      if self.chief is None and isinstance(message, msg.Hello):
        self.give(
          sender, ins.PeerLost(_CHIEF, "unreachable", "nobody is there")
        )
        continue
      if isinstance(message, msg.Hello):
        self.connected.add(sender)
      if end not in self.connected:
        continue
      if isinstance(message, ins.PeerLost):
        self.connected.discard(end)
        self.give(receiver, message)
      else:
        self.give(receiver, ins.Received(sender, message))

  def effect(self, name: str, effect: fx.Effect) -> None:
    match effect:
      case fx.Append(record):
        self.log.append(record)
        for entry in record.entries:
          self.tell("log", short(entry))
      case fx.Send(peers, message):
        self.say(name, peers, message)
      case fx.Disconnect(peer):
        self.tell(name, f"disconnects {peer}: {effect.reason}")
        # It is closed behind what was sent.
        lost = ins.PeerLost(name, "left", effect.reason)
        self.queue.append((name, peer, lost))
      case fx.Connect(peer) if name == _CHIEF:
        self.tell(name, f"calls {peer}")
        if peer not in self.clients:
          gone = ins.PeerLost(peer, "gone", "its address refuses connections")
          self.give(name, gone)
      case fx.Aggregate():
        self.rounds[name][effect.round] = effect
      case fx.Log():
        self.tell(name, f"warning: {effect.text}")
      case _ if isinstance(effect, _UNTOLD):
        if isinstance(effect, fx.Release):
          self.rounds[name].pop(effect.round, None)
      case _:
        self.follow(name, effect)
        self.tell(name, short(effect))

  def follow(self, name: str, effect: fx.Effect) -> None:
    """Does what a driver and a training loop do with an effect."""
    match effect:
      case fx.Admitted():
        self.incarnations[name] = effect.incarnation
      case fx.Publish():
        self.steps[name] = effect.step
      case msg.Serve():
        self.served[effect.transfer] = self.steps[name]
      case msg.Fetch():
        self.fetches[name] = effect.transfer
      case fx.Restore():
        self.steps[name] = effect.step

  def say(self, name: str, peers: tuple[str, ...], message: Any) -> None:
    who = " ".join(peers) if name == _CHIEF else ""
    arrow = f"-> {who}" if who else "->"
    if not isinstance(message, msg.Hello | msg.Applied):
      self.tell(name, f"{arrow} {short(message)}")
    for peer in peers:
      self.queue.append((name, peer, message))


def room_after(*commands: str) -> Room:
  """A room in which these were executed."""
  room = Room()
  for command in commands:
    room.execute(command)
  return room
