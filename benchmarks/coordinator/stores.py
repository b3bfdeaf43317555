"""Where the keys of a run may be kept: JAX's coordination service, and ours.

Run from a checkout: ``python -m benchmarks.coordinator.stores``. It prints

- how long a put of 200 bytes takes, from the call until its answer is there. The
  stores take turns in blocks, so that a busy machine slows all of them alike;
- what becomes of a client whose TCP connection is cut once, with the store alive;
- what a stranger can do who reaches the port and knows no secret.

etcd is measured where its server is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

sys.path.extend(
  str(pathlib.Path(__file__).parents[2] / "tests" / folder)
  for folder in ("coordinator/store", "helpers")
)
import etcd_cluster
import proxies

from optax_dist.coordinator.extras.etcd import client as etcd
from optax_dist.coordinator.store import (
  client,
  in_process,
  interface,
  process,
  urls,
)
from optax_dist.coordinator.transport import addresses, sockets

_BLOCK = 200
_VALUE = bytes(200)
_SECRET = b"0123456789abcdef"


def _putter(
  store: Any, wait: Callable[[], Any] = lambda: None
) -> Callable[[int], Any]:
  """A function that puts one key by a client, and waits for the answer.

  Args:
    store: the client.
    wait: waits until there may be something to poll.
  """

  def put(number: int) -> Any:
    request = interface.PutIfAbsent(number, f"log/{number}", _VALUE)
    store.ask(request, 10.0)
    while not (events := store.poll()):
      wait()
    return events[-1]

  return put


def _client(name: str, address: str, secret: bytes = _SECRET) -> Any:
  """A client of a store process, and its `_putter`."""
  transport = sockets.Transport(name, secret=secret)
  store = client.StoreClient(transport, address)

  def wait() -> None:
    for event in transport.poll(store.deadline()):
      store.handle(event)

  return transport, _putter(store, wait)


# JAX's service, by its private interface: a process of its own, and its clients.


def _jax_client(address: str, node: int) -> Any:
  from jax._src.lib import _jax

  made = _jax.get_distributed_runtime_client(
    address, node, init_timeout=20, heartbeat_timeout=86400, shutdown_timeout=1
  )
  made.connect()
  return made


def _serve_jax(address: str) -> None:
  from jax._src.lib import _jax

  service = _jax.get_distributed_runtime_service(
    address, 3, heartbeat_timeout=86400, shutdown_timeout=1, recoverable=True
  )
  # It admits no process before all have come.
  threads = [
    threading.Thread(target=_jax_client, args=(address, node), daemon=True)
    for node in range(3)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  print("ready", flush=True)
  sys.stdin.read()
  del service


@contextlib.contextmanager
def _jax_service() -> Iterator[str]:
  address = f"127.0.0.1:{addresses.free_ports()[0]}"
  served = _self("serve-jax", address, stdin=subprocess.PIPE)
  assert served.stdout is not None
  assert served.stdout.readline() == "ready\n"
  try:
    yield address
  finally:
    served.kill()
    served.communicate()


def _self(*arguments: str, **options: Any) -> subprocess.Popen[str]:
  return subprocess.Popen(
    [sys.executable, "-m", "benchmarks.coordinator.stores", *arguments],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
    **options,
  )


# Measurements.


def _latency(blocks: int) -> None:
  with contextlib.ExitStack() as stack:
    stores: dict[str, Callable[[int], Any]] = {}

    service = _jax_client(stack.enter_context(_jax_service()), 1)
    stack.callback(
      service.shutdown
    )  # Or the service's end would be this one's.
    stores["JAX's coordination service"] = lambda number: (
      service.key_value_set_bytes(f"log/{number}", _VALUE)
    )
    served = stack.enter_context(process.start(_SECRET, port=0))
    for way in served.address.split(","):
      unix = way.startswith("unix:")
      name = f"store process, {'same host' if unix else 'TCP, signed'}"
      transport, stores[name] = _client(name, way)
      stack.callback(transport.close)
    stores["in-process"] = _putter(in_process.InProcessStore().connect("one"))
    if shutil.which("etcd"):
      folder = stack.enter_context(tempfile.TemporaryDirectory())
      cluster = etcd_cluster.Cluster(pathlib.Path(folder))
      stack.callback(cluster.close)
      place = urls.parse(cluster.url)
      assert isinstance(place, etcd.Etcd)
      woken = threading.Event()
      store = etcd.EtcdStore(place, _SECRET, woken.set)
      stack.callback(store.close)

      def wait() -> None:
        woken.wait()
        woken.clear()

      stores["etcd, three servers"] = _putter(store, wait)
    times: dict[str, list[float]] = {name: [] for name in stores}
    for block in range(blocks):
      for name, put in stores.items():
        for number in range(block * _BLOCK, (block + 1) * _BLOCK):
          began = time.perf_counter()
          put(number)
          times[name].append(time.perf_counter() - began)
  print(f"{'a put of 200 bytes':28} {'median':>10} {'p99':>10}")
  for name, found in times.items():
    late = statistics.quantiles(found, n=100)[98]
    print(
      f"{name:28} {statistics.median(found) * 1e6:7.0f} us {late * 1e6:7.0f} us"
    )


def _use(kind: str, address: str) -> None:
  """A client that puts all the time; tells the longest that a put took."""
  if kind == "jax":
    service = _jax_client(address, 1)
    put = lambda n: service.key_value_set_bytes(f"log/{n}", _VALUE)
  else:
    _, put = _client("user", address)
  print("ready", flush=True)
  number, longest, end = 0, 0.0, time.monotonic() + 5.0
  while time.monotonic() < end:
    began = time.monotonic()
    put(number)
    longest = max(longest, time.monotonic() - began)
    number += 1
    time.sleep(0.01)
  print(f"{number} puts, the longest of {longest:.2f} s", flush=True)


def _cut(kind: str, address: str) -> None:
  with proxies.threaded(address) as way:
    user = _self("use", kind, way.address)
    assert user.stdout is not None
    assert user.stdout.readline() == "ready\n"
    time.sleep(1.0)
    way.cut()
    time.sleep(1.0)
    way.mend()
    said, _ = user.communicate(timeout=60)
  ended = f"exit code {user.returncode}; {said.strip() or 'no more was said'}"
  print(f"{kind}: cut for 1 s: {ended}")


def _stranger(kind: str, address: str) -> None:
  if kind == "jax":
    member, stranger = _jax_client(address, 1), _jax_client(address, 2)
    member.key_value_set_bytes("secret", b"of the members")
    found = stranger.key_value_try_get_bytes("secret")
    stranger.key_value_delete("secret")
    try:
      member.key_value_try_get_bytes("secret")
      left = "and could not delete it"
    except Exception:
      left = "and has deleted it"
    print(f"{kind}: a stranger reads {found!r} {left}", flush=True)
    for one in (member, stranger):
      one.shutdown()
    return
  transport, put = _client("stranger", address, b"guessed" * 4)
  print(f"{kind}: a stranger gets {put(0)}")
  transport.close()


def main() -> None:
  """Measures, or plays a part of what is measured."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("part", nargs="*", help=argparse.SUPPRESS)
  parser.add_argument("--blocks", type=int, default=10)
  options = parser.parse_args()
  match options.part:
    case ["serve-jax", address]:
      _serve_jax(address)
    case ["use", kind, address]:
      _use(kind, address)
    case _:
      _latency(options.blocks)
      with _jax_service() as address:
        _stranger("jax", address)
        _cut("jax", address)
      with process.start(_SECRET, port=0) as served:
        tcp = next(
          w for w in served.address.split(",") if not w.startswith("unix:")
        )
        _stranger("ours", tcp)
        _cut("ours", tcp)


if __name__ == "__main__":
  main()
