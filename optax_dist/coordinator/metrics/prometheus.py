"""Metrics as Prometheus' text, at a port of this host."""

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
  """Serves what `collect` returns, each time somebody asks, until it is closed.

  Attributes:
    url: where.
  """

  def __init__(
    self, collect: Callable[[], Sequence[Metric]], bind: str, port: int
  ):
    """Listens.

    Args:
      collect: the metrics as of now; called in threads of the server.
      bind: address to listen at.
      port: 0 for any that is free.

    Raises:
      OSError: the address can't be listened at.
      ModuleNotFoundError: prometheus-client is not installed.
    """
    import prometheus_client
    from prometheus_client import registry

    class _Collector(registry.Collector):
      def collect(self) -> Iterable[prometheus_client.Metric]:
        return families(collect())

      def describe(self) -> Iterable[prometheus_client.Metric]:
        return ()  # Those of a replica come and go.

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
    """In a forked child: the port is the parent's alone."""
    self._server.socket.close()


_living: weakref.WeakSet[Server] = weakref.WeakSet()


def _after_fork() -> None:
  for server in list(_living):
    server.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


def families(
  metrics: Iterable[Metric],
) -> Iterator[prometheus_client.Metric]:
  """The same in the classes of the library."""
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
  """Upper bounds, and how many values are at most as large."""
  bounds = [*(f"{bound:g}" for bound in found.bounds), "+Inf"]
  so_far, buckets = 0, []
  for bound, count in zip(bounds, found.counts, strict=True):
    so_far += count
    buckets.append((bound, float(so_far)))
  return buckets
