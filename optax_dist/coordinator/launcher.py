"""Starts a job's replicas as processes of this machine, and looks after them.

The store gets a free port on loopback, and the job a fresh secret. Whoever
dies is started again if asked for; when the run can't go on, the error says
whose fault it was, with the last lines of its output. Nothing outlives the
launcher, however it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import secrets
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from optax_dist.coordinator import child, cluster, interrupts
from optax_dist.coordinator.join import SECRET_VARIABLE
from optax_dist.coordinator.launch_report import LaunchError, Loss, Report
from optax_dist.coordinator.store import process as store_process

_log = logging.getLogger("optax_dist.coordinator")

_SLICE = 0.1
# For glibc: memory that is freed stays with the process. Fresh pages cost as much
# as all the copies of an exchange.
_KEEP_MEMORY = {
  "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
  "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
# One that fails with an error may be the first of all: wait for the others.
_SETTLE = 1.0


@dataclasses.dataclass
class _Place:
  """A replica's number, and who has it."""

  process: child.Child | None
  incarnation: int = 0
  done: bool = False
  empty_since: float = 0.0
  failed: bool = False


class Launcher:
  """The replicas of one run; see the module.

  A replica's program makes a `child.Channel` first of all, calls `take_place`,
  and then `coordinator.join` without an address. What it says with the channel
  goes to `on_event`; "finished" says that the run is over, and "stop" with
  "seconds" has it continued when it has stopped itself.
  """

  def __init__(
    self,
    command: Sequence[str],
    replicas: int,
    *,
    folder: pathlib.Path,
    env: Mapping[str, str] | None = None,
    needed: int = 1,
    restarts: int = 0,
    spares: int = 0,
    deadline: float | None = None,
    silence: float = 300.0,
    grace: float = 10.0,
    on_event: Callable[[int, int, child.Event], None] = lambda *told: None,
    on_tick: Callable[[], None] = lambda: None,
  ):
    """Says what to launch; `run` does.

    Args:
      command: a replica's program and its arguments.
      replicas: how many run at the same time.
      folder: where the files of their output go; it is made.
      env: variables to add to this process's own. Of itself, it has glibc keep
        memory that is freed, unless these say otherwise.
      needed: how many must be there for the run to go on.
      restarts: how many may be started in place of others that have died.
      spares: processes that are started in advance for that.
      deadline: seconds that the run may take; None for any.
      silence: seconds during which nobody says anything, after which the run
        is given up.
      grace: seconds that processes get to end by themselves, once the run is
        over.
      on_event: called with replica, incarnation and what it said.
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
    self._command, self._replicas, self._folder = command, replicas, folder
    self._needed, self._restarts_left = needed, restarts
    self._spares_wanted = spares
    self._deadline, self._silence, self._grace = deadline, silence, grace
    self._on_event, self._on_tick = on_event, on_tick
    # A fresh secret for each job, which other users of this host can't see.
    self._env = {**(env or {}), SECRET_VARIABLE: secrets.token_hex(16)}
    # What the caller has set stays as it is.
    for name, value in _KEEP_MEMORY.items():
      self._env.setdefault(name, os.environ.get(name, value))
    self._places: dict[int, _Place] = {}
    self._spares: list[child.Child] = []
    self._everyone: list[child.Child] = []
    self._losses: list[Loss] = []
    self._to_continue: list[tuple[float, child.Child]] = []
    self._store: store_process.StoreProcess | None = None
    self._over_since: float | None = None
    self._start = self._heard = time.monotonic()
    self._restarts = 0

  @property
  def processes(self) -> dict[int, child.Child]:
    """The live processes, by replica."""
    return {
      i: place.process
      for i, place in self._places.items()
      if place.process is not None
    }

  @property
  def store(self) -> store_process.StoreProcess:
    """The process that keeps what replicas must decide once."""
    assert self._store is not None
    return self._store

  def run(self) -> Report:
    """Launches, and waits until the run has ended.

    Returns:
      The report, if at least one replica ended well.

    Raises:
      LaunchError: the run can't go on; it names what failed.
      KeyboardInterrupt: at Ctrl-C; SIGTERM raises a SystemExit.
    """
    self._folder.mkdir(parents=True, exist_ok=True)
    with interrupts.handled() as told:
      try:
        self._launch()
        told.at_once = False
        while not self._is_done():
          told.check()
          self._look()
          self._on_tick()
        return Report(
          time.monotonic() - self._start, self._losses, self._restarts
        )
      finally:
        told.at_once = False
        self._end_all()

  def _launch(self) -> None:
    self._start = self._heard = time.monotonic()
    secret = self._env[SECRET_VARIABLE].encode()
    self._store = store_process.start(secret, port=0)
    self._env |= {
      cluster.ADDRESS: self._store.address.partition(",")[0],
      cluster.NUM_REPLICAS: str(self._replicas),
    }
    for replica in range(self._replicas):
      self._places[replica] = _Place(None)
      self._fill(replica, self._begin())

  def _begin(self) -> child.Child:
    number = len(self._everyone)
    process = child.Child(
      f"process {number}",
      self._command,
      self._folder / f"process-{number}.log",
      self._env,
    )
    self._everyone.append(process)
    return process

  def _fill(self, replica: int, process: child.Child) -> None:
    place = self._places[replica]
    place.process = process
    process.name = f"replica {replica}"
    process.send({"replica": replica, "incarnation": place.incarnation})

  def _is_done(self) -> bool:
    if all(place.done for place in self._places.values()):
      return True
    return self._over_since is not None and not self.processes

  def _look(self) -> None:
    """Waits a little for news, and deals with them."""
    waited_for = [*self.processes.values(), *self._spares]
    ready, _, _ = select.select(waited_for, [], [], _SLICE)
    for process in ready:
      events, ended = process.read()
      replica = self._replica_of(process)
      for event in events:
        self._heard = time.monotonic()
        if replica is not None:
          self._take(replica, process, event)
      if ended:
        # It may have closed its output a moment before it ends.
        with contextlib.suppress(Exception):
          process.popen.wait(self._grace)
        self._ended(replica, process)
    now = time.monotonic()
    for when, process in list(self._to_continue):
      if now >= when:
        self._to_continue.remove((when, process))
        process.signal(signal.SIGCONT)
    self._check_store()
    self._restart_the_lost()
    self._check_deadline()

  def _take(
    self, replica: int, process: child.Child, event: child.Event
  ) -> None:
    if event["event"] == "stop":
      until = time.monotonic() + float(event["seconds"])
      self._to_continue.append((until, process))
    elif event["event"] == "finished" and self._over_since is None:
      self._over_since = time.monotonic()
    self._on_event(replica, self._places[replica].incarnation, event)

  def _replica_of(self, process: child.Child) -> int | None:
    for replica, place in self._places.items():
      if place.process is process:
        return replica
    return None

  def _ended(self, replica: int | None, process: child.Child) -> None:
    ending, code = process.ending(), process.popen.poll()
    process.kill()
    if replica is None:
      self._spares.remove(process)
      _log.warning("a spare process %s\n%s", ending, process.tail())
      self._spares_wanted = 0
      return
    place = self._places[replica]
    place.process = None
    if code == 0 or self._over_since is not None:
      place.done = True
      return
    loss = Loss(
      replica,
      place.incarnation,
      ending,
      process.tail(),
      time.monotonic() - self._start,
    )
    self._losses.append(loss)
    _log.info("replica %d %s", replica, ending)
    place.empty_since = time.monotonic()
    place.failed = code is not None and code > 0

  def _restart_the_lost(self) -> None:
    empty = [
      replica
      for replica, place in self._places.items()
      if place.process is None and not place.done
    ]
    if self._over_since is not None:
      for replica in empty:
        self._places[replica].done = True
      return
    self._prepare_spares()
    for replica in empty:
      place = self._places[replica]
      settled = time.monotonic() - place.empty_since > _SETTLE
      if place.failed and not settled and self.processes:
        continue
      if not self.processes:
        # Nobody is left who holds the parameters.
        raise self._error(replica, "No replica is left")
      if self._restarts_left > 0:
        self._restarts_left -= 1
        self._restarts += 1
        place.incarnation += 1
        fresh = self._spares.pop(0) if self._spares else self._begin()
        self._fill(replica, fresh)
        continue
      left = [p for p in self._places.values() if p.process or p.done]
      if len(left) < self._needed:
        raise self._error(
          replica, f"{len(left)} replicas are left of {self._needed} needed"
        )

  def _prepare_spares(self) -> None:
    wanted = min(self._spares_wanted, self._restarts_left)
    while len(self._spares) < wanted:
      self._spares.append(self._begin())

  def _error(self, replica: int, what: str) -> LaunchError:
    # Who died first, of those who were not replaced, began it.
    final = {}
    for loss in self._losses:
      if loss.incarnation == self._places[loss.replica].incarnation:
        final[loss.replica] = loss
    by_itself = [x for x in final.values() if "exit code" not in x.ending]
    first = (by_itself or list(final.values()))[0]
    name = f"replica {first.replica}"
    told = f"{what}: {name} {first.ending} after {first.seconds:.1f} s."
    if first.tail:
      told += f" Its last words:\n{first.tail}"
    others = [x for x in final.values() if x is not first]
    for loss in others:
      told += f"\nreplica {loss.replica} {loss.ending}."
    if not self.processes:
      told += "\nTo go on, start the job again from its last checkpoint."
    return LaunchError(name, told)

  def _check_store(self) -> None:
    host = self.store.process
    if host.poll() is None or self._over_since is not None:
      return
    # They may have had words of their own.
    end = time.monotonic() + self._grace
    endings = [f"replica {i}" for i in self.processes]
    for process in self.processes.values():
      with contextlib.suppress(Exception):
        process.popen.wait(max(0.1, end - time.monotonic()))
    raise LaunchError(
      "the store",
      f"The store of the job (process {host.pid}) {child.ending(host)}, and with"
      f" it {', '.join(endings) or 'the run'}: replicas can't go on without it."
      " Start the job again from its last checkpoint.",
    )

  def _check_deadline(self) -> None:
    now = time.monotonic()
    if self._over_since is not None:
      if now - self._over_since > self._grace:
        for process in self.processes.values():
          process.kill()
        for place in self._places.values():
          place.process, place.done = None, True
      return
    running = ", ".join(p.name for p in self.processes.values())
    if self._deadline is not None and now - self._start > self._deadline:
      raise LaunchError(
        running,
        f"The run was not over after {self._deadline:g} s; still at work:"
        f" {running}.{self._words()}",
      )
    if now - self._heard > self._silence:
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
    for process in self._everyone:
      process.kill()
    if self._store is not None:
      self._store.stop()


def take_place(channel: child.Channel) -> tuple[int, int]:
  """In a launched process: waits until it is told which replica it is.

  Returns:
    The replica's number, which `coordinator.join` finds in the environment
    from now on, and how often it was started before.
  """
  told = channel.receive()
  os.environ[cluster.REPLICA] = str(told["replica"])
  return told["replica"], told["incarnation"]


__all__ = ["LaunchError", "Launcher", "Loss", "Report", "take_place"]
