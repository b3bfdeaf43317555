"""Metrics as scalars in a TensorBoard event file.

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

NEEDS = "tensorboardX"


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
