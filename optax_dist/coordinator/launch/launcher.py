"""Starts a job's replicas as processes of this host, and supervises them.

The launcher creates a secret unless the job has one, and keeps a coordinator
running, which it starts again whenever that dies or hangs. A replica that dies is
restarted if requested; when the run can't continue, the error says which replica
failed, with the last lines of its output. No process outlives the launcher,
however it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import pathlib
import secrets
import select
import socket
import time
from collections.abc import Mapping, Sequence

from optax_dist.coordinator import journal, locks
from optax_dist.coordinator.launch import (
  child,
  keeper,
  line,
  output,
  signals,
  standby,
  supervisor,
  watcher,
)
from optax_dist.coordinator.launch import placement as placements
from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.launch.supervisor import Effect
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.server import log as server_log
from optax_dist.coordinator.server import process as server_process

_log = logging.getLogger("optax_dist.coordinator")

_POLL_SECONDS = 0.1
# Seconds after a signal in which the coordinator goes on for other hosts.
_FAREWELL = 3.0
# Makes glibc keep freed arrays of up to 64 MiB in the process, and take larger ones
# from huge pages: fresh small pages cost as much as all the copies of an exchange.
_KEEP_MEMORY = {
  "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
  "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
  "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


class LaunchError(RuntimeError):
  """A launched run can't continue.

  Attributes:
    code: the exit code of what failed.
  """

  def __init__(self, message: str, code: int = 1):
    super().__init__(message)
    self.code = code


class Launcher:
  """The replicas of one run on this host; see the module docstring.

  A replica is a program that calls `coordinator.join`, which takes defaults
  from the environment.
  """

  def __init__(
    self,
    command: Sequence[str],
    placement: placements.Placement,
    policy: supervisor.Policy,
    *,
    folder: pathlib.Path | None = None,
    log: pathlib.Path | None = None,
    continues: bool = False,
    standbys: int = 0,
    told: Environment | None = None,
    env: Mapping[str, str] | None = None,
    grace: float = 30.0,
    lock: locks.Lock | None = None,
    echo: output.Echo = output.echo,
  ):
    """Configures the launch; `run` starts it.

    Args:
      command: a replica's program and its arguments.
      placement: the replicas of the run, and which of them run on this host.
      policy: what to do about replicas that end with an error.
      folder: where their output files go; it is created. None for no files.
      log: the coordinator's log; None for a file in the folder of temporary
        files.
      continues: whether an earlier run goes on, if it can: its replicas may live
        on other hosts.
      standbys: processes that wait until they take the place of a replica.
      told: more variables for `coordinator.join`, such as
        `replicas_to_aggregate`; if it has `secret`, none is created, and with a
        `store` the coordinator is found there.
      env: variables to add to this process's own. By default glibc is
        configured to keep freed memory, unless these variables say otherwise.
      grace: seconds between SIGTERM or Ctrl-C, which are passed on, and killing
        the processes.
      lock: what no other launcher may have as long as these processes live, even
        if this launcher is killed.
      echo: called with each line of output.
    """
    self._command, self._placement, self._policy = command, placement, policy
    self._keeper: keeper.Keeper | None = None
    self._log, self._continues = log, continues
    self._lock = lock
    self._folder, self._grace, self._echo = folder, grace, echo
    told = told or Environment()
    # A new secret for each job, which other users of this host can't see.
    self._told = dataclasses.replace(
      told,
      secret=told.find_secret() or secrets.token_hex(16),
      secret_file=None,
      num_replicas=placement.replicas,
      grace=grace,
    )
    self._token = secrets.token_hex(8)
    self._env = {**(env or {}), watcher.TOKEN_VARIABLE: self._token}
    # Variables set by the caller take precedence.
    for name, kept in _KEEP_MEMORY.items():
      self._env.setdefault(name, os.environ.get(name, kept))
    # The processes of each running replica.
    self._running: dict[int, list[child.Child]] = {}
    # As the coordinator calls the process of each replica that has joined, and the
    # last one of each that has ended.
    self._members: dict[int, str] = {}
    self._gone: dict[int, str] = {}
    self._standbys: list[child.Child] = []
    self._wanted = standbys
    # Why replicas had to stop before the end of the run, by replica.
    self._failures: dict[int, str] = {}
    # Those that would fail in the same way again, and how: as "refused", or "final".
    self._final: dict[int, str] = {}
    self._line: line.Line | None = None
    # Those that have joined since they were started last.
    self._joined: set[int] = set()
    self._stop_at: float | None = None
    self._code: int | None = None

  def run(self) -> int:
    """Launches the replicas, and waits until all processes have ended.

    Returns:
      The exit code of the job: 0 on success, 128 plus the signal's number after
      a signal, that of a replica that failed after the run was over.

    Raises:
      LaunchError: the run can't continue; the message names what failed.
      SystemExit: after a second Ctrl-C or SIGTERM.
    """
    if self._folder is not None:
      self._folder.mkdir(parents=True, exist_ok=True)
    with signals.recorded() as received:
      self._watcher = watcher.Watcher(
        self._token, None if self._lock is None else self._lock.file
      )
      try:
        self._launch()
        while self._code is None:
          while received:
            self._pass_on(received.pop(0))
          self._poll()
        self._leave_to_others(received)
        return self._code
      except LaunchError:
        self._leave_to_others(received)
        raise
      finally:
        self._end_all()

  def _launch(self) -> None:
    self._start_coordinator()
    self._call_coordinator()
    self._supervisor = supervisor.Supervisor(
      self._placement.replicas_here, self._placement.policy(self._policy)
    )
    self._execute(self._supervisor.start(time.monotonic()))

  def _start_coordinator(self) -> None:
    """Starts the coordinator of the job, if it belongs on this host.

    With one in etcd, each host starts one, and all but one stand by.
    """
    assert self._told.secret is not None
    store = self._told.store
    address = self._placement.address if store is None else store
    listens = (
      self._placement.listens()
      if store is None
      else keeper.Listens(self._told.local_addr, store=store)
    )
    if listens is not None:
      log = None
      if listens.port is not None:
        log = self._log or server_process.default_log(listens.port)
        replicas = self._placement.replicas
        if not (self._continues and server_log.goes_on(log, replicas)):
          server_log.forget(log)
      path = self._folder and self._folder / "coordinator.log"
      self._printed = output.OutputRelay(
        "coordinator", file=path, echo=self._echo
      )
      try:
        self._keeper = keeper.Keeper(
          listens,
          self._told.secret.encode(),
          log,
          lambda line: self._printed.take(f"{line}\n".encode(), True),
          self._env,
          self._told.find_certificates(),
          self._told.journal,
        )
      except server_process.PortTaken as error:
        raise LaunchError(
          f"{error} Most likely another launcher has --node-rank 0 of this job, or"
          " another job has this --address."
        ) from error
      address = address or f"{listens.bind}:{listens.port}"
    self._told = dataclasses.replace(self._told, coordinator_address=address)

  def _call_coordinator(self) -> None:
    told, placed = self._told, self._placement
    assert told.secret is not None
    assert told.coordinator_address is not None
    self._line = line.Line(
      told.coordinator_address,
      told.secret.encode(),
      msg.Host(
        told.run or "", placed.rank, placed.nodes, "", (*placed.replicas_here,)
      ),
      lambda text: self._echo("launch", text, True),
      told.find_certificates(),
    )

  def _leave_to_others(self, received: list[int]) -> None:
    """Keeps the coordinator as long as replicas on other hosts need it."""
    for process in self._live():
      process.kill()
    if self._keeper is None or self._placement.nodes == 1:
      return
    self._keeper.drain()
    began, said = time.monotonic(), False
    while not self._keeper.drained(_POLL_SECONDS):
      seconds = time.monotonic() - began
      if self._stop_at is not None or any(
        number in signals.ENDING for number in received
      ):
        if seconds > _FAREWELL:
          return
      elif seconds > _FAREWELL and not said:
        said = True
        self._echo(
          "launch",
          "its replicas have ended; it coordinates those of other hosts until"
          " they have, too",
          True,
        )

  def _step(self, given: supervisor.Input) -> None:
    self._execute(self._supervisor.step(given, time.monotonic()))

  def _execute(self, effects: Sequence[Effect]) -> None:
    for effect in effects:
      match effect:
        case supervisor.StartReplica(replica, restarts):
          self._begin(replica, restarts)
        case supervisor.KillReplica(replica):
          for process in self._running.pop(replica, []):
            process.kill()
        case supervisor.Say(line):
          self._echo("launch", line, True)
        case supervisor.JobEnded(code):
          self._code = code
        case supervisor.GiveUpRun(reason, code, corrigible):
          if self._line is not None:
            given_up = f"{socket.gethostname()}: {reason.splitlines()[0]}"
            self._line.tell(
              self._supervisor.never_joined, "" if corrigible else given_up
            )
          raise LaunchError(reason, code)

  def _begin(self, replica: int, restarts: int) -> None:
    """Starts the processes of a replica that belong on this host."""
    told = dataclasses.replace(self._told, replica=replica, restarts=restarts)
    if self._standbys and restarts:
      self._take_the_place(told)
      return
    count = self._placement.processes
    # Those that have started are ended if another one can't be started.
    processes = self._running[replica] = []
    for i in self._placement.processes_here:
      if count > 1:
        told = dataclasses.replace(told, num_processes=count, process_index=i)
      processes.append(self._spawn(told))
      if restarts:
        self._record(replica, processes[-1], None)

  def _take_the_place(self, told: Environment) -> None:
    """Has a process that stands by become a replica."""
    assert told.replica is not None
    process = self._standbys.pop(0)
    process.printed.end()
    process.name, process.printed = self._printed_by(told)
    process.tell("replica", variables=standby.offer(told))
    self._running[told.replica] = [process]
    self._record(told.replica, process, None)

  def _start_standbys(self) -> None:
    """Starts those that are missing, once all replicas have joined."""
    if self._stop_at is None and self._joined >= {*self._running}:
      for _ in range(self._wanted - len(self._standbys)):
        told = dataclasses.replace(self._told, standby=1)
        self._standbys.append(self._spawn(told))

  def _look_at_standbys(self) -> None:
    for process in list(self._standbys):
      ended = process.has_ended()
      process.read_prints()
      process.read()
      if ended:
        process.kill()
        self._standbys.remove(process)
        # Another one would end in the same way.
        self._wanted -= 1
        how = child.ending(process.popen)
        self._echo("launch", f"a standby {how}, and is not replaced", True)

  def _printed_by(self, told: Environment) -> tuple[str, output.OutputRelay]:
    """The name of a process, and what takes its output."""
    number = f"{told.replica}"
    if told.process_index is not None:
      number += f".{told.process_index}"
    name = "standby" if told.standby else f"replica {number}"
    path = self._folder and self._folder / f"{name.replace(' ', '-')}.log"
    return name, output.OutputRelay(name, file=path, echo=self._echo)

  def _spawn(self, told: Environment) -> child.Child:
    """Starts a process of a replica, or one that stands by."""
    name = f"replica {told.replica}"
    env = {**self._env, **told.variables()}
    try:
      name, printed = self._printed_by(told)
      with contextlib.ExitStack() as stack:
        stack.callback(printed.end)
        made = child.Child(name, self._command, printed, env)
        stack.pop_all()
        return made
    except OSError as error:
      raise LaunchError(
        f"{name} can't be started: {error}.{_remedy(error)}"
      ) from error

  def _poll(self) -> None:
    """Waits briefly for events, and handles them."""
    poll = select.poll()  # `select.select` refuses descriptors from 1024 on.
    for process in self._live():
      for file in process.files():
        poll.register(file, select.POLLIN)
    poll.poll(1000 * _POLL_SECONDS)
    for replica, processes in list(self._running.items()):
      if self._running.get(replica) is processes:
        self._poll_replica(replica, processes)
    self._look_at_standbys()
    if self._code is None:
      self._step(supervisor.Tick())
      self._talk()
    if self._stop_at is not None and time.monotonic() > self._stop_at:
      for process in self._live():
        if not process.has_ended():
          killed = f"{process.name} is killed: it has not ended within --grace"
          self._echo("launch", f"{killed} ({self._grace:g} s)", True)
        process.kill()

  def _talk(self) -> None:
    """Tells the coordinator whom it must not wait for, and people of it."""
    assert self._line is not None
    if self._supervisor.over or self._stop_at is not None:
      return
    if self._line.refused:
      raise LaunchError(f"The coordinator at {self._line.refused}.")
    self._line.tell(self._supervisor.never_joined, gone=self._gone.values())
    self._line.look()

  def _live(self) -> list[child.Child]:
    """All processes of running replicas, and those that stand by."""
    running = [p for processes in self._running.values() for p in processes]
    return running + self._standbys

  def _poll_replica(self, replica: int, processes: list[child.Child]) -> None:
    ended = [p.has_ended() for p in processes]
    for process in processes:
      process.read_prints()
      for event in process.read():
        self._take(replica, process, event)
    if self._running.get(replica) is not processes:
      return  # It was killed meanwhile.
    failed = None
    for process, gone in zip(processes, ended, strict=True):
      if gone:
        process.kill()
        if process.popen.returncode and failed is None:
          failed = process
    if failed is None and not all(ended):
      return
    for process in processes:
      process.kill()
    del self._running[replica]
    self._joined.discard(replica)
    if replica in self._members:
      self._gone[replica] = self._members.pop(replica)
    last = failed or processes[0]
    if failed is not None:
      self._record(replica, failed, child.ending(failed.popen))
    given = supervisor.ReplicaEnded(
      replica,
      last.popen.returncode,
      child.ending(last.popen),
      last.printed.tail(),
      last.name,
      self._failures.pop(replica, ""),
      self._final.get(replica, ""),
    )
    self._step(given)

  def _take(
    self, replica: int, process: child.Child, event: child.Event
  ) -> None:
    """Processes a replica's message, which came through its channel."""
    match event.get("event"):
      case "joined":
        self._failures.pop(replica, None)
        self._joined.add(replica)
        self._members[replica] = str(event.get("process", ""))
        self._record(replica, process, None)
        self._step(supervisor.Joined(replica))
        self._start_standbys()
      case "left":
        self._step(supervisor.Left(replica))
      case "failed":
        self._failures[replica] = str(event["reason"])
        self._final[replica] = event.get("final", "")
      case "refused":
        self._final[replica] = "refused"
      case "finished":
        self._step(supervisor.RunOver())

  def _record(
    self, replica: int, process: child.Child, ended: str | None
  ) -> None:
    """Tells the journal which process a replica is, or how it has ended."""
    if self._told.journal is not None:
      with contextlib.suppress(OSError):  # The training does without it.
        journal.add(
          self._told.journal,
          "process",
          replica=replica,
          host=socket.gethostname(),
          pid=process.pid,
          ended=ended,
        )

  def _pass_on(self, number: int) -> None:
    """Passes a signal on; the second that asks for an end ends all."""
    ends = number in signals.ENDING
    if ends and self._stop_at is not None:
      raise SystemExit(128 + number)
    for process in self._live():
      process.signal(number)
    if ends:
      self._stop_at = time.monotonic() + self._grace
      self._step(supervisor.LauncherStops(number))

  def _end_all(self) -> None:
    # Exit callbacks run in reverse: the watcher is stopped last in any case.
    with contextlib.ExitStack() as stack:
      stack.callback(self._watcher.stop)
      if self._keeper is not None:
        stack.callback(self._printed.end)
        stack.callback(self._keeper.stop)
      if self._line is not None:
        stack.callback(self._line.close)
      for process in self._live():
        stack.callback(process.kill)


def _remedy(error: OSError) -> str:
  """What to do about a process that can't be started; "" if that is plain."""
  if error.errno in (errno.EMFILE, errno.ENFILE):
    return (
      " The launcher needs some five descriptors for each process of this host:"
      " raise its limit (ulimit -n)."
    )
  return ""
