import pytest
from jax._src import clusters

from optax_dist.coordinator.launch import cluster

_SLURM = {
  "SLURM_JOB_ID": "4111",
  "SLURM_STEP_NODELIST": "node[03-05]",
  "SLURM_NTASKS": "6",
  "SLURM_PROCID": "4",
  "SLURM_LOCALID": "0",
  "SLURM_STEP_NUM_NODES": "3",
}
_OWN = {
  "OPTAX_DIST_COORDINATOR_ADDRESS": "10.0.0.1:29400",
  "OPTAX_DIST_NUM_REPLICAS": "4",
  "OPTAX_DIST_REPLICA": "0",
}


@pytest.fixture(autouse=True)
def _without_job_variables(monkeypatch):
  for name in (*_SLURM, *_OWN, "JAX_COORDINATOR_PORT"):
    monkeypatch.delenv(name, raising=False)


def _set(monkeypatch, variables):
  for name, value in variables.items():
    monkeypatch.setenv(name, value)


def test_arguments_take_precedence_over_variables(monkeypatch):
  assert cluster.detect("h:1", 2, 1) == ("h:1", 2, 1)
  _set(monkeypatch, _OWN)
  assert cluster.detect() == ("10.0.0.1:29400", 4, 0)
  assert cluster.detect(replica=3) == ("10.0.0.1:29400", 4, 3)
  assert cluster.detect("h:1", 5) == ("h:1", 5, 0)


def test_scheduler_provides_missing_arguments(monkeypatch):
  _set(monkeypatch, _SLURM)
  address, count, index = cluster.detect()
  host, port = address.split(":")
  assert (host, count, index) == ("node03", 6, 4)
  # JAX's own service has the port above.
  monkeypatch.setenv("JAX_COORDINATOR_PORT", str(int(port) + 1))
  assert cluster.detect() == (address, count, index)
  # A replica that spans several processes.
  assert cluster.detect(num_replicas=2, replica=1) == (address, 2, 1)
  _set(monkeypatch, _OWN)
  assert cluster.detect() == ("10.0.0.1:29400", 4, 0)


@pytest.mark.parametrize("address", ["fd00::1:7000", "[fd00::1]:7000"])
def test_scheduler_may_provide_ipv6_addresses(monkeypatch, address):
  monkeypatch.setattr(
    clusters.ClusterEnv,
    "auto_detect_unset_distributed_params",
    lambda *unset: (address, 2, 1, None),
  )
  assert cluster.detect() == ("[fd00::1]:6999", 2, 1)


def test_missing_variables_are_named(monkeypatch):
  with pytest.raises(ValueError, match="run_embedded"):
    cluster.detect()
  with pytest.raises(
    ValueError, match=r"what replica \(OPTAX_DIST_REPLICA\) of the job"
  ):
    cluster.detect("h:1", 2)
  monkeypatch.setenv("OPTAX_DIST_REPLICA", "first")
  with pytest.raises(ValueError, match=r"OPTAX_DIST_REPLICA.*'first'"):
    cluster.detect("h:1", 2)
  monkeypatch.delenv("OPTAX_DIST_REPLICA")
  with pytest.raises(ValueError, match=r"0 to 1.*got replica 2"):
    cluster.detect("h:1", 2, 2)
  with pytest.raises(ValueError, match="host:port"):
    cluster.detect("h", 2, 1)


@pytest.mark.parametrize(
  "odd",
  [
    {"SLURM_PROCID": ""},
    {"SLURM_NTASKS": "six"},
    {"JAX_COORDINATOR_PORT": "any"},
  ],
)
def test_malformed_scheduler_variables_are_named(monkeypatch, odd):
  _set(monkeypatch, _SLURM | odd)
  with pytest.raises(ValueError, match="JAX can't read this scheduler's"):
    cluster.detect()
  # They are not read if all arguments are given.
  assert cluster.detect("h:1", 2, 1) == ("h:1", 2, 1)


def test_a_missing_variable_of_a_scheduler_is_named(monkeypatch):
  monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "12345.0;tcp://10.0.0.1:34911")
  monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
  monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
  with pytest.raises(ValueError, match="OMPI_COMM_WORLD_SIZE"):
    cluster.detect()
