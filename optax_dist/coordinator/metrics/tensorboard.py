"""Metrics as scalars in a TensorBoard event file.

It uses tensorboardX, which is maintained and only needs protobuf and NumPy.
TensorBoard's own package brings its web server and gRPC; flax and clu use
TensorFlow.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Any

from optax_dist.coordinator import journal_tail
from optax_dist.coordinator.metrics import table
from optax_dist.coordinator.metrics.run_numbers import RunNumbers

_log = logging.getLogger("optax_dist.coordinator")

_PERIOD = 1.0  # Seconds between points.


class Scalars:
  """Writes metrics at the steps that a run has reached.

  Counters are written as they are; for a histogram, the mean of the values
  added since the last point. A label's value is part of the tag:
  ``optax_dist/gradients_dropped/stale``.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    """Creates the folder and a new event file in it.

    Raises:
      OSError: it can't be written.
      ModuleNotFoundError: tensorboardX is not installed.
    """
    # Not its SummaryWriter: that hands points to a thread, and once a full disk
    # has ended the thread, waits for it indefinitely.
    from tensorboardX import RecordWriter, summary
    from tensorboardX.proto import event_pb2

    self._event, self._scalar = event_pb2.Event, summary.scalar
    os.makedirs(folder, exist_ok=True)
    # Two processes that start within a second would write the same file.
    name = f"{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
    self._writer = RecordWriter(
      os.path.join(folder, f"events.out.tfevents.{name}")
    )
    self._write(file_version="brain.Event:2")
    self._before: dict[str, tuple[int, float]] = {}

  def write(self, values: table.Values, step: int) -> None:
    """Writes a point of each value, to disk.

    Args:
      values: the current values.
      step: their position on the axis.

    Raises:
      OSError: they can't be written. Nothing should be written after that: a
        reader stops at the point that is cut off.
    """
    for row, found in table.rows(values):
      for labels, value in found.items():
        tag = "/".join((table.PREFIX.rstrip("_"), row.name, *labels))
        if isinstance(value, table.Distribution):
          now = value.count, value.total
          count, total = self._before.get(tag, (0, 0.0))
          if now[0] < count:
            count, total = 0, 0.0  # The run has restarted.
          self._before[tag] = now
          if now[0] == count:
            continue
          value = (now[1] - total) / (now[0] - count)
        self._write(step=step, summary=self._scalar(tag, value))
    self._writer.flush()

  def _write(self, **fields: Any) -> None:
    event = self._event(wall_time=time.time(), **fields)
    self._writer.write(event.SerializeToString())

  def close(self) -> None:
    """Closes the file.

    Raises:
      OSError: points of an earlier error can't be written.
    """
    self._writer.close()


class Points:
  """Follows a journal, and writes the metrics of its run to an event file.

  Call `update` often: it writes a point per second in which there was a step.
  """

  def __init__(
    self, journal: str | os.PathLike[str], folder: str | os.PathLike[str]
  ):
    """Creates the event file.

    Args:
      journal: the journal, which need not exist yet.
      folder: folder for the event file.

    Raises:
      OSError: it can't be written.
      ModuleNotFoundError: tensorboardX is not installed.
    """
    self._tail, self._numbers = journal_tail.Tail(journal), RunNumbers()
    self._scalars: Scalars | None = Scalars(folder)
    self._next, self._written = 0.0, 0

  def update(self, force: bool = False) -> None:
    """Writes a point if it is time for one, and there were steps since."""
    now = time.monotonic()
    if self._scalars is None or (now < self._next and not force):
      return
    self._next = now + _PERIOD
    try:
      self._numbers.update(self._tail.read())
      if self._numbers.step != self._written:
        self._written = self._numbers.step
        self._scalars.write(self._numbers.metrics(), self._written)
    except Exception as error:  # Metrics must never end a job.
      self._stop(error)

  def close(self) -> None:
    """Writes the last point, and closes the file."""
    self.update(force=True)
    self._stop()

  def _stop(self, error: Exception | None = None) -> None:
    """Closes the file, and warns if points are missing in it."""
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
