"""Makes the processes of a replica one JAX program, on one or several hosts."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from optax_dist.coordinator.extras.groups import meeting
from optax_dist.coordinator.launch import cluster
from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.protocol import deadlines, messages
from optax_dist.coordinator.runtime import endpoint
from optax_dist.coordinator.transport import addresses, tls

# Ports for process 0 of a replica that other hosts reach: the first free one, in
# random order, since replicas of one host would collide.
MEETING_PORTS = range(29500, 29600)
# Largest text a process sends at the start: name, address and a digest.
_TEXT = 4096


def meet(
  launched: Environment,
  on_loss: Callable[[str], None],
  certificates: tls.Certificates | None = None,
) -> meeting.Meeting:
  """Looks for the other processes of this replica, and makes them one program.

  Args:
    launched: which process this is, and where its coordinator is.
    on_loss: called if a process is lost before the replica joins.
    certificates: see `coordinator.join`.

  Raises:
    ValueError: a variable is missing or invalid, or a certificate.
    CoordinatorError: the other processes do not come.
  """
  certificates = certificates or launched.find_certificates()
  if certificates is not None:
    tls.check(certificates)
  address, _, number = cluster.detect(None, None, None)
  index, count = launched.process_index, launched.num_processes
  assert index is not None
  assert count is not None
  secret = launched.find_secret() or ""
  place = endpoint.connect(
    address,
    f"{number}.{index}",
    secret.encode(),
    deadlines.silence(meeting.PATIENCE),
    bind=launched.local_addr,
    advertise=launched.local_addr,
    certificates=certificates,
  )
  own = "" if index else _meeting_address(place.transport.address)
  call = messages.Meet(launched.run or "", number, index, count, own)
  made = meeting.Meeting(place, call, on_loss)
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
    address: of process 0, ``host:port``.
    index: which process this is.
    count: how many there are.
    local_addr: the address of this host for its collectives; by default the one
      from which it reaches process 0.
  """
  (place,) = addresses.parse(address)
  own = local_addr or _own_address(place.host)
  # It would handle SIGTERM, which makes a replica leave and a process end.
  jax.config.update("jax_enable_preemption_service", False)
  jax.distributed.initialize(
    coordinator_address=address,
    coordinator_bind_address=None if index else _bind_address(place),
    num_processes=count,
    process_id=index,
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


def _meeting_address(transport: str) -> str:
  """An address of this host, the process 0 of a replica, for the others.

  Args:
    transport: the address of its transport, which has one that others reach,
      unless all of them are on this host.

  Raises:
    ValueError: no port of `MEETING_PORTS` is free.
  """
  hosts = [way.host for way in addresses.parse(transport) if way.host]
  if not hosts or addresses.is_loopback(hosts[0]):
    return f"127.0.0.1:{addresses.free_ports()[0]}"
  ip = addresses.bound(hosts[0])
  for port in random.sample(MEETING_PORTS, len(MEETING_PORTS)):
    with contextlib.suppress(OSError), socket.socket(ip.family) as probe:
      probe.bind(ip.place(port))
      return str(addresses.Endpoint(ip.text, port))
  raise ValueError(
    f"None of the ports {MEETING_PORTS[0]} to {MEETING_PORTS[-1]} of {ip.text} is"
    " free, where processes of a replica would meet."
  )


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
