"""Reports a run's metrics: over HTTP, and in event files."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable

from optax_dist.coordinator import journal, journal_tail
from optax_dist.coordinator.metrics import (
  http_server,
  prometheus,
  table,
  tensorboard,
)
from optax_dist.coordinator.metrics.run_numbers import RunNumbers

_log = logging.getLogger("optax_dist.coordinator")

EXTRA = "metrics"
# Seconds between points in event files, and at most between counting records.
_PERIOD = 1.0
# Records to count in a row, and the pause in seconds before the next ones: the
# training loop would otherwise wait for Python's lock, 5 ms each time.
_IN_A_ROW, _PAUSE = 8, 0.0005
# Seconds that the last points may take, before the run ends without them.
_PATIENCE = 30.0


def check(port: int | None, folder: object | None) -> None:
  """Raises an error if the requested metrics are not available.

  Args:
    port: port for Prometheus; None for none.
    folder: folder for TensorBoard; None for none.

  Raises:
    ModuleNotFoundError: a package is not installed; the message names the
      extra.
    ValueError: the port is invalid.
  """
  if port is not None and not 0 <= port <= 65535:
    raise ValueError(f"metrics_port must be from 0 to 65535, got {port!r}.")
  if folder is not None and not importlib.util.find_spec(tensorboard.NEEDS):
    raise ModuleNotFoundError(
      f"{tensorboard.NEEDS} is not installed; run: pip install"
      f' "optax-dist[{EXTRA}]"',
      name=tensorboard.NEEDS,
    )


class Reporter:
  """Counts a run's records, and reports them along with other metrics.

  Records are counted in its own thread, or when metrics are requested.

  Attributes:
    url: URL of the metrics for Prometheus; "" without a port.
  """

  def __init__(
    self,
    *,
    port: int | None = None,
    bind: str = "127.0.0.1",
    folder: str | os.PathLike[str] | None = None,
    follow: str | os.PathLike[str] | None = None,
  ):
    """Starts to report.

    Args:
      port: port for Prometheus; 0 for any free one, None for none.
      bind: the address to listen on.
      folder: folder for TensorBoard's event files; None for none.
      follow: a journal whose records are counted as it grows; None if they are
        passed to `take`.

    Raises:
      ValueError, ModuleNotFoundError: see `check`.
      OSError: it can't listen on the port, or can't write to the folder.
    """
    check(port, folder)
    self._tail = None if follow is None else journal_tail.Tail(follow)
    self._lock = threading.Lock()
    self._numbers: RunNumbers | None = None
    self._owner: object = None
    self._pending: collections.deque[journal.Record] = collections.deque()
    self._sources: list[Callable[[], table.Values]] = []
    self._closing = threading.Event()
    self.url = ""
    with contextlib.ExitStack() as stack:
      self._scalars: tensorboard.Scalars | None = None
      if folder is not None:
        self._scalars = tensorboard.Scalars(folder)
        stack.callback(self._stop_scalars)
      if port is not None:
        server = self._serve(bind, port)
        stack.callback(server.close)
        self.url = f"{server.url}/metrics"
      self._stack = stack.pop_all()
    self._written = -1
    self._thread = threading.Thread(
      target=self._run, name="optax-dist-metrics", daemon=True
    )
    self._thread.start()

  def _serve(self, bind: str, port: int) -> http_server.HttpServer:
    try:
      return prometheus.serve(self.collect, bind, port)
    except OSError as error:
      raise OSError(
        error.errno,
        f"metrics_port: can't listen at {bind} port {port}"
        f" ({error.strerror}); another replica on this host may, so give each a"
        " port of its own, or 0 for any",
      ) from error

  # Sources of the metrics.

  def begin(self, owner: object, records: Iterable[journal.Record]) -> None:
    """Starts the owner's reports on the run.

    Args:
      owner: the caller of `take`; a leader.
      records: earlier records, if known.
    """
    with self._lock:
      self._count()
      self._owner = owner
      numbers = self._numbers or RunNumbers()
      for i, record in enumerate(records):
        # It includes what other leaders have counted.
        numbers = RunNumbers() if not i else numbers
        numbers.update(record)
      self._numbers = numbers

  def take(self, record: journal.Record) -> None:
    """Takes the record of an event, to be counted soon."""
    self._pending.append(record)

  def end(self, owner: object) -> None:
    """Ends the owner's reports, unless the run is over."""
    with self._lock:
      self._count()
      over = self._numbers is not None and self._numbers.finished
      if self._owner is owner and not over:
        self._owner = None

  def add(self, source: Callable[[], table.Values]) -> None:
    """Adds a source of metrics; it may be called in any thread."""
    with self._lock:
      self._sources.append(source)

  def collect(self) -> table.Values:
    """The current metrics."""
    found: list[table.Values] = []
    with self._lock:
      self._read()
      self._count()
      if self._numbers is not None and (
        self._owner is not None or self._tail is not None
      ):
        found.append(self._numbers.metrics())
      sources = list(self._sources)
    found += [source() for source in sources]
    merged: dict[str, dict[tuple[str, ...], float | table.Distribution]] = {}
    for values in found:  # Several replicas report the same numbers.
      for name, more in values.items():
        merged.setdefault(name, {}).update(more)
    return merged

  def _read(self) -> None:
    """Reads new records from the journal that it follows."""
    if self._tail is None:
      return
    self._numbers = self._numbers or RunNumbers()
    try:
      self._pending.extend(self._tail.read())
    except OSError as error:
      _log.debug("the journal can't be read: %s", error)

  def _count(self, most: float = math.inf) -> None:
    """Counts pending records, up to a number."""
    while self._pending and most > 0:
      most -= 1
      record = self._pending.popleft()
      if self._numbers is not None:
        self._numbers.update(record)

  # In its own thread.

  def _run(self) -> None:
    while not self._closing.wait(_PERIOD):
      self._tick()
    self._tick()
    try:
      self._stack.close()
    except Exception as error:
      _log.warning("Metrics can't be closed: %s", error)

  def _tick(self) -> None:
    try:
      self._count_in_turns()
      if self._scalars is None:
        return
      found = self.collect()
      step = _step(found)
      if step != self._written:
        self._written = step
        try:
          self._scalars.write(found, step)
        except OSError as error:
          self._stop_scalars(error)
    except Exception as error:
      # Metrics must never end a training run.
      _log.warning("Metrics can't be reported: %s", error)

  def _count_in_turns(self) -> None:
    """Counts pending records, and lets other threads run in between."""
    with self._lock:
      self._read()
    while self._pending:
      with self._lock:
        self._count(_IN_A_ROW)
      if self._pending and not self._closing.is_set():
        time.sleep(_PAUSE)

  def _stop_scalars(self, error: OSError | None = None) -> None:
    """Closes the event file, and warns if points are missing in it."""
    scalars, self._scalars = self._scalars, None
    if scalars is None:
      return
    try:
      scalars.close()
    except OSError as last:
      error = error or last
    if error is not None:
      _log.warning(
        "TensorBoard's scalars can't be written: %s. The run goes on without"
        " them.",
        error,
      )

  def close(self) -> None:
    """Writes the last points, and stops.

    It never raises an error, and waits no longer than 30 seconds: the end of
    training does not depend on metrics.
    """
    if self._closing.is_set():
      return
    self._closing.set()
    self._thread.join(_PATIENCE)
    if self._thread.is_alive():
      _log.warning(
        "The last metrics could not be reported in %.0f s; they are left out.",
        _PATIENCE,
      )


def _step(values: table.Values) -> int:
  """The run's step, or that of the replica that is furthest ahead."""
  steps = [
    int(value)
    for name in ("step", "replica_step")
    for value in values.get(name, {}).values()
    if not isinstance(value, table.Distribution)
  ]
  return max(steps, default=0)
