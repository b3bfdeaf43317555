"""A coordinator's process, and `start`, which starts one."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping

from optax_dist.coordinator.transport import tls

_log = logging.getLogger("optax_dist.coordinator")

PORT = 29300
SECRET_VARIABLE = "OPTAX_DIST_SECRET"
STORE_VARIABLE = "OPTAX_DIST_STORE"
# Printed before its address, and again and again while its event loop turns.
READY, BEAT = "ready ", "beat"
# Seconds until it is ready, and until it has ended.
_START_SECONDS, _STOP_SECONDS = 60.0, 5.0


#: The exit code of one that finds another process at its port.
TAKEN = 98


class PortTaken(RuntimeError):
  """Another process has the port: most likely it is the coordinator."""


class CoordinatorProcess:
  """A process that runs a coordinator; a context manager that stops it.

  Attributes:
    address: address that its members connect to, or the URL of etcd.
    process: the process.
  """

  def __init__(self, address: str, process: subprocess.Popen[bytes]):
    self.address, self.process = address, process
    self._started_by = os.getpid()

  def stop(self) -> None:
    """Stops it; its members are notified. In a forked child it does nothing."""
    if os.getpid() != self._started_by:
      return
    self.process.terminate()
    try:
      self.process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
      self.kill()
    if self.process.stdin is not None:
      self.process.stdin.close()

  def kill(self, patience: float = 0.0) -> None:
    """Ends it at once, as if it had died.

    Args:
      patience: seconds in which it may end by itself.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.process.wait(patience)
    self.process.kill()
    self.process.wait()

  def drain(self) -> None:
    """Makes it exit once it has no members; not if it was started with `idle`."""
    assert self.process.stdin is not None
    with contextlib.suppress(OSError):
      self.process.stdin.write(b"drain\n")
      self.process.stdin.flush()

  def __enter__(self) -> CoordinatorProcess:
    return self

  def __exit__(self, *error: object) -> None:
    self.stop()


def start(
  secret: bytes,
  *,
  bind: str | None = None,
  port: int | None = None,
  advertise: str | None = None,
  log: str | os.PathLike[str] | None = None,
  journal: str | os.PathLike[str] | None = None,
  certificates: tls.Certificates | None = None,
  idle: float | None = None,
  store: str | None = None,
  beats: bool = False,
  env: Mapping[str, str] | None = None,
) -> CoordinatorProcess:
  """Starts a coordinator, and waits until it is ready.

  Args:
    secret: the job's secret; without one it listens on loopback only.
    bind: the host or address to listen on; None for loopback, or with a `store`
      for what its servers reach.
    port: the port; 0 for any free one; None for `PORT`, or with a `store` for any.
    advertise: the host that others connect to, if it isn't `bind`.
    log: its log, which it continues if there is one; None for a file in the
      folder of temporary files that belongs to the port.
    journal: the file that it writes events to; None for that of its members.
    certificates: encrypts all traffic that leaves this host.
    idle: seconds without a member after which it exits by itself; None: it
      exits when this process ends, however that happens.
    store: a URL of etcd: it is ready at once, and coordinates as soon as it has
      the lease there.
    beats: whether it prints a line `BEAT` again and again, as long as its event
      loop turns, and whatever else it has to say; the caller reads its output.
    env: variables to add to this process's own.

  Raises:
    PortTaken: another process listens there.
    RuntimeError: it has exited; the message is what it said.
    TimeoutError: it is not ready in time.
  """
  command = [sys.executable, "-m", __package__]
  command += [] if bind is None else ["--bind", bind]
  command += [] if port is None else ["--port", str(port)]
  command += [] if advertise is None else ["--advertise", advertise]
  command += [] if log is None else ["--log", os.fspath(log)]
  command += [] if journal is None else ["--journal", os.fspath(journal)]
  if certificates is not None:
    command += ["--certificates", *certificates.files()]
  command += ["--lifeline"] if idle is None else ["--idle", str(idle)]
  command += ["--beats"] if beats else []
  # Not on the command line, which other users of the host can read.
  variables = {
    **os.environ,
    **(env or {}),
    SECRET_VARIABLE: secret.hex(),
    STORE_VARIABLE: store or "",
  }
  process = subprocess.Popen(
    [*command, "--hex-secret"],
    env=variables,
    stdin=subprocess.PIPE if idle is None else subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    bufsize=0,  # What was not read yet must be seen by `poll`.
    start_new_session=True,  # Ctrl-C is handled by the parent.
  )
  made = CoordinatorProcess("", process)
  late = threading.Event()

  def give_up() -> None:
    late.set()
    process.kill()

  watchdog = threading.Timer(_START_SECONDS, give_up)
  watchdog.start()
  said = ""
  try:
    assert process.stdout is not None
    for line in process.stdout:
      if line.startswith(READY.encode()):
        made.address = line.decode().removeprefix(READY).strip()
        if store is None:
          # Behind the comma is a socket of this process, not of the next one.
          made.address = made.address.partition(",")[0]
        break
      said += line.decode(errors="replace")
  except BaseException:
    made.stop()
    raise
  finally:
    watchdog.cancel()
  if made.address:
    if not beats:
      threading.Thread(
        target=_pass_on,
        args=(process,),
        name="optax-dist-coordinator-output",
        daemon=True,
      ).start()
    return made
  process.wait()
  made.stop()
  process.stdout.close()
  said = said.strip()
  if late.is_set():
    raise TimeoutError(
      f"The coordinator was not ready in {_START_SECONDS:g} s. {said}"
    )
  said = said or f"The coordinator ended with {process.returncode}."
  raise (PortTaken if process.returncode == TAKEN else RuntimeError)(said)


def _pass_on(process: subprocess.Popen[bytes]) -> None:
  """Logs what it says until it ends, and takes its exit status."""
  assert process.stdout is not None
  with process.stdout as said:
    for line in said:
      _log.warning("Coordinator: %s", line.decode(errors="replace").rstrip())
  process.wait()


def default_log(port: int) -> pathlib.Path:
  """The log of a coordinator that was not told another one.

  Any process of this user and host that starts it again finds the same.
  """
  folder = pathlib.Path(tempfile.gettempdir(), f"optax-dist-{os.getuid()}")
  return folder / f"coordinator-{port}.log"
