"""Metrics of a training in progress: the last line of its metrics file."""

from __future__ import annotations

from optax_dist.cli.train import strategy
from optax_dist.coordinator.metrics import metric
from optax_dist.coordinator.metrics.metric import Metric


class TrainingNumbers:
  """Keeps the latest value of each metric.

  Example:
    >>> numbers = TrainingNumbers()
    >>> numbers.take({"step": 1, "epoch": 1, "loss": 0.5})
    >>> [(one.name, one.samples[0].value) for one in numbers.metrics()]
    [('training_step', 1), ('training_epoch', 1), ('training_loss', 0.5)]
  """

  def __init__(self) -> None:
    self._latest: strategy.Record = {}

  def take(self, record: strategy.Record) -> None:
    """Takes a line of ``metrics.jsonl``; missing metrics keep their values."""
    self._latest = self._latest | record

  def metrics(self) -> list[Metric]:
    """The current metrics; any thread may call it."""
    return [_metric(name, value) for name, value in self._latest.items()]


def _metric(name: str, value: float | list[float]) -> Metric:
  what = f"{name.replace('_', ' ')} of the latest step that has it."
  what = what[0].upper() + what[1:]
  if isinstance(value, list):
    of = {str(i): one for i, one in enumerate(value)}
    return metric.by_label(f"training_{name}", "gauge", what, "replica", of)
  return metric.one(f"training_{name}", "gauge", what, value)
