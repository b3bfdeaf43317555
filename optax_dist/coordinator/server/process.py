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
from typing import Any

import msgspec

from optax_dist.coordinator.transport import addresses, tls

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


class Settings(msgspec.Struct, frozen=True, kw_only=True):
  """What a coordinator is told.

  Attributes:
    bind: the host or address to listen on; None for loopback, or with a log in
      etcd for what its servers reach.
    port: the port; 0 for any free one; None for `PORT`, or with a log in etcd for
      any.
    advertise: the host that others connect to, if it isn't `bind`.
    log: its log, which it continues if there is one; None for a file in the
      folder of temporary files that belongs to the port.
    journal: the file that it writes events to; None for that of its members.
    certificates: encrypt all traffic that leaves this host.
    idle: seconds without a member after which it exits by itself.
    lifeline: whether it exits when its standard input ends, and once it has no
      members when there is something to read.
    beats: whether it prints a line `BEAT` again and again, as long as its event
      loop turns.
  """

  bind: str | None = None
  port: int | None = None
  advertise: str | None = None
  log: str | None = None
  journal: str | None = None
  certificates: tls.Certificates | None = None
  idle: float | None = None
  lifeline: bool = False
  beats: bool = False

  @classmethod
  def at(cls, address: str) -> Settings:
    """Where one listens that others reach at an address of this host.

    Raises:
      ValueError: it is no address.
    """
    way = addresses.parse(address)[-1]
    # A name or address of this host that isn't an address of its own (a service,
    # a mapped port) leads to one of its addresses.
    bind = way.host
    if not addresses.is_own(bind):
      bind = addresses.everywhere(bind).text
    return cls(bind=bind, port=way.port, advertise=way.host)


class CoordinatorProcess:
  """A process that runs a coordinator; a context manager that stops it.

  Attributes:
    address: address that its members connect to, or the URL of etcd; "" until it
      is ready.
    process: the process.
  """

  def __init__(
    self,
    settings: Settings,
    secret: bytes,
    store: str | None = None,
    env: Mapping[str, str] | None = None,
  ):
    """Starts one; see `start`. Whoever starts it reads its output."""
    self.address = ""
    # Paths may be given, too.
    text = msgspec.json.encode(settings, enc_hook=os.fspath).decode()
    self.process = subprocess.Popen(
      [sys.executable, "-m", __package__, text],
      # Not on the command line, which other users of the host can read.
      env={
        **os.environ,
        **(env or {}),
        SECRET_VARIABLE: secret.hex(),
        STORE_VARIABLE: store or "",
      },
      stdin=subprocess.PIPE if settings.lifeline else subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      bufsize=0,  # What was not read yet must be seen by `poll`.
      start_new_session=True,  # Ctrl-C is handled by the parent.
    )
    self._started_by = os.getpid()

  def wait_until_ready(self) -> None:
    """Reads its output until it is ready; stops it if it never is.

    Raises:
      PortTaken: another process listens there.
      RuntimeError: it has exited; the message is what it said.
      TimeoutError: it is not ready in time.
    """
    late = threading.Event()

    def give_up() -> None:
      late.set()
      self.process.kill()

    watchdog = threading.Timer(_START_SECONDS, give_up)
    watchdog.start()
    printed = ""
    assert self.process.stdout is not None
    try:
      for raw in self.process.stdout:
        line = raw.decode(errors="replace")
        if line.startswith(READY):
          self.address = line.removeprefix(READY).strip()
          return
        printed += line
    finally:
      watchdog.cancel()
      if not self.address:
        self.stop()
        self.process.stdout.close()
    printed = printed.strip()
    if late.is_set():
      raise TimeoutError(
        f"The coordinator was not ready in {_START_SECONDS:g} s. {printed}"
      )
    code = self.process.wait()
    printed = printed or f"The coordinator ended with {code}."
    raise (PortTaken if code == TAKEN else RuntimeError)(printed)

  def stop(self) -> None:
    """Stops it; its members are notified. In a forked child it does nothing."""
    if os.getpid() == self._started_by:
      self.process.terminate()
      self.kill(_STOP_SECONDS)

  def kill(self, timeout: float = 0.0) -> None:
    """Ends it at once, as if it had died.

    Args:
      timeout: seconds in which it may end by itself.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.process.wait(timeout)
    self.process.kill()
    self.process.wait()
    if self.process.stdin is not None:
      with contextlib.suppress(OSError):
        self.process.stdin.close()

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
  store: str | None = None,
  env: Mapping[str, str] | None = None,
  **settings: Any,
) -> CoordinatorProcess:
  """Starts a coordinator, and waits until it is ready.

  Unless it has `idle` seconds, it exits when this process ends, however that
  happens. What it prints is logged.

  Args:
    secret: the job's secret; without one it listens on loopback only.
    store: a URL of etcd: it is ready at once, and coordinates as soon as it has
      the lease there.
    env: variables to add to this process's own.
    **settings: fields of `Settings`.

  Raises:
    PortTaken, RuntimeError, TimeoutError: see
      `CoordinatorProcess.wait_until_ready`.
  """
  lifeline = settings.get("idle") is None
  made = CoordinatorProcess(
    Settings(**settings, lifeline=lifeline), secret, store, env
  )
  made.wait_until_ready()
  threading.Thread(
    target=_pass_on,
    args=(made.process,),
    name="optax-dist-coordinator-output",
    daemon=True,
  ).start()
  return made


def _pass_on(process: subprocess.Popen[bytes]) -> None:
  """Logs what it says until it ends, and takes its exit status."""
  assert process.stdout is not None
  with process.stdout as lines:
    for line in lines:
      _log.warning("Coordinator: %s", line.decode(errors="replace").rstrip())
  process.wait()


def default_log(port: int) -> pathlib.Path:
  """The log of a coordinator that was not told another one.

  Any process of this user and host that starts it again finds the same.
  """
  folder = pathlib.Path(tempfile.gettempdir(), f"optax-dist-{os.getuid()}")
  return folder / f"coordinator-{port}.log"
