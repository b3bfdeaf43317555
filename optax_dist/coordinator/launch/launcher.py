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
import itertools
import math
import os
import pathlib
import secrets
import select
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence

from optax_dist.coordinator import journal
from optax_dist.coordinator._internal import locks
from optax_dist.coordinator.launch import (
  child,
  keeper,
  line,
  output,
  signals,
  supervisor,
  watcher,
)
from optax_dist.coordinator.launch.child import Child
from optax_dist.coordinator.launch.environment import (
  Environment,
  ProcessEnvironment,
)
from optax_dist.coordinator.launch.placement import Placement
from optax_dist.coordinator.launch.standbys import Standbys
from optax_dist.coordinator.launch.supervisor import Effect
from optax_dist.coordinator.runtime import process_exit

_POLL_SECONDS = 0.1
# Seconds in which the processes of a replica end one after another.
_SETTLE_SECONDS = 1.0
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
    placement: Placement,
    policy: supervisor.Policy,
    *,
    folder: pathlib.Path | None = None,
    log: keeper.Log | None = None,
    standbys: int = 0,
    environment: Environment | None = None,
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
      log: the coordinator's; None for a new one among temporary files.
      standbys: processes that wait until they take the place of a replica.
      environment: more variables for `coordinator.join`, such as
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
    self._placement, self._lock = placement, lock
    self._log = log or keeper.Log()
    environment = environment or Environment()
    # A new secret for each job, which other users of this host can't see.
    self._environment = dataclasses.replace(
      environment,
      secret=environment.find_secret() or secrets.token_hex(16),
      secret_file=None,
      num_replicas=placement.replicas,
      grace=grace,
    )
    self._command = command
    # Variables set by the caller take precedence.
    kept = {name: os.environ.get(name, x) for name, x in _KEEP_MEMORY.items()}
    token = {watcher.TOKEN_VARIABLE: secrets.token_hex(8)}
    self._setup = child.Setup(kept | dict(env or {}) | token, folder, echo)
    self._supervisor = supervisor.Supervisor(
      placement.here, policy, placement.elsewhere
    )
    # The processes of each replica on this host.
    self._running: dict[int, list[Child]] = {}
    # The coordinator's name for the process of each replica that has joined; and for
    # the last process of each replica that has joined and ended.
    self._members: dict[int, str] = {}
    self._ended: dict[int, str] = {}
    stand_by = lambda: self._spawn(ProcessEnvironment(standby=1))
    self._standbys = Standbys(standbys, stand_by, self._say)
    self._stop_at: float | None = None
    self._code: int | None = None

  def run(self) -> int:
    """Launches the replicas, and waits until all processes have ended.

    Returns:
      The exit code of the job: 0 on success, 128 plus the signal's number after
      a signal, that of a replica that failed after the run was over.

    Raises:
      LaunchError: the run can't continue; the message names what failed.
      RuntimeError, TimeoutError: the coordinator can't start.
      SystemExit: after a second Ctrl-C or SIGTERM, or one before the replicas.
    """
    if self._setup.folder is not None:
      self._setup.folder.mkdir(parents=True, exist_ok=True)
    token = self._setup.env[watcher.TOKEN_VARIABLE]
    # Outside `recorded`, since this may wait: no process has to be ended yet, so a
    # signal may end the launcher at once.
    settings = keeper.settings_of(self._placement, self._environment, self._log)
    with signals.recorded() as received, contextlib.ExitStack() as stack:
      # Exit callbacks run in reverse: the watcher is stopped last in any case.
      watch = watcher.Watcher(token, self._lock.file if self._lock else None)
      stack.callback(watch.stop)
      stack.push(self._end_journal)
      ending = lambda: signals.ENDING.intersection(received)
      self._keeper = keeper.Keeper(
        settings, self._placement, self._environment, self._setup
      )
      stack.callback(self._keeper.stop)
      self._keeper.wait(lambda: _exit_if(ending()))
      address = self._keeper.address
      self._environment = dataclasses.replace(
        self._environment, coordinator_address=address
      )
      self._line = line.Line(
        address, self._environment, self._placement, self._say
      )
      stack.callback(self._line.close)
      stack.callback(self._kill_all)
      failure = None
      try:
        self._execute(self._supervisor.start(time.monotonic()))
        while self._code is None:
          while received:
            self._pass_on(received.pop(0))
          self._poll()
      except LaunchError as error:
        failure = error
      self._kill_all()
      stops = lambda: self._stop_at is not None or bool(ending())
      self._keeper.linger(stops, self._say)
      if failure is not None:
        raise failure
      assert self._code is not None
      return self._code

  def _end_journal(self, kind: object, error: object, trace: object) -> None:
    """Writes the end of a run that can't go on, for readers of the journal."""
    placement, environment = self._placement, self._environment
    elsewhere = placement.external or environment.store is not None
    if environment.journal is None or elsewhere or placement.hosts > 1:
      return  # The run may go on without this launcher.
    if not self._supervisor.has_begun or self._supervisor.over:
      return
    reason = "its launcher has ended"
    if isinstance(error, LaunchError):
      reason += f": {error}".partition("\n")[0]
    path = environment.journal
    with contextlib.suppress(OSError), journal.Journal(path) as file:
      if not file.ended:
        file.write("finish", step=file.step + 1, reason=reason)

  def _kill_all(self) -> None:
    for process in self._live():
      process.kill()

  def _live(self) -> list[Child]:
    """All processes of running replicas, and the standbys."""
    running = itertools.chain(*self._running.values())
    return [*running, *self._standbys.processes]

  def _say(self, line: str) -> None:
    self._setup.echo("launch", line, True)

  # Effects of the supervisor.

  def _execute(self, effects: Sequence[Effect]) -> None:
    for effect in effects:
      match effect:
        case supervisor.StartReplica(replica, restarts):
          self._start(replica, restarts)
        case supervisor.KillReplica(replica):
          for process in self._running.pop(replica, []):
            process.kill()
        case supervisor.Say(line):
          self._say(line)
        case supervisor.JobEnded(code, ""):
          self._code = code
        case supervisor.JobEnded(code, reason, corrigible):
          given_up = f"{socket.gethostname()}: {reason.splitlines()[0]}"
          self._tell_of_ended("" if corrigible else given_up)
          raise LaunchError(reason, code)

  def _tell_of_ended(self, given_up: str = "") -> None:
    """Tells the coordinator which replicas may come, and which have ended."""
    machine, ended = self._supervisor, self._ended.values()
    self._line.tell(machine.coming, machine.never_joined, ended, given_up)

  def _start(self, replica: int, restarts: int) -> None:
    """Starts the processes of a replica that belong on this host."""
    which = ProcessEnvironment(replica, restarts)
    # Registered at once, so that these are ended if a later one can't be started.
    processes = self._running[replica] = []
    others = [p for number, p in self._running.items() if number != replica]
    if restarts and self._standbys.processes and self._have_state(others):
      process = self._standbys.processes.pop(0)
      process.tell("replica", variables=which.variables())
      process.rename(_name(which))
      processes.append(process)
    else:
      count = self._placement.processes
      for index in self._placement.processes_here:
        if count > 1:
          which = dataclasses.replace(
            which, num_processes=count, process_index=index
          )
        processes.append(self._spawn(which))
    for process in processes if restarts else ():
      self._record(replica, process, None)

  def _have_state(self, others: Sequence[Sequence[Child]]) -> bool:
    """Whether others can give a standby the state of the run.

    Otherwise a new process is started, since it reads the newest checkpoint. That
    of a standby was the newest one when it began.
    """
    if self._placement.elsewhere:
      return True
    lives = any(not p.has_ended() for processes in others for p in processes)
    return lives and not self._supervisor.none_joined

  def _spawn(self, which: ProcessEnvironment) -> Child:
    """Starts a process of a replica, or one that stands by.

    Raises:
      LaunchError: it can't be started.
    """
    name = _name(which)
    variables = self._environment.variables() | which.variables()
    try:
      return self._setup.start(name, self._command, variables)
    except OSError as error:
      raise LaunchError(
        f"{name} can't be started: {error}.{_remedy(error)}"
      ) from error

  # Events of replicas.

  def _poll(self) -> None:
    """Waits briefly for events, and handles them."""
    poll = select.poll()  # `select.select` refuses descriptors from 1024 on.
    files = [file for process in self._live() for file in process.files()]
    for file in files + self._keeper.files:
      poll.register(file, select.POLLIN)
    poll.poll(1000 * _POLL_SECONDS)
    self._keeper.poll()
    for replica, processes in list(self._running.items()):
      if self._running.get(replica) is processes:
        self._poll_replica(replica, processes)
    calm = self._supervisor.all_joined and not self._supervisor.over
    self._standbys.poll(calm and bool(self._running) and self._stop_at is None)
    if self._code is None:
      self._execute(self._supervisor.tick(time.monotonic()))
    is_over = self._code is not None or self._supervisor.over
    if not is_over and self._stop_at is None:
      self._check_coordinator()
    if self._stop_at is not None and time.monotonic() > self._stop_at:
      for process in self._live():
        if not process.has_ended():
          self._say(
            f"{process.name} is killed: it has not ended within --grace"
            f" ({self._environment.grace:g} s)"
          )
        process.kill()

  def _check_coordinator(self) -> None:
    if self._line.refused:
      raise LaunchError(f"The coordinator at {self._line.refused}.")
    self._tell_of_ended()
    self._line.look()
    ended = self._line.ended
    if ended is None:
      return
    if not ended.error:
      run, now = self._environment.run or "", time.monotonic()
      self._execute(self._supervisor.run_over(run, now))
    elif self._supervisor.none_joined:
      reason = ended.reason
      raise LaunchError(f"The run has ended with an error: {reason}")

  def _poll_replica(self, replica: int, processes: list[Child]) -> None:
    ended = [p.has_ended() for p in processes]
    for process in processes:
      process.read_prints()
      for event in process.read():
        self._on_event(replica, process, event)
    if self._running.get(replica) is not processes:
      return  # The replica was killed while its events were handled.
    for process, has_ended in zip(processes, ended, strict=True):
      if has_ended:
        process.kill()
    gone = [p for p in processes if p.ended_at < math.inf]
    # The others can't go on without one of these.
    stops = self._stop_at is not None
    failed = [p for p in gone if p.popen.returncode or not (p.parted or stops)]
    failed.sort(key=_follows)
    if len(gone) < len(processes):
      if not failed:
        return
      # A process's error may follow from the end of another process: wait for its exit.
      since = time.monotonic() - min(p.ended_at for p in failed)
      if _follows(failed[0]) and since < _SETTLE_SECONDS:
        return
    for process in processes:
      process.kill()
    del self._running[replica]
    if self._members.get(replica):
      self._ended[replica] = self._members.pop(replica)
    last = [*failed, *processes][0]
    code, how = last.popen.returncode, child.ending(last.popen)
    if code:
      self._record(replica, last, how)
    end = supervisor.ReplicaEnded(
      replica, code, how, last.printed.tail(), last.name
    )
    self._execute(self._supervisor.ended(end, time.monotonic()))

  def _on_event(self, replica: int, process: Child, event: child.Event) -> None:
    """Processes a replica's message, which came through its channel."""
    now, run = time.monotonic(), str(event.get("run", ""))
    match event.get("event"):
      case "joined":
        process.parted = False
        self._members[replica] = str(event.get("process", ""))
        self._record(replica, process, None)
        self._execute(self._supervisor.joined(replica, run, now))
      case "left":
        process.parted = True
        self._supervisor.left(replica, run)
      case "failed":
        process.parted = not event.get("own")
        reason, final = str(event["reason"]), event.get("final", "")
        self._supervisor.failed(replica, reason, final)
        if final == "missed":
          self._execute(self._supervisor.run_over(run, now))
      case "refused":
        self._supervisor.failed(replica, "", "refused")
      case "finished":
        process.parted = True
        self._supervisor.left(replica, run)
        self._execute(self._supervisor.run_over(run, now))

  def _record(self, replica: int, process: Child, ended: str | None) -> None:
    """Tells the journal which process a replica is, or how it has ended."""
    if self._environment.journal is not None:
      with contextlib.suppress(OSError):  # The training does without it.
        journal.add(
          self._environment.journal,
          "process",
          replica=replica,
          host=socket.gethostname(),
          pid=process.pid,
          ended=ended,
        )

  def _pass_on(self, number: int) -> None:
    """Passes a signal on; the second that asks for an end ends all."""
    ends = number in signals.ENDING
    hung_up = number == signal.SIGHUP
    if ends and self._stop_at is not None:
      if hung_up:
        return  # Both the terminal and its shell may send SIGHUP: one signal counts.
      raise SystemExit(128 + number)
    if ends:
      # Standbys are in no run, and have nothing to finish.
      while self._standbys.processes:
        self._standbys.processes.pop().kill()
    for replica, processes in self._running.items():
      # Replicas have no terminal to hang up. And before they join, Ctrl-C's exception
      # may be lost in a callback of JAX.
      early = number == signal.SIGINT and replica not in self._members
      for process in processes:
        process.signal(signal.SIGTERM if hung_up or early else number)
    if ends:
      now = time.monotonic()
      self._stop_at = now + (self._environment.grace or 0.0)
      self._execute(self._supervisor.stop(number, now))
      self._tell_of_ended()


def _follows(process: Child) -> bool:
  """Whether the end of a process most likely follows from that of another one."""
  return process.parted or process.popen.returncode == process_exit.EXIT_CODE


def _exit_if(numbers: Iterable[int]) -> None:
  for number in numbers:
    raise SystemExit(128 + number)


def _name(which: ProcessEnvironment) -> str:
  if which.standby:
    return "standby"
  name, index = f"replica {which.replica}", which.process_index
  return name if index is None else f"{name}.{index}"


def _remedy(error: OSError) -> str:
  """The remedy for a process that can't be started; "" if it is obvious."""
  if error.errno in (errno.EMFILE, errno.ENFILE):
    return (
      " The launcher needs some five descriptors for each process of this host:"
      " raise its limit (ulimit -n)."
    )
  return ""
