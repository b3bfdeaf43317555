"""Makes the processes of a replica one JAX program, on one or several hosts."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.transport import addresses

# Largest text a process sends at the start: name, address and a digest.
_TEXT = 4096


def initialize(launched: Environment) -> None:
  """Calls `jax.distributed.initialize`, and restricts where it listens.

  JAX's service would listen on all addresses, and gloo, the CPU collectives, on
  that of the host's name, which other hosts may not reach (127.0.1.1). On
  loopback nothing leaves this host.

  Args:
    launched: the replica's address and numbers, and the address of this host
      for its collectives; by default the one from which it reaches process 0.
  """
  # `Environment` has checked that it is set.
  assert launched.group_address is not None
  (place,) = addresses.parse(launched.group_address)
  own = launched.local_addr or _own_address(place.host)
  # It would handle SIGTERM, which makes a replica leave and a process end.
  jax.config.update("jax_enable_preemption_service", False)
  jax.distributed.initialize(
    coordinator_address=launched.group_address,
    coordinator_bind_address=None
    if launched.process_index
    else _bind_address(place),
    num_processes=launched.num_processes,
    process_id=launched.process_index,
    cluster_detection_method="deactivate",
  )
  kind = getattr(jax.config, "jax_cpu_collectives_implementation", None)
  if own is not None and kind == "gloo":
    _keep_gloo_on(own)


def gather(text: str) -> list[str]:
  """Returns a short text of each process of this JAX program, in their order."""
  raw = text.encode()
  if len(raw) > _TEXT:
    raise ValueError(
      f"The address of a process may have {_TEXT} bytes, got {len(raw)}: {text}"
    )
  padded = np.frombuffer(raw.ljust(_TEXT), np.uint8)
  rows = multihost_utils.process_allgather(padded)
  return [bytes(np.asarray(row)).decode().rstrip() for row in rows]


def _bind_address(place: addresses.Endpoint) -> str:
  """The address itself; all addresses if a name resolves to loopback only."""
  if not addresses.is_ip(place.host):
    place = place._replace(host=addresses.bound(place.host).text)
  return str(place)


def _own_address(host: str) -> str | None:
  """The address from which this process reaches process 0; None if unknown."""
  try:
    own = addresses.own(None, host)
    return host if own is None else addresses.advertised(own.text, host)
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
    return  # A JAX built otherwise lets gloo choose by itself.

  def client() -> object:
    return make(gloo(distributed_client=state.client, hostname=host))

  backend.register_backend_factory("cpu", client, fail_quietly=False)
