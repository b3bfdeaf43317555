"""An engine on JAX's distributed runtime, for replicas that are processes.

The board is the key-value store of a coordination service, the class behind
`jax.distributed`, in a process of its own (`service`). So each replica's JAX
stays local, and `jax.distributed.initialize` stays free for a replica that
spans several hosts. The exchange is shared memory between processes of one
host, and `jax.experimental.transfer` between hosts.

Everything that JAX doesn't promise to keep is used in this file alone.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.dlpack
import jax.errors
import jax.sharding
import numpy as np

from optax_dist.coordinator import (
  addresses,
  engine,
  host_exchange,
  runtime_board,
  shared_memory,
)

_logger = logging.getLogger(__name__)

_VERSIONS = "JAX 0.10 and 0.11 have what is needed"

# A process that is stopped for less than this is not declared dead; who is
# stuck is told by progress instead.
_HEARTBEAT_SECONDS = 86400

# Where the service says how many replicas it was made for.
_MAX_REPLICAS = "optax_dist.service/max_replicas"

# The client's number of who only asks; replicas have theirs, plus one.
_ASKING = 0

# Several transports move more than one: 0.9 against 0.5 GB/s on loopback.
_TRANSPORTS = 4

# Servers whose peers may still be reading; they end with the process.
_kept: list[Any] = []


@contextlib.contextmanager
def _private_api(what: str) -> Iterator[None]:
  """Turns a part of JAX that is not there into an error that says so."""
  try:
    yield
  except (ImportError, AttributeError, TypeError) as error:
    raise RuntimeError(
      f"The coordinator between processes needs {what}, which JAX"
      f" {jax.__version__} lacks ({error}). {_VERSIONS}; without it,"
      " optax_dist.coordinator.run_embedded runs replicas as threads."
    ) from error


def _client(
  address: str, node_id: int, timeout: float, *, raises: bool = False
) -> Any:
  """A client that has not connected yet.

  Args:
    address: of the service.
    node_id: its number, below the service's number of replicas.
    timeout: seconds that it may take to connect.
    raises: whether a failure to connect is an exception. By default JAX ends
      the process, but with a message that says why, also at a later failure.
  """
  addresses.bypass_proxy(addresses.split(address)[0])
  options: dict[str, Any] = {}
  if raises:
    # Its argument can't be converted to Python, and that raises in `connect`.
    options["missed_heartbeat_callback"] = lambda *status: None
  with _private_api("the distributed runtime's client"):
    from jax._src.lib import _jax

    return _jax.get_distributed_runtime_client(
      address,
      node_id,
      init_timeout=max(1, round(timeout)),
      heartbeat_timeout=_HEARTBEAT_SECONDS,
      shutdown_timeout=1,
      use_compression=False,  # It takes longer than what it saves.
      shutdown_on_destruction=False,
      **options,
    )


# --- The service -------------------------------------------------------------


def start_service(address: str, max_replicas: int, timeout: float) -> Any:
  """Starts a coordination service in this process.

  Returns:
    An object that keeps it running; its ``shutdown()`` ends it.
  """
  with _private_api("the distributed runtime's service"):
    from jax._src.lib import _jax

    service = _jax.get_distributed_runtime_service(
      address,
      1 + max_replicas,
      heartbeat_timeout=_HEARTBEAT_SECONDS,
      shutdown_timeout=1,
      recoverable=True,  # A replica may die and come back.
    )
  # The service lets nobody in before all have come. Placeholders come in
  # everybody's name; after that each replica may come and go as it likes.
  host, port = addresses.split(address)
  here = "127.0.0.1" if host in ("0.0.0.0", "::") else host
  local = f"[{here}]:{port}" if ":" in here else f"{here}:{port}"
  deadline = time.monotonic() + timeout
  clients: dict[int, Any] = {}

  def come(node_id: int) -> None:
    # May fail if the replica itself comes at the same moment.
    with contextlib.suppress(engine.EngineTimeout):
      clients[node_id] = _knock(local, node_id, deadline)

  threads = [
    threading.Thread(target=come, args=(i,), daemon=True)
    for i in range(1 + max_replicas)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  if len(clients) <= max_replicas:
    raise engine.EngineTimeout(
      f"The coordination service at {address} did not start within"
      f" {timeout:g} s."
    )
  clients[_ASKING].key_value_set_bytes(
    _MAX_REPLICAS, str(max_replicas).encode()
  )
  for client in clients.values():
    client.shutdown()
  return service


def _knock(address: str, node_id: int, deadline: float) -> Any:
  """A connected client; tries again until the deadline."""
  while True:
    left = deadline - time.monotonic()
    client = _client(address, node_id, left, raises=True)
    outcome: list[Exception | None] = []

    def connect(client: Any = client, outcome: list = outcome) -> None:
      try:
        client.connect()
        outcome.append(None)
      except Exception as error:
        outcome.append(error)

    # JAX takes some seconds longer than it is told.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(max(0.1, left))
    if outcome and outcome[0] is None:
      return client
    if time.monotonic() >= deadline:
      raise engine.EngineTimeout(
        f"What listens at {address} admitted no client of number {node_id}"
        " in time."
      ) from (outcome[0] if outcome else None)
    # Two that come under one number at once turn each other away.
    time.sleep(random.uniform(0.05, 0.4))


# --- The board ---------------------------------------------------------------


def connect_board(
  address: str, node_id: int, *, timeout: float = 20.0
) -> runtime_board.RuntimeBoard:
  """Connects to a `service`, which may still be starting.

  Raises:
    ValueError: the address or the number can't be right.
    engine.EngineTimeout: no service answered in time.
  """
  host, port = addresses.split(address)
  if node_id < 0:
    raise ValueError(f"node_id must not be negative; got {node_id}.")
  deadline = time.monotonic() + timeout
  _wait_for_port(host, port, deadline, timeout)
  try:
    soon = min(deadline, time.monotonic() + 0.5)
    probe = _knock(address, 1 + node_id, soon)
  except engine.EngineTimeout:
    # Perhaps there is no such number: ask under one that there is.
    probe = _knock(address, _ASKING, deadline)
  try:
    places = int(probe.blocking_key_value_get_bytes(_MAX_REPLICAS, 5000))
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    raise engine.BoardLost(
      f"What answers at {address} is not a coordinator's service:"
      " start one with python -m optax_dist.coordinator.service."
    ) from error
  finally:
    probe.shutdown()
  if node_id >= places:
    raise ValueError(
      f"The service at {address} was started for {places} replicas, so"
      f" node_id is at most {places - 1}; got {node_id}."
    )
  client = _client(address, 1 + node_id, timeout)
  client.connect()
  return runtime_board.RuntimeBoard(client, address)


def _wait_for_port(
  host: str, port: int, deadline: float, timeout: float
) -> None:
  while True:
    try:
      left = max(0.1, deadline - time.monotonic())
      with socket.create_connection((host, port), timeout=left):
        return
    except OSError as error:
      if time.monotonic() >= deadline:
        raise engine.EngineTimeout(
          f"No coordination service answered at {host}:{port} within"
          f" {timeout:g} s ({error}). Start it with python -m"
          " optax_dist.coordinator.service, and check the address."
        ) from error
    time.sleep(0.05)


# --- The exchange ------------------------------------------------------------


class _Pull:
  """An array on its way; see `transfer_exchange.Pull`."""

  def __init__(self, array: jax.Array):
    self._array = array

  def is_ready(self) -> bool:
    return self._array.is_ready()  # type: ignore[attr-defined]

  def result(self) -> np.ndarray:
    try:
      return np.asarray(self._array)
    except jax.errors.JaxRuntimeError as error:
      raise ConnectionError(str(error).splitlines()[0]) from error


class RuntimeTransferServer:
  """JAX's transfer server; see `transfer_exchange.TransferServer`."""

  def __init__(self, ip: str):
    with _private_api("jax.experimental.transfer"):
      from jax.experimental import transfer

      self._device = _cpu_device()
      self._server = transfer.start_transfer_server(
        self._device.client, f"{ip}:0", [f"{ip}:0"] * _TRANSPORTS
      )
    _kept.append(self._server)
    self.address = self._server.address()

  def offer(self, uuid: int, memory: np.ndarray) -> None:
    self._server.await_pull(uuid, [jax.dlpack.from_dlpack(memory)])

  def connect(self, address: str) -> Any:
    return self._server.connect(address)

  def pull(self, connection: Any, uuid: int, nbytes: int) -> _Pull:
    here = jax.sharding.SingleDeviceSharding(self._device)
    shape = jax.ShapeDtypeStruct((nbytes,), np.uint8, sharding=here)
    return _Pull(connection.pull(uuid, [shape])[0])


def _cpu_device() -> jax.Device:
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError as error:
    raise RuntimeError(
      "Arrays travel between hosts from the memory of the CPU backend, which"
      f" JAX has not started ({error}). If JAX_PLATFORMS is set, append it, as"
      " in JAX_PLATFORMS=cuda,cpu."
    ) from error


# --- Both --------------------------------------------------------------------


def connect(
  address: str,
  node_id: int,
  *,
  timeout: float = 20.0,
  exchange: Literal["auto", "shared_memory", "transfer"] = "auto",
  bind: str = "127.0.0.1",
) -> engine.Engine:
  """Connects to a job.

  Args:
    address: of its `service`, ``host:port``; it may still be starting.
    node_id: the number of this replica, below the service's. A replica that
      comes back may take its number again.
    timeout: seconds until the service must have answered.
    exchange: how arrays reach others. "auto" takes shared memory on one host,
      and `jax.experimental.transfer` between hosts.
    bind: the host name or IP address at which this host's peers reach it; with
      "0.0.0.0", the one from which the service is reached.

  Returns:
    An engine. Close it before the service ends: as long as it is connected,
    the end of the service ends this process.

  Raises:
    ValueError: an argument can't be right.
    engine.EngineTimeout: no service answered in time.
    RuntimeError: this JAX lacks what is needed.
  """
  if exchange not in ("auto", "shared_memory", "transfer"):
    raise ValueError(
      f"exchange is one of auto, shared_memory and transfer; got {exchange!r}."
    )
  shares = exchange != "transfer" and shared_memory.is_available()
  if exchange == "shared_memory" and not shares:
    raise ValueError(
      "exchange='shared_memory' needs Linux and /proc; take 'auto'."
    )
  server = None
  if exchange != "shared_memory":
    try:
      ip = addresses.advertised(bind, address)
      server = RuntimeTransferServer(ip)
    except (RuntimeError, OSError):
      if not shares or not addresses.is_loopback(bind):
        raise
      _logger.info("Only peers of this host are reached.", exc_info=True)
  board = connect_board(address, node_id, timeout=timeout)
  try:
    arrays = host_exchange.HostExchange(share_memory=shares, transfer=server)
  except BaseException:
    board.close()
    raise
  return engine.Engine(board, arrays, arrays if shares else None)


# --- Where the job runs ------------------------------------------------------


def detect_cluster(timeout: int = 60) -> tuple[str, int, int] | None:
  """Asks JAX for the scheduler's address, number and index of processes.

  The port is one below JAX's own, which stays free for
  `jax.distributed.initialize`.
  """
  with _private_api("cluster detection"):
    from jax._src import clusters

    address, count, index, _ = (
      clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, timeout
      )
    )
  if address is None or count is None or index is None:
    return None
  host, port = addresses.split(address)
  host = f"[{host}]" if ":" in host else host
  return f"{host}:{port - 1}", count, index
