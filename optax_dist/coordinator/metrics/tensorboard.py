"""Metrics as scalars in a TensorBoard event file.

It uses tensorboardX, which is maintained and only needs protobuf and NumPy.
TensorBoard's own package brings its web server and gRPC; flax and clu use
TensorFlow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from optax_dist.coordinator.metrics import metric
from optax_dist.coordinator.metrics.metric import Metric

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
    from tensorboardX import SummaryWriter

    os.makedirs(folder, exist_ok=True)
    # Two processes that start within a second would write the same file.
    self._writer = SummaryWriter(
      str(folder), flush_secs=10, filename_suffix=f".{os.getpid()}"
    )
    self._before: dict[str, tuple[int, float]] = {}

  def write(self, metrics: Sequence[Metric], step: int) -> None:
    """Writes a point of each metric.

    Args:
      metrics: the current metrics.
      step: their position on the axis.
    """
    for one in metrics:
      for value, labels in one.samples:
        tag = _tag(one.name, labels)
        if isinstance(value, metric.Distribution):
          now = value.count, value.total
          count, total = self._before.get(tag, (0, 0.0))
          if now[0] < count:
            count, total = 0, 0.0  # The run has restarted.
          self._before[tag] = now
          if now[0] == count:
            continue
          value = (now[1] - total) / (now[0] - count)
        self._writer.add_scalar(tag, value, step)

  def close(self) -> None:
    """Writes pending points, and closes the file."""
    self._writer.close()


def _tag(name: str, labels: Mapping[str, str]) -> str:
  return "/".join((metric.PREFIX.rstrip("_"), name, *labels.values()))
