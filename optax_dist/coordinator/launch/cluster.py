"""Detects the coordinator's address, the number of replicas, and this one's index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optax_dist.coordinator.launch import environment
from optax_dist.coordinator.server import places
from optax_dist.coordinator.transport import addresses

_TIMEOUT = 60  # Seconds that JAX may take to find the address.


def detect(
  coordinator_address: str | None = None,
  num_replicas: int | None = None,
  replica: int | None = None,
) -> tuple[str, int, int]:
  """Finds each part of the job's description in the first source that has it.

  The sources are the arguments, the environment variables
  ``OPTAX_DIST_COORDINATOR_ADDRESS``, ``OPTAX_DIST_NUM_REPLICAS`` and
  ``OPTAX_DIST_REPLICA``, and the cluster that JAX detects (SLURM, GKE, TPU
  pods, Open MPI), where each process is a replica. A replica that spans several
  processes has to use one of the first two.

  Args:
    coordinator_address: ``host:port`` of the coordinator, or a URL of etcd.
    num_replicas: the number of replicas in the job.
    replica: the index of this one, from 0.

  Returns:
    The address, the number of replicas and this replica's index.

  Raises:
    ValueError: no source has one of them, or their values are inconsistent.

  Example:
    >>> detect("10.0.0.1:29400", num_replicas=4, replica=1)
    ('10.0.0.1:29400', 4, 1)
  """
  launched = environment.Environment.read()
  process = environment.ProcessEnvironment.read()
  address, count, index = complete(
    {
      "coordinator_address": coordinator_address
      or launched.coordinator_address,
      "num_replicas": launched.num_replicas
      if num_replicas is None
      else num_replicas,
      "replica": process.replica if replica is None else replica,
    },
    " In one process, use optax_dist.coordinator.run_embedded.",
  )
  if places.in_etcd(address) is None:
    addresses.endpoint(address)
  if not 0 <= index < count:
    raise ValueError(
      f"Replicas are numbered from 0 to {count - 1}, as there are {count}; got"
      f" replica {index}."
    )
  return address, count, index


def complete(
  parts: Mapping[str, Any], otherwise: str = ""
) -> tuple[str, int, int]:
  """Fills in missing parts from the cluster that JAX detects.

  Args:
    parts: an address, a number of processes, and the index of this one, in this
      order, by fields of `Environment`; None for missing ones.
    otherwise: another remedy, for the error.

  Raises:
    ValueError: a part is not known; the error names its variable.
  """
  known = tuple(parts.values())
  if None in known:
    detected = detect_cluster() or (None, None, None)
    known = tuple(
      other if part is None else part
      for part, other in zip(known, detected, strict=True)
    )
  if None in known:
    missing = ", ".join(
      f"{name} ({environment.variable(name)})"
      for name, part in zip(parts, known, strict=True)
      if part is None
    )
    raise ValueError(
      f"Nothing says what {missing} of the job should be. Give arguments, or set"
      " the variables in brackets, or run in a cluster that JAX knows (SLURM, GKE,"
      f" TPU pods, Open MPI).{otherwise}"
    )
  return known


def detect_cluster() -> tuple[str, int, int] | None:
  """Asks JAX for the scheduler's address, process count and process index.

  The port is one below JAX's own, which stays free for
  `jax.distributed.initialize`.

  Raises:
    ValueError: the scheduler's variables are incomplete, or invalid; or this
      version of JAX detects clusters in another way.
  """
  try:
    from jax._src import clusters

    address, count, index, _ = (
      clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, _TIMEOUT
      )
    )
    if address is not None:
      host, _, port = address.rpartition(":")
      # IPv6 addresses of Kubernetes have no brackets.
      bare = host.removeprefix("[").removesuffix("]")
      address = str(addresses.Endpoint(bare, int(port) - 1))
  except (
    # Variables that are missing or malformed ...
    *(LookupError, ValueError),
    # ... or another version of JAX.
    *(ImportError, AttributeError, TypeError),
  ) as error:
    raise ValueError(
      "JAX can't read this scheduler's variables (of SLURM, Open MPI and others:"
      f" {type(error).__name__}: {error}). Correct them, or give what they would"
      " say: the address, how many there are, and which one this is."
    ) from error
  if address is None or count is None or index is None:
    return None
  return address, count, index
