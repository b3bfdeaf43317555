"""A run's metrics as scalars in a TensorBoard event file.

It uses tensorboardX, which is maintained and only needs protobuf and NumPy.
TensorBoard's own package brings its web server and gRPC; flax and clu use
TensorFlow.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from optax_dist.coordinator.metrics import table
from optax_dist.coordinator.metrics.run_numbers import RunNumbers

_PERIOD = 1.0  # Seconds between points.


class Points:
  """Writes the metrics of a run to an event file, while it goes on.

  Call `update` often: it writes a point per second in which there was a step.
  Counters are written as they are; for a histogram, the mean of the values added
  since the last point. A label's text is part of the tag:
  ``optax_dist/gradients_dropped/stale``.
  """

  def __init__(self, numbers: RunNumbers, folder: str | os.PathLike[str]):
    """Creates the folder and a new event file in it.

    Args:
      numbers: those of the run, which somebody else keeps up to date.
      folder: folder for the event file.

    Raises:
      OSError: it can't be written.
      ModuleNotFoundError: tensorboardX is not installed.
    """
    # Not its SummaryWriter: that hands points to a thread, and once a full disk
    # has ended the thread, waits for it indefinitely.
    from tensorboardX import RecordWriter, summary
    from tensorboardX.proto import event_pb2

    self._event, self._scalar = event_pb2.Event, summary.scalar
    self._numbers = numbers
    os.makedirs(folder, exist_ok=True)
    # Two processes that start within a second would write the same file.
    name = f"{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
    self._writer = RecordWriter(
      os.path.join(folder, f"events.out.tfevents.{name}")
    )
    self._write(file_version="brain.Event:2")
    self._next, self._step = 0.0, 0
    # The count and the total of each histogram at the last point.
    self._before: dict[str, tuple[int, float]] = {}

  def update(self, force: bool = False) -> None:
    """Writes a point if it is time for one, and there were steps since.

    Raises:
      OSError: it can't be written.
    """
    now = time.monotonic()
    if now < self._next and not force:
      return
    self._next = now + _PERIOD
    if self._numbers.step == self._step:
      return
    self._step = self._numbers.step
    for row in self._numbers.metrics():
      for label, value in row.cells():
        name = f"{row.name}/{label}" if label else row.name
        if isinstance(value, table.Distribution):
          count, total = self._before.get(name, (0, 0.0))
          self._before[name] = value.count, value.total
          if value.count < count:
            count, total = 0, 0.0  # The run has restarted.
          if value.count == count:
            continue
          value = (value.total - total) / (value.count - count)
        point = self._scalar(f"optax_dist/{name}", value)
        self._write(step=self._step, summary=point)
    self._writer.flush()

  def _write(self, **fields: Any) -> None:
    event = self._event(wall_time=time.time(), **fields)
    self._writer.write(event.SerializeToString())

  def close(self) -> None:
    """Writes the last point, and closes the file.

    Raises:
      OSError: it can't be written.
    """
    try:
      self.update(force=True)
    finally:
      self._writer.close()
