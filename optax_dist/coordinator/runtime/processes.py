"""Makes one JAX program of the processes of a replica, on one host or several."""

from __future__ import annotations

import jax

from optax_dist.coordinator.transport import addresses


def initialize(
  address: str, count: int, index: int, local_addr: str | None = None
) -> None:
  """Calls `jax.distributed.initialize`, and listens nowhere but there.

  JAX's service would listen on all addresses, and gloo, the collectives of CPUs,
  on that of the host's name, which may be one that no other host reaches
  (127.0.1.1). On loopback nothing leaves this host.

  Args:
    address: ``host:port`` at which the processes meet.
    count: how many there are.
    index: which one this is.
    local_addr: the address of this host that its collectives are to use; by
      default the one by which it reaches the meeting.
  """
  (place,) = addresses.parse(address)
  own = local_addr or _own_address(place.host)
  # It would take SIGTERM, by which a replica leaves, and a process ends.
  jax.config.update("jax_enable_preemption_service", False)
  jax.distributed.initialize(
    coordinator_address=address,
    coordinator_bind_address=_bind_address(place) if index == 0 else None,
    num_processes=count,
    process_id=index,
    cluster_detection_method="deactivate",
  )
  kind = getattr(jax.config, "jax_cpu_collectives_implementation", None)
  if own is not None and kind == "gloo":
    _keep_gloo_on(own)


def _bind_address(place: addresses.Endpoint) -> str:
  """The address itself; all of them where a name stands for loopback only."""
  if not addresses.is_ip(place.host):
    place = place._replace(host=addresses.bound(place.host)[1])
  return str(place)


def _own_address(host: str) -> str | None:
  """The one from which this process reaches the meeting; None: no such."""
  if addresses.is_loopback(host):
    return host
  try:
    return addresses.advertised("::" if ":" in host else "0.0.0.0", host)
  except ValueError:
    return None


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
