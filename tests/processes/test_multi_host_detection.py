"""Tests of JAX's cluster detection, as documented in docs/multi_host.md."""

import pytest
from jax._src import clusters
from jax._src.clusters import cloud_tpu_cluster, cluster

_MPI = {
  "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
  "OMPI_COMM_WORLD_SIZE": "4",
  "OMPI_COMM_WORLD_RANK": "3",
  "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
_SLURM = {
  "SLURM_JOB_ID": "8193",
  "SLURM_STEP_NODELIST": "node[007-009],other",
  "SLURM_NTASKS": "32",
  "SLURM_PROCID": "11",
  "SLURM_LOCALID": "3",
}
_TPU = {
  "TPU_WORKER_HOSTNAMES": "localhost,b,c,d",
  "TPU_WORKER_ID": "2",
}
_SLICES = _TPU | {
  "MEGASCALE_COORDINATOR_ADDRESS": "localhost:8080",
  "MEGASCALE_NUM_SLICES": "2",
  "MEGASCALE_SLICE_ID": "1",
}


def _detected(monkeypatch, environment):
  for name in {*_MPI, *_SLURM, *_SLICES, "KUBERNETES_SERVICE_HOST"}:
    monkeypatch.delenv(name, raising=False)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  on_tpu = "TPU_WORKER_ID" in environment
  for module in (cluster, cloud_tpu_cluster):
    monkeypatch.setattr(module, "running_in_cloud_tpu_vm", on_tpu)
  # Not asked of the metadata server, which is not here.
  monkeypatch.setattr(
    cloud_tpu_cluster, "get_tpu_env_value_from_metadata", lambda key: None
  )
  return clusters.ClusterEnv.auto_detect_unset_distributed_params(
    None, None, None, None, None, 1
  )


@pytest.mark.parametrize(
  ("environment", "address", "processes", "own", "devices"),
  [
    (_SLURM, "node007:61441", 32, 11, [3]),
    (_MPI, "10.96.0.1", 4, 3, [1]),
    (_TPU, "localhost:8482", 4, 2, None),
    (_SLICES, "localhost:8482", 8, 6, None),
    (_SLURM | {"JAX_COORDINATOR_PORT": "77"}, "node007:77", 32, 11, [3]),
    (_SLURM | _MPI, "10.96.0.1", 4, 3, [1]),
    (_SLURM | _TPU, "node007:61441", 32, 11, None),
    ({}, "None", None, None, None),
  ],
  ids=["slurm", "mpi", "tpu", "slices", "port", "mpi_first", "slurm_2nd", "no"],
)
def test_jax_detects_the_hosts(
  monkeypatch, environment, address, processes, own, devices
):
  result = _detected(monkeypatch, environment)
  assert str(result[0]).startswith(address)
  assert tuple(result[1:]) == (processes, own, devices)
