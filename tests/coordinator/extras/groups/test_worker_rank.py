"""The other processes of a replica: they find process 0, and do as it says."""

from optax_dist.coordinator.extras.groups.worker_rank import WorkerRank
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins


def test_worker_obeys_only_rank_zero():
  (log,) = WorkerRank("a0").step(ins.Received("b0", fx.Suspended()), 1.0)
  assert isinstance(log, fx.Log)
