"""Starts a job's replicas as processes of this host, and supervises them.

The launcher creates a store and a secret unless the job has them. A replica
that dies is restarted if requested; when the run can't continue, the error says
which replica failed, with the last lines of its output. No process outlives the
launcher, however it ends. The launchers of a replica on several hosts
coordinate: see `spread`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import itertools
import logging
import os
import pathlib
import random
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from optax_dist.coordinator import interrupts
from optax_dist.coordinator.launch import (
  board,
  child,
  nodes,
  output,
  spread,
  supervisor,
  watcher,
)
from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.launch.report import LaunchError, Loss, Report
from optax_dist.coordinator.runtime import endpoint
from optax_dist.coordinator.store import process as store_process
from optax_dist.coordinator.store import urls
from optax_dist.coordinator.transport import addresses

_log = logging.getLogger("optax_dist.coordinator")

_SLICE = 0.1
# Seconds that the store waits for replicas of other hosts, at the end.
_LAST_CLIENTS = 30.0
# Seconds to tell other hosts that a shared replica has ended.
_LAST_WORDS = 3.0
# Ports for process 0 of a replica on several hosts: the first free one.
MEETING_PORTS = range(29500, 29600)
_LONGEST_TAIL = 4096  # Characters sent to other hosts.
# Makes glibc keep freed memory in the process: fresh pages cost as much as all
# the copies of an exchange.
_KEEP_MEMORY = {
  "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
  "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
# The arguments: replica, its restarts so far, its message.
OnEvent = Callable[[int, int, child.Event], None]


@dataclasses.dataclass
class _Group:
  """The processes of a replica."""

  processes: list[child.Child]
  restarts: int = 0
  ending: str = ""


class Launcher:
  """The replicas of one run on this host; see the module docstring.

  A replica is a program that calls `coordinator.join`, which takes defaults
  from the environment. If it creates a `channel.Channel`, its other messages go
  to `on_event`; after "stop" with "seconds", the launcher continues the
  process, which has stopped itself.
  """

  def __init__(
    self,
    command: Sequence[str],
    replicas: int,
    *,
    folder: pathlib.Path | None = None,
    told: Environment | None = None,
    env: Mapping[str, str] | None = None,
    node: nodes.Node | None = None,
    processes: int = 1,
    nodes_per_replica: int | None = None,
    patience: spread.Patience | None = None,
    needed: int = 1,
    restarts: int = 0,
    spares: int = 0,
    deadline: float | None = None,
    silence: float | None = None,
    grace: float = 0.0,
    linger: float | None = 10.0,
    echo: output.Echo | None = None,
    on_event: OnEvent = lambda *told: None,
    on_tick: Callable[[], None] = lambda: None,
  ):
    """Configures the launch; `run` starts it.

    Args:
      command: a replica's program and its arguments.
      replicas: replicas of the run, on all hosts together.
      folder: where their output files go; it is created. None for no files.
      told: more variables for `coordinator.join`, such as
        `replicas_to_aggregate`; if it has `secret` or `store`, none is created.
      env: variables to add to this process's own. By default glibc is
        configured to keep freed memory, unless these variables say otherwise.
      node: this host, if there are several; by default the only one.
      processes: processes of each replica: if one dies, the replica restarts.
      nodes_per_replica: hosts over which these are spread; by default 1, or,
        with fewer replicas than hosts, as many as there are for each.
      patience: how long launchers of replicas on several hosts wait for each
        other.
      needed: how many replicas the run needs to continue.
      restarts: how many replacements may be started for replicas that died.
      spares: processes that are started in advance for that; their programs
        must call `channel.take_place`.
      deadline: seconds that the run may take; None for no limit.
      silence: seconds without any message after which the run is given up; None
        for never.
      grace: seconds between SIGTERM or Ctrl-C, which are passed on, and killing
        the processes; 0 kills them at once.
      linger: seconds for processes to exit by themselves once the run is over;
        None for no limit.
      echo: called with each line of output; None: output goes to files.
      on_event: called with the replica, its restarts and its message.
      on_tick: called several times a second.

    Raises:
      ValueError: a number is out of range.
    """
    if replicas < 1:
      raise ValueError(f"replicas must be at least 1, got {replicas}.")
    if not 1 <= needed <= replicas:
      raise ValueError(
        f"needed must be from 1 to {replicas}, the replicas; got {needed}."
      )
    if processes < 1:
      raise ValueError(f"processes must be at least 1, got {processes}.")
    if echo is None and folder is None:
      raise ValueError("What processes print needs a folder, or an echo.")
    if spares and processes > 1:
      raise ValueError("There are no spares for replicas of several processes.")
    self._node = node or nodes.Node()
    self._places = {
      p.replica: p
      for p in self._node.places(replicas, processes, nodes_per_replica)
    }
    hosted = list(self._places)
    self._settings = (
      ("--nodes", str(self._node.count)),
      ("--replicas", str(replicas)),
      ("--processes-per-replica", str(processes)),
      ("--nodes-per-replica", str(nodes_per_replica)),
      *(
        (flag, str(value))
        for flag, value in (
          ("--replicas-to-aggregate", told and told.replicas_to_aggregate),
          ("--min-replicas", told and told.min_replicas),
        )
      ),
    )
    self._shared = [p for p in self._places.values() if len(p.hosts) > 1]
    followed = [
      p.replica for p in self._shared if p.hosts[0] != self._node.rank
    ]
    self._patience = patience or spread.Patience()
    self._command, self._replicas, self._folder = command, replicas, folder
    self._processes, self._spares_wanted = processes, spares
    self._deadline, self._silence = deadline, silence
    self._grace, self._linger = grace, linger
    self._echo = echo
    self._on_event, self._on_tick = on_event, on_tick
    told = told or Environment()
    # A new secret for each job, which other users of this host can't see.
    self._told = dataclasses.replace(
      told,
      secret=told.find_secret() or secrets.token_hex(16),
      secret_file=None,
      num_replicas=replicas,
      grace=grace or None,
      local_addr=self._node.local_addr,
    )
    self._token = secrets.token_hex(8)
    self._env = {**(env or {}), watcher.TOKEN_VARIABLE: self._token}
    # Variables set by the caller take precedence.
    for name, value in _KEEP_MEMORY.items():
      self._env.setdefault(name, os.environ.get(name, value))
    self._supervisor = supervisor.Supervisor(
      hosted,
      supervisor.Policy(
        needed=max(1, needed - (replicas - len(hosted))),
        restarts=restarts,
        whole=len(hosted) == replicas and not followed,
      ),
      followed,
    )
    self._spread: spread.Spread | None = None
    self._board: board.Board | None = None
    self._agreed: collections.deque[spread.Effect] = collections.deque()
    self._agreeing = self._said_trouble = False
    self._settled: set[int] = set(followed)
    # In random order, since the launchers of a host would collide.
    ports = random.sample(MEETING_PORTS, len(MEETING_PORTS))
    self._ports = itertools.cycle(ports)
    self._groups: dict[int, _Group] = {}
    self._spares: list[child.Child] = []
    self._everyone: list[child.Child] = []
    self._losses: list[Loss] = []
    # Why replicas had to stop before the end of the run, by replica.
    self._failures: dict[int, str] = {}
    self._to_continue: list[tuple[float, child.Child]] = []
    self._store: store_process.StoreProcess | None = None
    self._watcher: watcher.Watcher | None = None
    self._over_since: float | None = None
    self._stop_at: float | None = None
    self._start = self._heard = time.monotonic()
    self._code: int | None = None

  @property
  def processes(self) -> dict[int, child.Child]:
    """The first process of each running replica, by replica."""
    return {i: g.processes[0] for i, g in self._groups.items()}

  @property
  def _live(self) -> list[child.Child]:
    """All processes of running replicas."""
    return [p for g in self._groups.values() for p in g.processes]

  @property
  def store(self) -> store_process.StoreProcess:
    """The store process.

    Raises:
      ValueError: this launcher did not start one.
    """
    if self._store is None:
      raise ValueError("This launcher has not started a store.")
    return self._store

  def run(self) -> Report:
    """Launches the replicas, and waits until all processes have ended.

    Returns:
      The report; its `code` is the job's exit code.

    Raises:
      LaunchError: the run can't continue; the message names what failed.
      KeyboardInterrupt: after Ctrl-C, unless there is a `grace`; SIGTERM raises
        SystemExit.
    """
    if self._folder is not None:
      self._folder.mkdir(parents=True, exist_ok=True)
    passed_on = (signal.SIGUSR1, signal.SIGUSR2) if self._grace else ()
    with interrupts.handled(passed_on) as told:
      try:
        self._launch()
        told.at_once = False
        while self._code is None:
          self._pass_on(told)
          self._look()
          self._on_tick()
        self._leave("")
        if self._code == 0 and self._node.count > 1 and self._store is not None:
          self._store.drain(_LAST_CLIENTS)
        return Report(
          time.monotonic() - self._start,
          self._losses,
          self._supervisor.restarts,
          self._code,
        )
      except BaseException as error:
        told.at_once = False
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        why = "its launcher was stopped" if stopped else str(error)
        self._leave(why.partition("\n")[0] or repr(error))
        raise
      finally:
        told.at_once = False
        self._end_all()

  def _launch(self) -> None:
    self._start = self._heard = time.monotonic()
    self._watcher = watcher.Watcher(self._token)
    told, node = self._told, self._node
    if told.store is None:
      address = node.address
      if node.rank == 0:
        assert told.secret is not None
        bind, port = node.listens_at()
        at = None if address is None else addresses.parse(address)[-1].host
        self._store = store_process.start(
          told.secret.encode(), bind=bind, port=port, advertise=at
        )
        self._watcher.add(self._store.process.pid)
        address = address or self._store.address.partition(",")[0]
      self._told = dataclasses.replace(told, coordinator_address=address)
    if self._node.count > 1:
      self._begin_to_agree()
    self._execute(self._supervisor.start(time.monotonic()))

  def _begin_to_agree(self) -> None:
    """Connects to the launchers of other hosts."""
    assert self._told.secret is not None
    node = self._node
    self._spread = spread.Spread(
      node.rank,
      secrets.token_hex(8),
      self._shared,
      self._patience,
      time.monotonic(),
      [0] if node.rank else range(1, node.count),
      self._settings,
      f"{socket.gethostname()}, process {os.getpid()}",
    )
    self._board = board.Board(
      self._where(),
      self._told.secret.encode(),
      self._told.run or "",
      self._node.rank,
      self._spread.hosts,
    )

  def _where(self) -> urls.Place:
    """The address of the store."""
    told = self._told
    return urls.parse(told.store or f"tcp://{told.coordinator_address}")

  def _step(self, given: supervisor.Input) -> None:
    self._execute(self._supervisor.step(given, time.monotonic()))
    for place in self._shared:
      replica = place.replica
      state = self._supervisor.state(replica)
      ended = state in (supervisor.State.DONE, supervisor.State.ABSENT)
      if ended and replica not in self._settled:
        self._settled.add(replica)
        absent = state is supervisor.State.ABSENT
        self._agree(
          spread.NoMoreStarts(replica, "it was given up" if absent else "")
        )

  def _agree(self, given: spread.Input) -> None:
    """Processes an event of replicas on several hosts."""
    if self._spread is None:
      return
    self._agreed += self._spread.step(given, time.monotonic())
    if self._agreeing:
      return  # An effect may cause new inputs; they are processed in order.
    self._agreeing = True
    try:
      while self._agreed:
        self._execute_agreed(self._agreed.popleft())
    finally:
      self._agreeing = False

  def _execute_agreed(self, effect: spread.Effect) -> None:
    match effect:
      case spread.StartPart(replica, start, address):
        _log.info("replica %d meets at %s", replica, address)
        self._begin_processes(replica, start, address)
        self._step(supervisor.StartedElsewhere(replica, start))
      case spread.KillPart(replica):
        for process in self._groups.pop(replica).processes:
          self._kill(process)
      case spread.SignalPart(replica, number):
        for process in self._groups[replica].processes:
          process.signal(number)
      case spread.ReplicaEnded(replica, start, code, words, tail):
        ending = f"ended, because {words}"
        self._replica_ended(replica, start, code, ending, tail)
      case spread.CannotStart(replica, words):
        self._settled.add(replica)
        trouble = self._board.trouble if self._board is not None else ""
        self._step(
          supervisor.CannotStart(
            replica, f"{words}; {trouble}" if trouble else words
          )
        )
      case spread.RunOverElsewhere():
        self._run_is_over()
      case spread.Refused(words):
        raise LaunchError("", words)

  def _leave(self, words: str) -> None:
    """Tells other hosts that this one ends, and why."""
    if self._board is None or self._spread is None:
      return
    made, self._board = self._board, None
    now = time.monotonic()
    for place in self._shared:
      replica = place.replica
      if replica in self._groups:
        given = spread.PartEnded(replica, 1, words, "")
        self._spread.step(given, now)
      if replica not in self._settled:
        self._spread.step(spread.NoMoreStarts(replica, words), now)
    if self._spread.writes:
      made.publish(self._spread.notice)
    made.close(_LAST_WORDS if made.reached else 0.0)
    if self._store is not None and (words or self._code):
      self._store.drain(_LAST_WORDS)  # Other hosts still have to read it.

  def _execute(self, effects: Sequence[supervisor.Effect]) -> None:
    for effect in effects:
      match effect:
        case supervisor.StartReplica(replica, restarts) if self._is_shared(
          replica
        ):
          meet = self._meeting_address()
          self._agree(spread.StartWanted(replica, restarts, meet))
        case supervisor.StartReplica(replica, restarts):
          self._begin(replica, restarts)
        case supervisor.EndReplica(replica) if self._is_shared(replica):
          self._agree(spread.EndWanted(replica))
        case supervisor.EndReplica(replica):
          for process in self._groups[replica].processes:
            process.kill()
        case supervisor.JobEnded(code):
          if not code and self._failures and self._over_since is None:
            replica, reason = min(self._failures.items())
            raise LaunchError(
              f"replica {replica}",
              f"The run has failed, though all replicas ended with exit code 0:"
              f" replica {replica}: {reason}",
            )
          self._code = code
        case supervisor.GiveUpRun(reason):
          raise self._error(reason)
    self._prepare_spares()

  def _is_shared(self, replica: int) -> bool:
    return len(self._places[replica].hosts) > 1

  def _meeting_address(self) -> str:
    """An address of this host for process 0 of a replica on several hosts."""
    host = endpoint.store_host(self._where())
    if self._node.local_addr is not None:
      family, ip = addresses.bound(self._node.local_addr)
    elif addresses.is_loopback(host):
      return _free_address()
    else:
      every = "::" if ":" in host else "0.0.0.0"
      family, ip = addresses.bound(addresses.advertised(every, host))
    for port in itertools.islice(self._ports, len(MEETING_PORTS)):
      with contextlib.suppress(OSError), socket.socket(family) as probe:
        probe.bind((ip, port))
        return str(addresses.Endpoint(ip, port))
    raise LaunchError(
      "",
      f"None of the ports {MEETING_PORTS[0]} to {MEETING_PORTS[-1]} of {ip} is"
      " free, where processes of a replica would meet.",
    )

  def _begin(self, replica: int, restarts: int) -> None:
    if self._processes > 1:
      self._begin_processes(replica, restarts, _free_address())
      return
    told = dataclasses.replace(self._told, replica=replica, restarts=restarts)
    group = _Group([], restarts)
    if self._spares_wanted:
      process = self._spares.pop(0) if self._spares else self._spawn(None)
      process.name = f"replica {replica}"
      process.send({"environment": told.variables()})
      group.processes.append(process)
    else:
      group.processes.append(self._spawn(told))
    self._groups[replica] = group

  def _begin_processes(self, replica: int, restarts: int, address: str) -> None:
    """Starts the processes of a replica that belong on this host."""
    made = [
      self._spawn(
        dataclasses.replace(
          self._told,
          replica=replica,
          restarts=restarts,
          num_processes=self._processes,
          process_index=index,
          group_address=address,
        )
      )
      for index in self._places[replica].processes
    ]
    self._groups[replica] = _Group(made, restarts)

  def _spawn(self, told: Environment | None) -> child.Child:
    """Starts a process: of a replica, or a spare one if `told` is None."""
    number = len(self._everyone)
    name, file = f"process {number}", f"process-{number}.log"
    if told is not None:
      name, file = f"replica {told.replica}", f"replica-{told.replica}.log"
      if told.process_index is not None:
        name += f".{told.process_index}"
        file = f"replica-{told.replica}.{told.process_index}.log"
    path = self._folder and self._folder / file
    env = {**self._env, **(told or self._told).variables()}
    try:
      if self._echo is not None:
        printed = output.Printed(name, file=path, echo=self._echo)
        made = child.Child(name, self._command, None, env, printed=printed)
      else:
        made = child.Child(name, self._command, path, env)
    except OSError as error:
      raise LaunchError(
        name, f"{name} can't be started: {error}.{_remedy(error)}"
      ) from error
    self._everyone.append(made)
    assert self._watcher is not None
    self._watcher.add(made.pid)
    return made

  def _prepare_spares(self) -> None:
    wanted = min(self._spares_wanted, self._supervisor.restarts_left)
    while len(self._spares) < wanted:
      self._spares.append(self._spawn(None))

  def _look(self) -> None:
    """Waits briefly for events, and handles them."""
    poll = select.poll()  # `select.select` refuses descriptors from 1024 on.
    for process in (*self._live, *self._spares):
      for file in process.files():
        poll.register(file, select.POLLIN)
    deadline = self._supervisor.deadline()
    wait = _SLICE
    if deadline is not None:
      wait = max(0.0, min(wait, deadline - time.monotonic()))
    poll.poll(1000 * wait)
    for replica, group in list(self._groups.items()):
      if self._groups.get(replica) is group:
        self._look_at(replica, group)
    if self._board is not None and self._spread is not None:
      self._agree(spread.Tick())
      if self._spread.writes:
        self._board.publish(self._spread.notice)
      self._check_reach(self._board)
      for host, notice in self._board.poll():
        self._agree(spread.Heard(host, notice))
    for process in list(self._spares):
      if process.has_ended():
        self._spares.remove(process)
        self._spares_wanted = 0
        self._kill(process)
        _log.warning("a spare process %s\n%s", process.ending(), process.tail())
    now = time.monotonic()
    for when, process in list(self._to_continue):
      if now >= when:
        self._to_continue.remove((when, process))
        process.signal(signal.SIGCONT)
    if self._code is None:
      self._step(supervisor.Tick())
      self._check_store()
      self._check_deadlines()

  def _look_at(self, replica: int, group: _Group) -> None:
    ended = [p.has_ended() for p in group.processes]
    for process in group.processes:
      if process.printed is not None:
        process.read_prints()
      if process.fileno() >= 0:
        for event in process.read()[0]:
          self._heard = time.monotonic()
          self._take(replica, group, process, event)
    failed = None
    for process, gone in zip(group.processes, ended, strict=True):
      if gone:
        self._kill(process)
        if process.popen.returncode and failed is None:
          failed = process
    if failed is None and not all(ended):
      return
    for process in group.processes:
      self._kill(process)
    del self._groups[replica]
    if failed is None:
      code, ending, tail = 0, "", ""
    else:
      code, ending = failed.popen.returncode, failed.ending()
      tail = failed.tail()
    if self._is_shared(replica):
      if failed is not None:
        ending = f"{failed.name} on host {self._node.rank} {ending}"
      self._agree(
        spread.PartEnded(replica, code, ending, tail[-_LONGEST_TAIL:])
      )
      return
    self._replica_ended(replica, group.restarts, code, ending, tail)

  def _replica_ended(
    self, replica: int, restarts: int, code: int, ending: str, tail: str
  ) -> None:
    if code == -signal.SIGKILL and not self._supervisor.has_struck(replica):
      # The kernel leaves no other trace in the output of the process.
      ending += " (out of memory?)"
    if code and self._over_since is None:
      seconds = time.monotonic() - self._start
      shells = supervisor.exit_code(code)
      self._losses.append(
        Loss(replica, restarts, ending, tail, seconds, shells)
      )
    self._step(supervisor.ReplicaEnded(replica, code))
    follows = self._supervisor.outlook(replica, code, time.monotonic())
    if follows:
      self._say(f"replica {replica} {ending}; {follows}")

  def _say(self, line: str) -> None:
    if self._echo is not None:
      self._echo("launch", line, True)
    else:
      _log.info("%s", line)

  def _kill(self, process: child.Child) -> None:
    if process.popen.returncode is None:
      process.kill()
      assert self._watcher is not None
      self._watcher.remove(process.pid)

  def _take(
    self,
    replica: int,
    group: _Group,
    process: child.Child,
    event: child.Event,
  ) -> None:
    match event.get("event"):
      case "stop":
        until = time.monotonic() + float(event["seconds"])
        self._to_continue.append((until, process))
      case "fault":
        self._step(supervisor.Struck(replica))
      case "joined":
        self._failures.pop(replica, None)
        self._step(supervisor.Joined(replica))
      case "failed":
        self._failures[replica] = str(event["reason"])
      case "finished":
        self._run_is_over()
        self._agree(spread.RunOver())
    self._on_event(replica, group.restarts, event)

  def _run_is_over(self) -> None:
    if self._over_since is None:
      self._over_since = time.monotonic()
    self._step(supervisor.RunOver())

  def _pass_on(self, told: interrupts.Interrupts) -> None:
    """Passes signals on; a second Ctrl-C, or no grace period, ends all."""
    for number in told.take_others():
      self._signal_all(number)
    if not self._grace or self._stop_at is not None:
      told.check()
    asked = told.number
    if asked is not None and self._stop_at is None:
      told.forget()
      self._stop_at = time.monotonic() + self._grace
      self._signal_all(asked)
      self._step(supervisor.LauncherStops(asked))
      self._agree(spread.HostStops(asked))

  def _signal_all(self, number: int) -> None:
    for process in self._live:
      process.signal(number)

  def _error(self, what: str) -> LaunchError:
    final = {}
    for loss in self._losses:
      if loss.restarts == self._supervisor.restarts_of(loss.replica):
        final[loss.replica] = loss
    if not final:  # It never started, or another host reports it.
      return LaunchError("", f"{what}.")
    cause = self._cause(list(final))
    name = f"replica {cause.replica}"
    told = f"{what}: {name} {cause.ending} after {cause.seconds:.1f} s."
    if cause.tail:
      told += f" The last lines of its output:\n{cause.tail}"
    for loss in final.values():
      if loss is cause:
        continue
      told += f"\nreplica {loss.replica} {loss.ending}"
      again = loss.restarts - cause.restarts
      if loss.replica == cause.replica:
        last = loss.tail.rpartition("\n")[2]
        told += f" after {again} more start{'s' * (again > 1)}: {last}"
      told += "" if told.endswith(".") else "."
    if not self._groups:
      told += "\nTo go on, start the job again from its last checkpoint."
    return LaunchError(name, told, cause.code)

  def _cause(self, replicas: Sequence[int]) -> Loss:
    """The first of the failures because of which the run can't continue.

    What replicas raise after a restart often follows from the first error: the
    run is over, or its store is gone.
    """
    firsts = []
    for replica in replicas:
      mine = [loss for loss in self._losses if loss.replica == replica]
      in_a_row = self._supervisor.failures_of(replica)
      firsts.append(mine[-in_a_row:][0])
    first = min(firsts, key=lambda loss: loss.seconds)
    # A replica that was killed makes others fail at nearly the same time.
    for loss in firsts:
      killed = loss.seconds - first.seconds < 1.0 and loss.code > 128
      if killed and first.code <= 128:
        return loss
    return first

  def _check_reach(self, notices: board.Board) -> None:
    """Says what a launcher of several hosts waits for, and until when."""
    if notices.reached or not notices.trouble:
      return
    waited = time.monotonic() - self._start
    late = waited >= self._patience.meet
    if self._said_trouble and not late:
      return
    self._said_trouble = True
    words = f"The store of the job does not answer: {notices.trouble}."
    if self._store is not None:
      words += (
        " This is host 0, which has started it: --address must lead here."
      )
    elif self._told.store is None:
      words += " The launcher of host 0 (--node-rank 0) starts it at --address."
    if late:
      raise LaunchError(
        "the store", f"{words} It was waited for {waited:.0f} s."
      )
    self._say(words)

  def _check_store(self) -> None:
    if self._store is None or self._over_since is not None:
      return
    host = self._store.process
    if host.poll() is None or self._stop_at is not None:
      return
    # Their own output may explain more.
    end = time.monotonic() + (self._linger or self._grace)
    live = self._live
    while time.monotonic() < end and not all(p.has_ended() for p in live):
      for process in live:
        if process.printed is not None:
          process.read_prints()
      time.sleep(0.05)
    endings = ", ".join(f"replica {i}" for i in self._groups)
    raise LaunchError(
      "the store",
      f"The store of the job (process {host.pid}) {child.ending(host)}, and with"
      f" it {endings or 'the run'}: replicas can't go on without it."
      " Start the job again from its last checkpoint.",
    )

  def _check_deadlines(self) -> None:
    now = time.monotonic()
    over, linger = self._over_since, self._linger
    late = over is not None and linger is not None and now - over > linger
    if late or (self._stop_at is not None and now > self._stop_at):
      for process in self._live:
        process.kill()
    if over is not None or self._stop_at is not None:
      return
    running = ", ".join(p.name for p in self.processes.values())
    if self._deadline is not None and now - self._start > self._deadline:
      raise LaunchError(
        running,
        f"The run was not over after {self._deadline:g} s; still at work:"
        f" {running}.{self._words()}",
      )
    if self._silence is not None and now - self._heard > self._silence:
      raise LaunchError(
        running,
        f"Nothing was heard of {running} for {self._silence:g} s."
        f"{self._words()}",
      )

  def _words(self) -> str:
    said = [
      f"\n--- {p.name}:\n{p.tail()}\n{p.where()}"
      for p in self.processes.values()
    ]
    return "".join(said)

  def _end_all(self) -> None:
    # Exit callbacks run in reverse: the watcher is stopped last in any case.
    with contextlib.ExitStack() as stack:
      if self._watcher is not None:
        stack.callback(self._watcher.stop)
      if self._store is not None:
        stack.callback(self._store.stop)
      for process in self._everyone:
        stack.callback(process.kill)


def _remedy(error: OSError) -> str:
  """What to do about a process that can't be started; "" if that is plain."""
  if error.errno in (errno.EMFILE, errno.ENFILE):
    return (
      " The launcher needs some five descriptors for each process of this host:"
      " raise its limit (ulimit -n)."
    )
  return ""


def _free_address() -> str:
  # The process that listens there has to import JAX first.
  (port,) = addresses.free_ports()
  return f"127.0.0.1:{port}"


__all__ = ["LaunchError", "Launcher", "Loss", "Report"]
