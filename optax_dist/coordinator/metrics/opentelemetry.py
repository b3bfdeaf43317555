"""Metrics for OpenTelemetry, where a program has set it up.

Nothing is to be asked for: where the program, or ``opentelemetry-instrument``,
has set a `MeterProvider` of opentelemetry-sdk, its readers see the same metrics as
Prometheus does. A histogram is two counters there, of values and of their sum.
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
# OpenTelemetry can't forget an instrument, so there is one for each name, and
# what it observes changes.
_meters: weakref.WeakKeyDictionary[Any, _Meter] = weakref.WeakKeyDictionary()


def provider() -> Any:
  """The provider of meters that the program has set; None if there is none.

  What the program has not imported is not imported here either.
  """
  api = sys.modules.get("opentelemetry.metrics")
  sdk = sys.modules.get("opentelemetry.sdk.metrics")
  if api is None or sdk is None:
    return None
  found = api.get_meter_provider()
  return found if isinstance(found, sdk.MeterProvider) else None


class Observed:
  """Has a provider's readers see metrics until it is closed."""

  def __init__(self, collect: Collect, to: Any):
    """Begins.

    Args:
      collect: the metrics as of now; called in threads of the readers.
      to: the provider.
    """
    with _lock:
      if to not in _meters:
        _meters[to] = _Meter(to)
      self._meter = _meters[to]
    self._collect = collect
    self._meter.sources.append(collect)

  def know(self, metrics: Sequence[Metric]) -> None:
    """Tells which metrics there are: each must be known to be seen."""
    with _lock:
      self._meter.know(metrics)

  def close(self) -> None:
    """They are seen no more."""
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
  """The same, with two counters for each histogram."""
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
