"""Metrics in Prometheus' text format, on a port of this host."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from optax_dist.coordinator.metrics import metric
from optax_dist.coordinator.metrics.metric import Metric

if TYPE_CHECKING:
  import prometheus_client

NEEDS = "prometheus_client"


class Server:
  """Serves what `collect` returns, on each request, until it is closed.

  Attributes:
    url: the address of the metrics.
  """

  def __init__(
    self, collect: Callable[[], Sequence[Metric]], bind: str, port: int
  ):
    """Starts to listen.

    Args:
      collect: returns the current metrics; called in threads of the server.
      bind: address to listen on.
      port: the port; 0 for any free one.

    Raises:
      OSError: it can't listen on the address.
      ModuleNotFoundError: prometheus-client is not installed.
    """
    import prometheus_client
    from prometheus_client import registry

    class _Collector(registry.Collector):
      def collect(self) -> Iterable[prometheus_client.Metric]:
        return families(collect())

      def describe(self) -> Iterable[prometheus_client.Metric]:
        return ()  # A replica's metrics change over time.

    found = prometheus_client.CollectorRegistry(auto_describe=False)
    found.register(_Collector())
    self._server, self._thread = prometheus_client.start_http_server(
      port, bind, found
    )
    _living.add(self)
    shown = f"[{bind}]" if ":" in bind else bind
    self.url = f"http://{shown}:{self._server.server_port}/metrics"

  def close(self) -> None:
    """Stops listening."""
    _living.discard(self)
    self._server.shutdown()
    self._server.server_close()
    self._thread.join()

  def leave_to_parent(self) -> None:
    """In a forked child: the port belongs to the parent."""
    self._server.socket.close()


_living: weakref.WeakSet[Server] = weakref.WeakSet()


def _after_fork() -> None:
  for server in list(_living):
    server.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


def families(
  metrics: Iterable[Metric],
) -> Iterator[prometheus_client.Metric]:
  """Converts metrics to the classes of prometheus-client."""
  from prometheus_client import core

  kinds: dict[str, Any] = {
    "counter": core.CounterMetricFamily,
    "gauge": core.GaugeMetricFamily,
    "histogram": core.HistogramMetricFamily,
  }
  for one in metrics:
    labels = list(one.samples[0].labels) if one.samples else []
    found = kinds[one.kind](
      metric.PREFIX + one.name, one.what, labels=labels, unit=one.unit
    )
    for value, values in one.samples:
      if isinstance(value, metric.Distribution):
        found.add_metric(
          list(values.values()), _buckets(value), sum_value=value.total
        )
      else:
        found.add_metric(list(values.values()), value)
    yield found


def _buckets(found: metric.Distribution) -> list[tuple[str, float]]:
  """Upper bounds, and how many values are at most that large."""
  bounds = [*(f"{bound:g}" for bound in found.bounds), "+Inf"]
  so_far, buckets = 0, []
  for bound, count in zip(bounds, found.counts, strict=True):
    so_far += count
    buckets.append((bound, float(so_far)))
  return buckets
