"""Makes the processes of a replica one JAX program, on one or several hosts."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from optax_dist.coordinator.extras.groups import meeting
from optax_dist.coordinator.launch import cluster
from optax_dist.coordinator.launch.environment import (
  Environment,
  ProcessEnvironment,
)
from optax_dist.coordinator.protocol import deadlines, messages
from optax_dist.coordinator.runtime import endpoint as endpoints
from optax_dist.coordinator.transport import addresses, tls

# Largest text a process sends at the start: name, address and a digest.
_TEXT = 4096


def meet(
  on_loss: Callable[[str], None],
  certificates: tls.Certificates | None = None,
) -> meeting.Meeting:
  """Looks for the other processes of this replica, and makes them one program.

  Args:
    on_loss: called if a process is lost before the replica joins.
    certificates: see `coordinator.join`.

  Raises:
    ValueError: a variable is missing or invalid, or a certificate.
    CoordinatorError: the other processes do not come.
  """
  launched, which = Environment.read(), ProcessEnvironment.read()
  certificates = certificates or launched.find_certificates()
  if certificates is not None:
    tls.check(certificates)
  address, _, number = cluster.detect(None, None, None)
  index, count = which.process_index, which.num_processes
  assert index is not None
  assert count is not None
  secret = launched.find_secret() or ""
  endpoint = endpoints.connect(
    address,
    f"{number}.{index}",
    secret.encode(),
    deadlines.silence(meeting.MEETING_TIMEOUT),
    bind=launched.local_addr,
    advertise=launched.local_addr,
    certificates=certificates,
  )
  own = "" if index else _meeting_address(endpoint.transport.address)
  call = messages.Meet(launched.run or "", number, index, count, own)
  made = meeting.Meeting(endpoint, call, on_loss)
  initialize(made.wait(), index, count, launched.local_addr)
  return made


def initialize(
  address: str, index: int, count: int, local_addr: str | None = None
) -> None:
  """Calls `jax.distributed.initialize`, and restricts where it listens.

  JAX's service would listen on all addresses, and gloo, the CPU collectives, on
  that of the host's name, which other hosts may not reach (127.0.1.1). On
  loopback nothing leaves this host.

  Args:
    address: address of process 0, ``host:port``.
    index: which process this is.
    count: how many there are.
    local_addr: the address of this host for its collectives; by default the one
      from which it reaches process 0.
  """
  first = addresses.endpoint(address)
  own = local_addr or _own_address(first.host)
  # JAX's service would handle SIGTERM, on which the replica has to leave.
  jax.config.update("jax_enable_preemption_service", False)
  jax.distributed.initialize(
    coordinator_address=address,
    coordinator_bind_address=None if index else address,
    num_processes=count,
    process_id=index,
    cluster_detection_method="deactivate",
  )
  kind = getattr(jax.config, "jax_cpu_collectives_implementation", None)
  if kind == "gloo":
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


def _meeting_address(transport: str) -> str:
  """An address at which the other processes of the replica reach process 0, this one.

  Args:
    transport: the address of its transport, which includes one that others reach,
      unless all processes are on this host.
  """
  hosts = [way.host for way in addresses.parse(transport) if way.host]
  host = "127.0.0.1"
  if hosts and not addresses.is_loopback(hosts[0]):
    host = addresses.bound(hosts[0]).text
  return str(addresses.Endpoint(host, addresses.free_ports()[0]))


def _own_address(host: str) -> str:
  """The address from which this process reaches process 0.

  Raises:
    ValueError: there is none.
  """
  own = addresses.own(None, host)
  return host if own is None else addresses.advertised(own.text, host)


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
