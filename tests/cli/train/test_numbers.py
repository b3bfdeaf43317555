"""The latest line of a metrics file, as metrics."""

import pytest

from optax_dist.cli.train import numbers
from optax_dist.coordinator.metrics import prometheus


def _values(taken):
  return {
    one.name: {
      sample.labels.get("replica"): sample.value for sample in one.samples
    }
    for one in taken.metrics()
  }


def test_before_the_first_line_there_are_none():
  assert numbers.TrainingNumbers().metrics() == []


def test_what_a_line_lacks_keeps_its_value():
  taken = numbers.TrainingNumbers()
  taken.take({"step": 1, "loss": 2.0, "test_accuracy": 0.5})
  taken.take({"step": 2, "loss": 1.0})
  assert _values(taken) == {
    "training_step": {None: 2},
    "training_loss": {None: 1.0},
    "training_test_accuracy": {None: 0.5},
  }


def test_a_list_has_a_value_for_each_replica():
  taken = numbers.TrainingNumbers()
  taken.take({"replica_test_accuracy": [0.25, 0.5, 0.75]})
  taken.take({"replica_test_accuracy": [0.5, 0.25]})
  # The whole list is replaced: a replica that is gone has no old value.
  assert _values(taken) == {
    "training_replica_test_accuracy": {"0": 0.5, "1": 0.25}
  }


def test_metrics_that_were_read_stay_as_they_were():
  """An exporter's thread may read them while the training takes the next."""
  taken, record = numbers.TrainingNumbers(), {"step": 1}
  taken.take(record)
  before = taken._latest
  taken.take({"step": 2, "loss": 1.0})
  assert before == {"step": 1}
  assert record == {"step": 1}


@pytest.mark.parametrize("value", [0.5, [0.5, 0.25]])
def test_an_exporter_can_write_them(value):
  taken = numbers.TrainingNumbers()
  taken.take({"test_accuracy": value})
  (one,) = taken.metrics()
  assert one.what == "Test accuracy of the latest step that has it."
  (family,) = prometheus.families([one])
  found = {s.labels.get("replica"): s.value for s in family.samples}
  assert family.name == "optax_dist_training_test_accuracy"
  assert found == _values(taken)["training_test_accuracy"]
