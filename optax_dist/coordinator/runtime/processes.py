"""Makes one JAX program of the processes of a replica."""

from __future__ import annotations

import jax

from optax_dist.coordinator.transport import addresses


def initialize(address: str, count: int, index: int) -> None:
  """Calls `jax.distributed.initialize`; on loopback nothing leaves it.

  JAX's service would listen on all addresses, and gloo, the collectives of CPUs,
  on that of the host's name.

  Args:
    address: ``host:port`` at which the processes meet.
    count: how many there are.
    index: which one this is.
  """
  host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
  local = addresses.is_loopback(host)
  # It would take SIGTERM, by which a replica leaves, and a process ends.
  jax.config.update("jax_enable_preemption_service", False)
  jax.distributed.initialize(
    coordinator_address=address,
    coordinator_bind_address=address if local else None,
    num_processes=count,
    process_id=index,
    cluster_detection_method="deactivate",
  )
  kind = getattr(jax.config, "jax_cpu_collectives_implementation", None)
  if local and kind == "gloo":
    _keep_gloo_on(host)


def _keep_gloo_on(host: str) -> None:
  try:
    from jax._src import distributed, xla_bridge
    from jax.extend import backend
    from jaxlib import _jax

    state = distributed.global_state
    make, gloo = xla_bridge.make_cpu_client, _jax.make_gloo_tcp_collectives
  except (ImportError, AttributeError):
    return  # In a JAX that is made otherwise, gloo chooses by itself.

  def client() -> object:
    return make(gloo(distributed_client=state.client, hostname=host))

  backend.register_backend_factory("cpu", client, fail_quietly=False)
