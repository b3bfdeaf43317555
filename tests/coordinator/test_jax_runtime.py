import pathlib
import re
import signal
import socket
import subprocess
import sys
import types

import engine_peers
import jax
import pytest

from optax_dist.coordinator import (
  addresses,
  engine,
  host_exchange,
  jax_runtime,
  service,
)


def test_the_end_of_the_service_is_the_end_of_who_is_connected():
  """JAX ends them; who closed its engine before, goes on."""
  hosted = service.start("127.0.0.1:0", 2)
  peers = [
    engine_peers.ProcessPeer(hosted.address, i, "shared_memory")
    for i in range(2)
  ]
  try:
    closed, waits = (peer.started() for peer in peers)
    closed.do("engine.close()")
    waiting = waits.begin("board.get('never', 60.0)")
    hosted.process.kill()
    with pytest.raises((ConnectionError, engine.BoardLost)):
      waiting.result(10.0)
    assert waits.process.wait(10.0) == -signal.SIGABRT
    assert closed.do("1 + 1") == 2
  finally:
    for peer in peers:
      peer.end()
    hosted.stop()
  assert closed.process.returncode == 0


def test_a_process_may_end_after_its_service_if_it_says_goodbye():
  """Without closing its engine, too: JAX's message would be a false alarm."""
  code = (
    "from optax_dist.coordinator import jax_runtime, service;"
    "s = service.start('127.0.0.1:0', 1);"
    "e = jax_runtime.connect(s.address, 0, exchange='shared_memory')"
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    stderr=subprocess.PIPE,
    timeout=60,
    check=False,
  )
  assert done.returncode == 0, done.stderr.decode()
  assert b"fatal" not in done.stderr


def test_a_jax_without_what_is_needed_is_named(monkeypatch):
  from jax._src.lib import _jax

  empty = types.SimpleNamespace()
  for name, call in [
    ("client", lambda: jax_runtime._client("127.0.0.1:1", 0, 1.0)),
    ("service", lambda: jax_runtime.start_service("127.0.0.1:1", 1, 1.0)),
  ]:
    with monkeypatch.context() as patch:
      patch.setattr("jax._src.lib._jax", empty)
      with pytest.raises(RuntimeError, match=rf"{name}.*0\.10 and 0\.11"):
        call()
    # One that takes other arguments.
    factory = f"get_distributed_runtime_{name}"
    with monkeypatch.context() as patch:
      patch.setattr(_jax, factory, lambda address: None)
      with pytest.raises(RuntimeError, match=jax.__version__):
        call()


def test_what_can_not_be_connected_is_refused(monkeypatch):
  with pytest.raises(ValueError, match=r"auto.*got 'tcp'"):
    jax_runtime.connect("127.0.0.1:1", 0, exchange="tcp")  # type: ignore
  with pytest.raises(ValueError, match="host:port"):
    jax_runtime.connect("127.0.0.1", 0)
  with pytest.raises(ValueError, match="negative; got -1"):
    jax_runtime.connect("127.0.0.1:1", -1)
  with monkeypatch.context() as patch:
    patch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="needs Linux"):
      jax_runtime.connect("127.0.0.1:1", 0, exchange="shared_memory")
  with pytest.raises(engine.EngineTimeout, match="No coordination service"):
    jax_runtime.connect("127.0.0.1:9", 0, timeout=0.1)


def test_by_default_both_ways_are_offered(monkeypatch):
  with service.start("127.0.0.1:0", 2) as hosted:
    both = jax_runtime.connect(hosted.address, 0)
    address = host_exchange.Address.load(both.exchange.address)
    assert address.place
    assert address.transfer

    def broken(ip):
      raise RuntimeError("no CPU backend")

    monkeypatch.setattr(jax_runtime, "RuntimeTransferServer", broken)
    one = jax_runtime.connect(hosted.address, 1)
    given = one.exchange.buffer(10)
    given[:] = 3
    one.exchange.offer(1, given, [both.exchange.address])
    fetched = both.exchange.fetch(one.exchange.address, 1, 10, 5.0)
    assert fetched.array.tolist() == [3] * 10
    with pytest.raises(RuntimeError, match="no CPU backend"):
      jax_runtime.connect(hosted.address, 1, exchange="transfer")
    # Who is to be reached from other hosts has to be.
    with pytest.raises(RuntimeError, match="no CPU backend"):
      jax_runtime.connect(hosted.address, 1, bind="0.0.0.0")
    one.close()
    both.close()


def test_a_missing_cpu_backend_is_named(monkeypatch):
  def devices(backend):
    raise RuntimeError(f"Unknown backend {backend}")

  monkeypatch.setattr(jax, "local_devices", devices)
  with pytest.raises(RuntimeError, match="JAX_PLATFORMS=cuda,cpu"):
    jax_runtime.RuntimeTransferServer("127.0.0.1")


def test_a_transfer_server_listens_at_the_given_host_alone():
  server = jax_runtime.RuntimeTransferServer("127.0.0.1")
  host, port = addresses.split(server.address)
  assert host == "127.0.0.1"
  socket.create_connection((host, port), timeout=5.0).close()


def test_private_parts_of_jax_are_used_in_one_file_alone():
  here = pathlib.Path(jax_runtime.__file__).parent
  private = re.compile(r"^\s*(from|import) jax\.(_src|experimental)", re.M)
  using = {p.name for p in here.glob("*.py") if private.search(p.read_text())}
  assert using == {"jax_runtime.py"}
