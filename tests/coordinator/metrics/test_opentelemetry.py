"""Tests of a run's metrics in a program's own OpenTelemetry."""

import subprocess
import sys
import threading

import numpy as np
import optax
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from optax_dist import coordinator
from optax_dist.coordinator.metrics import opentelemetry

ZEROS = np.zeros(3, np.float32)


@pytest.fixture
def reader(monkeypatch):
  """What a program's provider reads; for this test alone."""
  found = InMemoryMetricReader()
  provider = MeterProvider(metric_readers=[found], shutdown_on_exit=False)
  api = sys.modules["opentelemetry.metrics"]
  monkeypatch.setattr(api, "get_meter_provider", lambda: provider)
  yield found
  provider.shutdown()


def read(reader):
  """Returns values and units, by name and attributes."""
  data = reader.get_metrics_data()
  return (
    {}
    if data is None
    else {
      (one.name, *point.attributes.values()): (point.value, one.unit)
      for resource in data.resource_metrics
      for scope in resource.scope_metrics
      for one in scope.metrics
      for point in one.data.data_points
    }
  )


def test_a_provider_that_is_set_sees_a_run(reader):
  seen = []
  # The leader has counted a step by the time that it goes on itself.
  both = threading.Barrier(2, timeout=60.0)

  def train(replica):
    for _ in range(4):
      replica.step(ZEROS)
    both.wait()
    if not replica.replica:
      seen.append(read(reader))
    both.wait()

  for _ in range(2):
    # Twice: an instrument can be made once only, and must go on being seen.
    coordinator.run_embedded(train, 2, optax.sgd(0.1), ZEROS)
    found = seen.pop()
    assert found["optax_dist_steps",] == (4, "1")
    assert found["optax_dist_step_seconds_count",] == (3, "1")
    assert found["optax_dist_step_seconds_sum",][0] > 0
    assert found["optax_dist_step_seconds_sum",][1] == "s"
    assert found["optax_dist_replica_gradients", "0", "applied"] == (4, "1")
    assert found["optax_dist_replica_moved_bytes", "0", "in"][1] == "By"
    assert 0 < found["optax_dist_goodput_ratio",][0] < 1
  # What was is over.
  assert not read(reader)


def test_without_a_provider_nothing_is_imported():
  code = (
    "import sys, numpy, optax; from optax_dist import coordinator\n"
    "zeros = numpy.zeros(3, numpy.float32)\n"
    "step = lambda replica: replica.step(zeros).global_step\n"
    "assert coordinator.run_embedded(step, 1, optax.sgd(0.1), zeros) == [1]\n"
    "for name in ('opentelemetry', 'prometheus_client', 'tensorboardX'):\n"
    "  assert name not in sys.modules, name\n"
  )
  subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_programs_default_is_no_provider():
  """The API alone, whose instruments do nothing, isn't worth counting for."""
  assert opentelemetry.provider() is None
