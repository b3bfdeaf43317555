"""How long a put takes: JAX's coordination service and the stores side by side.

Run from a checkout: ``python -m benchmarks.store_latency``. Each store in turn
gets as many puts of 200 bytes as in one block, one after the other, and the
blocks are repeated, so that a busy machine slows all of them alike. A put is
timed from the call until its answer is there.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable

_BLOCK = 200
_VALUE = bytes(200)


def _put(connect: Callable[..., object], stack: contextlib.ExitStack):
  """A function that puts one key by a client, and waits for the answer."""
  from optax_dist.coordinator.store import interface

  woken = threading.Event()
  store = connect(woken.set)
  stack.callback(store.close)

  def put(number: int) -> None:
    store.ask(interface.PutIfAbsent(number, f"log/{number}", _VALUE), 10.0)
    while not store.poll():
      woken.wait()
      woken.clear()

  return put


def _coordination_service(stack: contextlib.ExitStack):
  from optax_dist.coordinator import jax_runtime, service

  made = stack.enter_context(service.start("127.0.0.1:0", 2))
  board = jax_runtime.connect_board(made.address, 0)
  stack.callback(board.close)
  return lambda number: board.put(f"log/{number}", _VALUE)


def _process(stack: contextlib.ExitStack, where: str):
  from optax_dist.coordinator.store import client, process
  from optax_dist.coordinator.transport import sockets

  secret = b"0123456789abcdef"
  made = stack.enter_context(process.start(secret, port=0))
  unix = [w for w in made.address.split(",") if w.startswith("unix:")]
  tcp = [w for w in made.address.split(",") if not w.startswith("unix:")]
  address = unix[0] if where == "unix" and unix else tcp[0]

  def connect(wake):
    transport = sockets.SocketTransport("client", secret=secret)
    return client.StoreClient(transport, address, wake)

  return _put(connect, stack)


def _etcd(stack: contextlib.ExitStack):
  sys.path.insert(0, str(pathlib.Path("tests/coordinator/store")))
  import etcd_cluster

  from optax_dist.coordinator.store import etcd, urls

  folder = stack.enter_context(tempfile.TemporaryDirectory())
  cluster = etcd_cluster.Cluster(pathlib.Path(folder))
  stack.callback(cluster.close)
  place = urls.parse(cluster.url)
  return _put(lambda wake: etcd.EtcdStore(place, b"", "run", wake), stack)


def _in_process(stack: contextlib.ExitStack):
  from optax_dist.coordinator.store import in_process

  store = in_process.InProcessStore()
  return _put(lambda wake: store.connect("one", wake), stack)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--blocks", type=int, default=10)
  blocks = parser.parse_args().blocks
  with contextlib.ExitStack() as stack:
    stores = {
      "JAX's coordination service": _coordination_service(stack),
      "store process, TCP, signed": _process(stack, "tcp"),
      "store process, same host": _process(stack, "unix"),
      "in-process": _in_process(stack),
    }
    if shutil.which("etcd"):
      stores["etcd, three servers"] = _etcd(stack)
    times: dict[str, list[float]] = {name: [] for name in stores}
    for number in range(blocks * _BLOCK):
      if number % _BLOCK:
        continue
      for name, put in stores.items():
        for each in range(number, number + _BLOCK):
          began = time.perf_counter()
          put(each)
          times[name].append(time.perf_counter() - began)
    print(
      f"{'store':28} {'median':>10} {'p99':>10}   of {blocks * _BLOCK} puts"
    )
    for name, found in times.items():
      median = statistics.median(found) * 1e6
      late = statistics.quantiles(found, n=100)[98] * 1e6
      print(f"{name:28} {median:7.0f} us {late:7.0f} us")


if __name__ == "__main__":
  main()
