"""Metrics for OpenTelemetry, if the program has set it up.

There is no option: if the program, or ``opentelemetry-instrument``, has set a
`MeterProvider` of opentelemetry-sdk, its readers get the same metrics as
Prometheus. A histogram becomes two counters, of values and of their sum.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from optax_dist.coordinator.metrics import metric
from optax_dist.coordinator.metrics.metric import Metric

Collect = Callable[[], Sequence[Metric]]

_lock = threading.Lock()
# OpenTelemetry can't remove an instrument, so there is one per name, and its
# source changes.
_meters: weakref.WeakKeyDictionary[Any, _Meter] = weakref.WeakKeyDictionary()


def provider() -> Any:
  """The meter provider that the program has set; None if there is none.

  If the program has not imported OpenTelemetry, it is not imported here.
  """
  api = sys.modules.get("opentelemetry.metrics")
  sdk = sys.modules.get("opentelemetry.sdk.metrics")
  if api is None or sdk is None:
    return None
  found = api.get_meter_provider()
  return found if isinstance(found, sdk.MeterProvider) else None


class Observed:
  """Exposes metrics to a provider's readers until it is closed."""

  def __init__(self, collect: Collect, to: Any):
    """Starts.

    Args:
      collect: returns the current metrics; called in threads of the readers.
      to: the provider.
    """
    with _lock:
      if to not in _meters:
        _meters[to] = _Meter(to)
      self._meter = _meters[to]
    self._collect = collect
    self._meter.sources.append(collect)

  def know(self, metrics: Sequence[Metric]) -> None:
    """Registers metrics: a metric is only visible once it is known."""
    with _lock:
      self._meter.know(metrics)

  def close(self) -> None:
    """Removes the metrics."""
    self._meter.sources.remove(self._collect)


class _Meter:
  """The instruments of one provider."""

  def __init__(self, to: Any):
    self._meter = to.get_meter("optax_dist")
    self._known: set[str] = set()
    self.sources: list[Collect] = []

  def know(self, metrics: Sequence[Metric]) -> None:
    for one in _scalars(metrics):
      if one.name not in self._known:
        self._known.add(one.name)
        self._make(one)

  def _make(self, of: Metric) -> None:
    from opentelemetry.metrics import CallbackOptions, Observation

    def observe(_: CallbackOptions) -> Iterator[Observation]:
      for collect in list(self.sources):
        for one in _scalars(collect()):
          if one.name == of.name:
            for value, labels in one.samples:
              yield Observation(value, dict(labels))  # type: ignore[arg-type]

    make = (
      self._meter.create_observable_counter
      if of.kind == "counter"
      else self._meter.create_observable_gauge
    )
    unit = {"seconds": "s", "bytes": "By", "": "1"}[of.unit]
    make(f"{metric.PREFIX}{of.name}", [observe], unit, of.what)


def _scalars(metrics: Sequence[Metric]) -> Iterator[Metric]:
  """The metrics, with two counters for each histogram."""
  for one in metrics:
    if one.kind != "histogram":
      yield one
      continue
    count, total = [], []
    for value, labels in one.samples:
      assert isinstance(value, metric.Distribution)
      count.append(metric.Sample(value.count, labels))
      total.append(metric.Sample(value.total, labels))
    yield Metric(f"{one.name}_count", "counter", one.what, tuple(count))
    yield Metric(f"{one.name}_sum", "counter", one.what, tuple(total), one.unit)
