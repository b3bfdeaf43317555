import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest

from optax_dist.coordinator import engine, jax_runtime, service


def _gone(pid: int, within: float) -> bool:
  """Whether the process has ended; a zombie of another parent counts."""
  end = time.monotonic() + within
  while time.monotonic() < end:
    try:
      with open(f"/proc/{pid}/stat") as f:
        if f.read().rpartition(")")[2].split()[0] == "Z":
          return True
    except FileNotFoundError:
      return True
    time.sleep(0.02)
  return False


def test_a_service_serves_until_it_is_stopped():
  with service.start("127.0.0.1:0", 2) as hosted:
    board = jax_runtime.connect_board(hosted.address, 1)
    assert board.put("a", b"x")
    # The number may come back, though it never said that it had gone.
    again = jax_runtime.connect_board(hosted.address, 1)
    assert again.get("a", 1.0) == b"x"
    assert board.get("a", 1.0) == b"x"
    again.close()
    board.close()
    with pytest.raises(ValueError, match="at most 1; got 5"):
      jax_runtime.connect_board(hosted.address, 5)
    # A second one at the address would silently share its connections.
    with pytest.raises(RuntimeError, match="Address already in use"):
      service.start(hosted.address, 2)
  assert hosted.process.returncode == 0
  started = time.monotonic()
  with pytest.raises(engine.EngineTimeout, match="No coordination service"):
    jax_runtime.connect_board(hosted.address, 0, timeout=0.5)
  assert time.monotonic() - started < 2.0
  # Connections that linger do not keep the next one from the address.
  with service.start(hosted.address, 1) as hosted:
    board = jax_runtime.connect_board(hosted.address, 0)
    assert board.try_get("a") is None
    board.close()


def test_a_board_outlives_its_service_with_an_error():
  hosted = service.start("127.0.0.1:0", 1)
  # One that is closed before the service ends is not ended by JAX.
  board = jax_runtime.connect_board(hosted.address, 0)
  board.close()
  hosted.process.kill()
  hosted.stop()
  with pytest.raises(engine.BoardLost, match="closed"):
    board.put("a", b"x")
  board.close()


def test_replicas_may_come_before_the_service_is_ready():
  address = f"127.0.0.1:{service._free_port('127.0.0.1')}"
  code = (
    "import sys; from optax_dist.coordinator import jax_runtime;"
    "b = jax_runtime.connect_board(sys.argv[1], int(sys.argv[2]));"
    "b.put('came/' + sys.argv[2], b'');"
    "b.get('go', 20.0); b.close()"
  )
  env = os.environ | {"JAX_PLATFORMS": "cpu"}
  # As behind a company's proxy, which is not to be asked for loopback.
  env |= {"http_proxy": "http://127.0.0.1:9", "no_proxy": "example.org"}
  early = [
    subprocess.Popen([sys.executable, "-c", code, address, str(i)], env=env)
    for i in range(2)
  ]
  try:
    with service.start(address, 3):
      board = jax_runtime.connect_board(address, 2)
      for i in range(2):
        board.get(f"came/{i}", 20.0)
      board.put("go", b"")
      assert [process.wait(20.0) for process in early] == [0, 0]
      board.close()
  finally:
    for process in early:
      process.kill()
      process.wait()


@pytest.mark.parametrize("lifeline", [True, False])
def test_a_service_ends_with_its_parent_if_it_is_to(lifeline):
  code = (
    "import os, sys; from optax_dist.coordinator import service;"
    f"s = service.start('127.0.0.1:0', 1, lifeline={lifeline});"
    "print(s.pid, flush=True); os.kill(os.getpid(), 9)"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60
  )
  pid = int(done.stdout)
  try:
    assert _gone(pid, 5.0 if lifeline else 0.5) == lifeline
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, 9)


def test_a_service_ends_when_nobody_has_been_there_for_long():
  hosted = service.start("127.0.0.1:0", 2, lifeline=False, idle=1.0)
  try:
    board = jax_runtime.connect_board(hosted.address, 1)
    assert not _gone(hosted.pid, 2.0)
    board.put("a", b"x")
    board.close()
    del board
    assert _gone(hosted.pid, 10.0)
    assert hosted.process.wait(5.0) == 0
  finally:
    hosted.stop()


def test_what_can_not_be_served_is_refused():
  with pytest.raises(ValueError, match="host:port"):
    service.start("29400", 1)
  with pytest.raises(ValueError, match="at least 1; got 0"):
    service.start("127.0.0.1:0", 0)
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(OSError, match=f"127.0.0.1:{port}.*another address"):
      service.serve(f"127.0.0.1:{port}", 1)
    # Something else answers there.
    with pytest.raises(engine.EngineTimeout, match="admitted no client"):
      jax_runtime.connect_board(f"127.0.0.1:{port}", 0, timeout=1.0)
  with pytest.raises(TimeoutError, match="not ready within"):
    service.start("127.0.0.1:0", 1, timeout=0.05)


def test_importing_it_starts_no_backend():
  code = (
    "from optax_dist.coordinator import service;"
    "from jax._src import xla_bridge;"
    "raise SystemExit(xla_bridge.backends_are_initialized())"
  )
  assert (
    subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
  )
