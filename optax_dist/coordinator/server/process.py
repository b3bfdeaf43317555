"""A coordinator's process, and `start`, which starts one."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import msgspec

from optax_dist.coordinator.transport import addresses, tls

_log = logging.getLogger("optax_dist.coordinator")

SECRET_VARIABLE = "OPTAX_DIST_SECRET"
STORE_VARIABLE = "OPTAX_DIST_STORE"
# The number of the file on which it tells its launcher that it is alive.
CHANNEL_VARIABLE = "OPTAX_DIST_CHANNEL"
# Printed before its address.
READY = "ready "
# Seconds until it is ready, and until it has ended.
START_SECONDS, _STOP_SECONDS = 60.0, 5.0

#: The exit code of one that finds another process at its port.
TAKEN = 98


class PortTaken(RuntimeError):
  """Another process has the port: most likely it is the coordinator."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
  """A coordinator's settings, from its command line.

  Attributes:
    bind: the host or address to listen on; None for loopback, or with a log in
      etcd for what its servers reach.
    port: the port; 0 for any free one.
    advertise: the host that others connect to, if it isn't `bind`.
    log: its log, which it continues if there is one; None for a file in the
      folder of temporary files that belongs to the port.
    journal: the file that it writes events to; None for that of its members.
    certificates: encrypt all traffic that leaves this host.
    idle: seconds without a member after which it exits by itself.
    parent: the process with which it ends, if that has started it; None for none.
  """

  bind: str | None = None
  port: int = 0
  advertise: str | None = None
  log: str | None = None
  journal: str | None = None
  certificates: tls.Certificates | None = None
  idle: float | None = None
  parent: int | None = None

  @classmethod
  def at(cls, address: str, **more: Any) -> Settings:
    """Where one listens that others reach at an address of this host.

    Args:
      address: ``host:port``.
      **more: its other fields.

    Raises:
      ValueError: it is no address.
    """
    way = addresses.endpoint(address)
    # A name or address of this host that isn't an address of its own (a service,
    # a mapped port) leads to one of its addresses.
    bind = way.host
    addresses.wait_for(bind)
    if not addresses.is_own(bind):
      bind = addresses.everywhere(bind).text
      _log.warning(
        "%s is no address of this host, on which the coordinator starts. It listens"
        " at %s, and all must reach it by %s.",
        *(way.host, bind, way.host),
      )
    return cls(bind=bind, port=way.port, advertise=way.host, **more)


class CoordinatorProcess:
  """A process that runs a coordinator; a context manager that stops it.

  Attributes:
    process: the process.
    address: address that its members connect to, or the URL of etcd.
  """

  def __init__(self, process: subprocess.Popen[bytes]):
    """Waits until the coordinator is ready; from then on its output is logged.

    Args:
      process: the process that `start` has started.

    Raises:
      PortTaken, RuntimeError, TimeoutError: see `start`.
    """
    self.process, self.address = process, ""
    # Its output before it is ready; set once it is ready, or has ended.
    self._printed, self._known = "", threading.Event()
    threading.Thread(
      target=self._read, name="optax-dist-coordinator-output", daemon=True
    ).start()
    in_time = self._known.wait(START_SECONDS)
    if not self.address:
      self.kill()
      raise not_ready(process.returncode if in_time else None, self._printed)

  def _read(self) -> None:
    """Reads its output until it ends, and collects its exit status."""
    assert self.process.stdout is not None
    with self.process.stdout as lines:
      for raw in lines:
        line = raw.decode(errors="replace").rstrip()
        if self.address:
          _log.warning("Coordinator: %s", line)
        elif line.startswith(READY):
          for before in self._printed.splitlines():
            _log.warning("Coordinator: %s", before)
          self.address = line.removeprefix(READY)
          self._known.set()
        else:
          self._printed += f"{line}\n"
    self.process.wait()
    self._known.set()

  def stop(self) -> None:
    """Stops it; its members are notified."""
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

  def __enter__(self) -> CoordinatorProcess:
    return self

  def __exit__(self, *error: object) -> None:
    self.stop()


def command(settings: Settings) -> list[str]:
  """The command line that runs a coordinator, in an environment of `variables`."""
  # Paths may be given, too.
  text = msgspec.json.encode(settings, enc_hook=os.fspath).decode()
  return [sys.executable, "-m", __package__, text]


def variables(secret: bytes, store: str | None) -> dict[str, str]:
  """Settings that are passed in the environment, as others can read a command line.

  Args:
    secret: the job's secret.
    store: a URL of etcd; None for a log in a file.
  """
  return {SECRET_VARIABLE: secret.hex(), STORE_VARIABLE: store or ""}


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
    PortTaken: another process listens there.
    RuntimeError: it has exited; the message is its output.
    TimeoutError: it is not ready in time.
  """
  if settings.get("idle") is None:
    settings["parent"] = os.getpid()
  process = subprocess.Popen(
    command(Settings(**settings)),
    env={
      **os.environ,
      **(env or {}),
      **variables(secret, store),
      # The coordinator does not inherit this process's channel to its launcher.
      CHANNEL_VARIABLE: "",
    },
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    start_new_session=True,  # Ctrl-C is handled by the parent.
  )
  return CoordinatorProcess(process)


def not_ready(code: int | None, printed: str) -> Exception:
  """The error of a coordinator that was never ready.

  Args:
    code: its exit code; None if it took too long.
    printed: its output.
  """
  if code is None:
    return TimeoutError(
      f"The coordinator was not ready in {START_SECONDS:g} s. {printed.strip()}"
    )
  text = printed.strip() or f"The coordinator ended with {code}."
  if code != TAKEN:
    return RuntimeError(text)
  return PortTaken(
    f"{text} Most likely another job has this address, or another launcher has"
    " --node-rank 0 of this one."
  )


def default_log(port: int) -> pathlib.Path:
  """The default log of a coordinator.

  Any process of this user and host that starts it again finds the same log.
  """
  # Not `tempfile`, which takes another folder, or none, if that can't be written.
  folder = os.environ.get("TMPDIR") or "/tmp"
  return pathlib.Path(
    folder, f"optax-dist-{os.getuid()}", f"coordinator-{port}.log"
  )
