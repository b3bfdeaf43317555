"""The process that hosts the board of a job, and does nothing else.

When the process that hosts JAX's coordination service ends, JAX ends every
process that is connected to it. So the service has a process of its own:
`start` starts one, and ``python -m optax_dist.coordinator.service --address
127.0.0.1:29400 --replicas 4`` is one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from types import TracebackType

from optax_dist.coordinator import addresses, connections, jax_runtime

_READY = "ready "


@dataclasses.dataclass(frozen=True)
class Service:
  """A process that hosts a board.

  Attributes:
    address: where replicas reach it, ``host:port``.
    process: the process.
  """

  address: str
  process: subprocess.Popen

  @property
  def pid(self) -> int:
    """The process's id."""
    return self.process.pid

  def stop(self) -> None:
    """Ends the process. Close the replicas' engines first."""
    self.process.terminate()
    try:
      self.process.wait(5.0)
    except subprocess.TimeoutExpired:
      self.process.kill()
      self.process.wait()
    for stream in (self.process.stdin, self.process.stdout):
      if stream:
        stream.close()

  def __enter__(self) -> Service:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    self.stop()


def start(
  address: str,
  max_replicas: int,
  *,
  lifeline: bool = True,
  idle: float | None = None,
  timeout: float = 20.0,
) -> Service:
  """Starts a process that hosts a board, and waits until it is ready.

  Args:
    address: ``host:port`` to listen at. Port 0 takes a free one.
    max_replicas: replicas connect as numbers below this.
    lifeline: whether it ends when this process ends, however it ends.
    idle: seconds without a connected replica after which it ends by itself;
      None for never. Where that can't be told (not Linux) it stays.
    timeout: seconds to wait until it is ready.

  Returns:
    The process; a context manager that stops it.

  Raises:
    ValueError: the address or the number is not valid.
    RuntimeError: the process ended, for instance as the port is taken.
    TimeoutError: it is not ready in time.
  """
  _check(address, max_replicas)
  command = [sys.executable, "-m", __name__, "--address", address]
  command += ["--replicas", str(max_replicas), "--timeout", str(timeout)]
  command += [] if idle is None else ["--idle", str(idle)]
  # The process needs no accelerator, and warns that replicas can recover.
  env = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
  with tempfile.TemporaryFile() as said:
    process = subprocess.Popen(
      [*command, "--lifeline"] if lifeline else command,
      env=env,
      stdin=subprocess.PIPE if lifeline else subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=said,
      start_new_session=True,  # Ctrl-C is for who started it to handle.
    )
    service = Service(address, process)
    watchdog = threading.Timer(timeout, process.kill)
    watchdog.start()
    try:
      assert process.stdout is not None
      line = process.stdout.readline().decode()
    except BaseException:
      service.stop()
      raise
    finally:
      watchdog.cancel()
    if line.startswith(_READY):
      return dataclasses.replace(service, address=line[len(_READY) :].strip())
    # The pipe closes as the process ends; -9 can only be the watchdog.
    late = process.wait() == -signal.SIGKILL
    service.stop()
    said.seek(0)
    words = said.read().decode(errors="replace").strip()
  if late:
    raise TimeoutError(
      f"The coordination service at {address} was not ready within"
      f" {timeout:g} s. {words}"
    )
  raise RuntimeError(words or f"The service ended with {process.returncode}.")


def serve(
  address: str,
  max_replicas: int,
  *,
  idle: float | None = None,
  timeout: float = 20.0,
  ready: Callable[[str], None] = lambda address: None,
  until: threading.Event | None = None,
) -> None:
  """Hosts a board in this process, until told to end.

  Args:
    address: ``host:port`` to listen at. Port 0 takes a free one.
    max_replicas: replicas connect as numbers below this.
    idle: see `start`.
    timeout: seconds that it may take to start.
    ready: called with the address when replicas can connect.
    until: ends the service when it is set.

  Raises:
    ValueError: the address or the number is not valid.
    OSError: the port is taken, or the host is not this one.
  """
  host, port = _check(address, max_replicas)
  port = _free_port(host) if port == 0 else port
  _check_free(host, port)
  address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
  service = jax_runtime.start_service(address, max_replicas, timeout)
  ready(address)
  _wait(until or threading.Event(), port, idle)
  service.shutdown()


def _wait(until: threading.Event, port: int, idle: float | None) -> None:
  """Waits for the event, or until nobody has been connected for long."""
  seen = time.monotonic()
  while not until.wait(None if idle is None else min(1.0, idle / 4)):
    if connections.count(port, except_own=True) != 0:
      seen = time.monotonic()
    elif idle is not None and time.monotonic() - seen > idle:
      return


def _check(address: str, max_replicas: int) -> tuple[str, int]:
  if max_replicas < 1:
    raise ValueError(f"max_replicas must be at least 1; got {max_replicas}.")
  return addresses.split(address)


def _check_free(host: str, port: int) -> None:
  """Raises if somebody listens there already.

  gRPC would not: two services would share the connections, and replicas would
  wait for each other for ever.
  """
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  with socket.socket(family) as s:
    # Connections of an earlier service, which linger, are no obstacle.
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      s.bind((host, port))
    except OSError as error:
      raise OSError(
        error.errno,
        f"The coordination service can't listen at {host}:{port}"
        f" ({error.strerror}). Give it another address.",
      ) from error


def _free_port(host: str) -> int:
  """A free port below those that the system hands out by itself."""
  for port in random.sample(range(20000, 32000), 100):
    with contextlib.suppress(OSError):
      _check_free(host, port)
      return port
  raise OSError(f"No free port was found on {host} from 20000 to 32000.")


def _main(arguments: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog="python -m optax_dist.coordinator.service",
    description="Host the board of a job, until told to end.",
  )
  parser.add_argument("--address", required=True, help="host:port to listen at")
  parser.add_argument("--replicas", required=True, type=int)
  parser.add_argument("--timeout", type=float, default=20.0)
  parser.add_argument(
    "--idle", type=float, help="seconds without a replica after which it ends"
  )
  parser.add_argument(
    "--lifeline", action="store_true", help="end when standard input ends"
  )
  options = parser.parse_args(arguments)
  ended = threading.Event()
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: ended.set())
  if options.lifeline:
    threading.Thread(target=_end_with_stdin, daemon=True).start()
  try:
    serve(
      options.address,
      options.replicas,
      idle=options.idle,
      timeout=options.timeout,
      ready=lambda address: print(f"{_READY}{address}", flush=True),
      until=ended,
    )
  except (OSError, RuntimeError, ValueError) as error:
    print(error, file=sys.stderr)
    return 1
  return 0


def _end_with_stdin() -> None:
  # At once: who started the service is gone, and so is the job.
  while os.read(sys.stdin.fileno(), 4096):
    pass
  os._exit(0)


if __name__ == "__main__":
  sys.exit(_main())
