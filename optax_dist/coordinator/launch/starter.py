"""Starts the coordinator from a replica on its host, where no launcher does."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator

from optax_dist.coordinator import errors
from optax_dist.coordinator.launch import environment
from optax_dist.coordinator.server import places, process
from optax_dist.coordinator.transport import addresses, tls

_log = logging.getLogger("optax_dist.coordinator")
# Seconds after which such a coordinator exits without members.
_IDLE = 60.0


def where_to_start(
  address: str,
  which: environment.ProcessEnvironment,
  wanted: bool | None,
  timeout: float,
) -> addresses.Endpoint | None:
  """Where this process starts the coordinator; None if it does not.

  Args:
    address: address of the coordinator.
    which: this process.
    wanted: `join`'s start_coordinator.
    timeout: `join`'s; a name that is not known yet is waited for no longer.

  Raises:
    ValueError: it can't start one for this address.
  """
  if places.in_etcd(address) is not None:
    if wanted:
      raise ValueError(
        "start_coordinator=True is for a coordinator at host:port. Those in etcd are"
        " started by optax-dist launch, or by optax-dist coordinator."
      )
    return None
  where = addresses.endpoint(address)
  addresses.wait_for(where.host, timeout)
  if wanted is None:
    wanted = which.channel is None and addresses.is_own(where.host)
  return where if wanted else None


@contextlib.contextmanager
def running(
  where: addresses.Endpoint | None,
  secret: bytes,
  certificates: tls.Certificates | None,
) -> Iterator[Callable[[], None] | None]:
  """Starts the coordinator, unless something listens there.

  Stops it again if what follows fails.

  Args:
    where: where it listens; None: it is not started here.
    secret: secret of the job.
    certificates: encrypt its traffic; None for no encryption.

  Yields:
    What starts it again, without waiting; None if it is not started here.

  Raises:
    CoordinatorError: it can't be started.
  """
  if where is None:
    yield None
    return
  start = functools.partial(_start, where, secret, certificates)
  started = start()
  try:
    yield _Again(where.port, start, started is not None).start_later
  except BaseException:
    if started is not None:
      started.stop()
    raise


def _start(
  where: addresses.Endpoint,
  secret: bytes,
  certificates: tls.Certificates | None,
) -> process.CoordinatorProcess | None:
  """Starts it, and waits until it is ready; None if another process was faster."""
  try:
    return process.start(
      secret,
      bind=where.host,
      port=where.port,
      certificates=certificates,
      idle=_IDLE,
    )
  except process.PortTaken:
    return None
  except (RuntimeError, TimeoutError) as error:
    raise errors.CoordinatorError(
      f"The coordinator at {where} can't be started: {error}"
    ) from None


class _Again:
  """Starts the coordinator again, in a thread, of which there is one at a time.

  A coordinator that no replica has started has a log of its own. It is started again
  with that log by something else, such as systemd.
  """

  def __init__(self, port: int, start: Callable[[], object], is_ours: bool):
    self._start, self._starts = start, threading.Lock()
    self._is_ours, self._log = is_ours, process.default_log(port)
    # The last logged reason why it could not be started again.
    self._last_error = ""

  def start_later(self) -> None:
    ours = self._is_ours or self._log.exists()
    if ours and self._starts.acquire(blocking=False):
      threading.Thread(
        target=self._start_once, name="optax-dist-starter", daemon=True
      ).start()

  def _start_once(self) -> None:
    try:
      self._start()
    except errors.CoordinatorError as error:
      if str(error) != self._last_error:
        self._last_error = str(error)
        _log.warning("%s", error)
    finally:
      self._starts.release()
