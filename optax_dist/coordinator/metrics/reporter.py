"""Reports a run's metrics from its journal: over HTTP, and in event files."""

from __future__ import annotations

import importlib.util
import logging
import os
import threading

from optax_dist.coordinator import journal_tail
from optax_dist.coordinator.metrics import (
  http_server,
  prometheus,
  table,
  tensorboard,
)
from optax_dist.coordinator.metrics.run_numbers import RunNumbers

_log = logging.getLogger("optax_dist.coordinator")

EXTRA = "metrics"
# Seconds between points in event files.
_PERIOD = 1.0
# Seconds that the last points may take, before the run ends without them.
_PATIENCE = 30.0


class Reporter:
  """Follows a journal, and reports its numbers; a context manager.

  A thread writes a point of each number to TensorBoard's event files per second
  in which there was a step. The journal is also read when metrics are requested.

  Attributes:
    url: URL of the metrics for Prometheus; "" without a port.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    *,
    port: int | None = None,
    bind: str = "127.0.0.1",
    folder: str | os.PathLike[str] | None = None,
  ):
    """Starts to report.

    Args:
      path: the journal, which need not exist yet.
      port: port for Prometheus; 0 for any free one, None for none.
      bind: the address to listen on.
      folder: folder for TensorBoard's event files; None for none.

    Raises:
      ModuleNotFoundError: a package is not installed; the message names the
        extra.
      OSError: it can't listen on the port, or can't write to the folder.
    """
    if folder is not None and not importlib.util.find_spec(tensorboard.NEEDS):
      raise ModuleNotFoundError(
        f"{tensorboard.NEEDS} is not installed; run: pip install"
        f' "optax-dist[{EXTRA}]"',
        name=tensorboard.NEEDS,
      )
    self._tail = journal_tail.Tail(path)
    self._numbers = RunNumbers()
    self._lock = threading.Lock()
    self._closing = threading.Event()
    self.url = ""
    self._server: http_server.HttpServer | None = None
    self._scalars: tensorboard.Scalars | None = None
    if port is not None:
      self._server = prometheus.serve(self.collect, bind, port)
      self.url = f"{self._server.url}/metrics"
    try:
      if folder is not None:
        self._scalars = tensorboard.Scalars(folder)
    except BaseException:
      self._close_server()
      raise
    self._written = 0
    self._thread = threading.Thread(
      target=self._run, name="optax-dist-metrics", daemon=True
    )
    self._thread.start()

  def collect(self) -> table.Values:
    """The metrics of the run so far; any thread may call it."""
    with self._lock:
      try:
        self._numbers.update(self._tail.read())
      except OSError as error:
        _log.debug("the journal can't be read: %s", error)
      return self._numbers.metrics()

  def _run(self) -> None:
    while not self._closing.wait(_PERIOD):
      self._write()
    self._write()
    self._stop_scalars()

  def _write(self) -> None:
    """Writes a point if there were steps since the last one."""
    if self._scalars is None:
      return
    try:
      found = self.collect()
      step = self._numbers.step
      if step != self._written:
        self._written = step
        self._scalars.write(found, step)
    except OSError as error:
      self._stop_scalars(error)
    except Exception as error:
      # Metrics must never end a job.
      _log.warning("Metrics can't be reported: %s", error)

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

  def _close_server(self) -> None:
    if self._server is not None:
      self._server.close()
      self._server = None

  def close(self) -> None:
    """Writes the last points, and stops.

    It waits no longer than 30 seconds: the end of a job does not depend on
    metrics.
    """
    self._closing.set()
    self._thread.join(_PATIENCE)
    self._close_server()
    if self._thread.is_alive():
      _log.warning(
        "The last metrics could not be reported in %.0f s; they are left out.",
        _PATIENCE,
      )

  def __enter__(self) -> Reporter:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()
