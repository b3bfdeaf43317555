"""Metrics as scalars in an event file of TensorBoard.

By tensorboardX: it is kept, and needs protobuf and NumPy alone. TensorBoard's own
package brings its web server and gRPC; what flax and clu write with is TensorFlow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from optax_dist.coordinator.metrics import metric
from optax_dist.coordinator.metrics.metric import Metric

NEEDS = "tensorboardX"


class Scalars:
  """Writes metrics at the steps that a run has come to.

  Counters are written as they are; of a histogram the mean of what was added since
  the point before. A label's value is part of the tag:
  ``optax_dist/gradients_dropped/stale``.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    """Makes the folder and a new event file in it.

    Raises:
      OSError: it can't be written.
      ModuleNotFoundError: tensorboardX is not installed.
    """
    from tensorboardX import SummaryWriter

    os.makedirs(folder, exist_ok=True)
    # Two processes that begin within a second would write the same file.
    self._writer = SummaryWriter(
      str(folder), flush_secs=10, filename_suffix=f".{os.getpid()}"
    )
    self._before: dict[str, tuple[int, float]] = {}

  def write(self, metrics: Sequence[Metric], step: int) -> None:
    """Writes a point of each metric.

    Args:
      metrics: as of now.
      step: where they stand on the axis.
    """
    for one in metrics:
      for value, labels in one.samples:
        tag = _tag(one.name, labels)
        if isinstance(value, metric.Distribution):
          now = value.count, value.total
          count, total = self._before.get(tag, (0, 0.0))
          if now[0] < count:
            count, total = 0, 0.0  # The run has begun anew.
          self._before[tag] = now
          if now[0] == count:
            continue
          value = (now[1] - total) / (now[0] - count)
        self._writer.add_scalar(tag, value, step)

  def close(self) -> None:
    """Writes the rest, and closes the file."""
    self._writer.close()


def _tag(name: str, labels: Mapping[str, str]) -> str:
  return "/".join((metric.PREFIX.rstrip("_"), name, *labels.values()))
