"""Peers for the tests of engines: processes, or threads of this one.

A peer evaluates expressions over its own `engine`, `board` and `exchange`, one
after another: ``peer.do("board.get('a', 1.0)")``. ``begin`` starts one without
waiting, and returns what ends with its value. Values travel pickled (literals are
not read by several threads at a time: CPython issue 106905); an error is raised
here as an error of the same name.
"""

import concurrent.futures
import faulthandler
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from optax_dist.coordinator import engine

LIMIT = 100.0  # No peer process lives longer than these seconds.

_ERRORS: dict[str, type[Exception]] = {
  e.__name__: e
  for e in (
    engine.EngineTimeout,
    engine.PeerLost,
    engine.OfferGone,
    engine.BoardLost,
    ValueError,
    RuntimeError,
  )
}


def names(of: engine.Engine) -> dict[str, Any]:
  """What an expression can use."""

  def filled(nbytes: int, seed: int) -> np.ndarray:
    buffer = exchange.buffer(nbytes)
    buffer[:] = pattern(nbytes, seed)
    return buffer

  def fetched(peer, ticket, nbytes, seed, timeout=10.0) -> bool:
    got = exchange.fetch(peer, ticket, nbytes, timeout)
    same = bool(np.array_equal(got.array, pattern(nbytes, seed)))
    got.check()
    return same

  exchange = of.exchange
  return {
    "engine": of,
    "board": of.board,
    "exchange": exchange,
    "filled": filled,
    "fetched": fetched,
    "kept": {},
    "lost": [],
    "clock": time.monotonic,  # The same in all processes of a host.
    "sleep": time.sleep,
    "threading": threading,
    "np": np,
  }


def pattern(nbytes: int, seed: int) -> np.ndarray:
  """Bytes that differ between seeds and between places."""
  return (np.arange(nbytes, dtype=np.uint32) * 7 + seed * 13).astype(np.uint8)


class Peer:
  """Evaluates expressions over an engine of its own, in a thread of its own."""

  def __init__(self, of: engine.Engine):
    self._of = of
    self._names = names(of)
    self._pool = concurrent.futures.ThreadPoolExecutor(1)

  def begin(self, expression: str) -> concurrent.futures.Future:
    return self._pool.submit(eval, expression, self._names)

  def do(self, expression: str, timeout: float = 30.0) -> Any:
    return self.begin(expression).result(timeout)

  def aside(self, expression: str) -> Any:
    """Evaluates it though another one may be running."""
    return eval(expression, self._names)

  def end(self) -> None:
    self._of.close()
    self._pool.shutdown()


class ProcessPeer:
  """The same in a process of its own."""

  def __init__(self, address: str, node_id: int, exchange: str):
    env = {k: v for k, v in os.environ.items() if "_proxy" not in k.lower()}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-W", "error", __file__]
    self.process = subprocess.Popen(
      [*command, address, str(node_id), exchange],
      env=env,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
    )
    self._replies: dict[int, concurrent.futures.Future] = {}
    self._lock = threading.Lock()
    self._count = 0
    self._started: concurrent.futures.Future = self._reply(0)
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def started(self) -> "ProcessPeer":
    self._started.result(60.0)
    return self

  def begin(self, expression: str) -> concurrent.futures.Future:
    return self._send("next", expression)

  def do(self, expression: str, timeout: float = 30.0) -> Any:
    return self.begin(expression).result(timeout)

  def aside(self, expression: str, timeout: float = 30.0) -> Any:
    return self._send("aside", expression).result(timeout)

  def signal(self, number: signal.Signals) -> None:
    self.process.send_signal(number)

  def end(self) -> None:
    """Ends the process in good order if it can; at once if it can't."""
    self.process.send_signal(signal.SIGCONT)
    assert self.process.stdin is not None
    assert self.process.stdout is not None
    self.process.stdin.close()
    try:
      self.process.wait(10.0)
    except subprocess.TimeoutExpired:
      self.process.kill()
      self.process.wait()
    self._reader.join(10.0)
    self.process.stdout.close()

  def _reply(self, number: int) -> concurrent.futures.Future:
    reply: concurrent.futures.Future = concurrent.futures.Future()
    self._replies[number] = reply
    return reply

  def _send(self, how: str, expression: str) -> concurrent.futures.Future:
    assert self.process.stdin is not None
    with self._lock:
      self._count += 1
      reply = self._reply(self._count)
      line = f"{self._count} {how} {expression}\n"
      self.process.stdin.write(line.encode())
      self.process.stdin.flush()
    return reply

  def _read(self) -> None:
    assert self.process.stdout is not None
    for line in self.process.stdout:
      number, kind, text = line.decode().rstrip("\n").split(" ", 2)
      reply = self._replies[int(number)]
      value = pickle.loads(bytes.fromhex(text))
      if kind == "value":
        reply.set_result(value)
      else:
        error = _ERRORS.get(kind, AssertionError)
        reply.set_exception(error(f"{kind}: {value}"))
    for reply in self._replies.values():
      if not reply.done():
        reply.set_exception(ConnectionError("The peer's process ended."))


# --- In the process ----------------------------------------------------------


def _main(address: str, node_id: str, exchange: str) -> None:
  from optax_dist.coordinator import jax_runtime

  lock = threading.Lock()

  def answer(number: str, work: Callable[[], Any]) -> None:
    try:
      kind, value = "value", work()
    except Exception as error:
      kind, value = type(error).__name__, str(error)
      if kind not in _ERRORS:
        value += traceback.format_exc()
    with lock:
      print(number, kind, pickle.dumps(value).hex(), flush=True)

  of = jax_runtime.connect(address, int(node_id), exchange=exchange)
  known = names(of)
  answer("0", lambda: True)
  pool = concurrent.futures.ThreadPoolExecutor(1)
  for line in sys.stdin:
    number, how, expression = line.rstrip("\n").split(" ", 2)

    def work(expression: str = expression) -> Any:
      return eval(expression, known)

    if how == "next":
      pool.submit(answer, number, work)
    else:
      threading.Thread(target=answer, args=(number, work)).start()
  of.close()


if __name__ == "__main__":
  faulthandler.dump_traceback_later(LIMIT, exit=True)
  sys.path.insert(0, str(pathlib.Path(__file__).parent))
  _main(*sys.argv[1:])
