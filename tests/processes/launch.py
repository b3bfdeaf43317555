"""Runs a function in several JAX processes on loopback, and ends every one.

``run(fn, processes=2)`` starts the processes, waits until a deadline, and returns
what ``fn`` returned in each. Run as a script, this file is such a process.

Nothing here listens beyond loopback: neither JAX's coordinator, which would bind
every interface, nor gloo, which would bind the address of the host's name. No
process outlives the call: each is killed when the call ends, ends itself at the
deadline (with a traceback of where it waits) and when its parent is gone.
"""

import dataclasses
import faulthandler
import importlib.util
import inspect
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

HOST = "127.0.0.1"
# Seconds until all processes are there: they import JAX on a busy machine.
_BEGINNING = 300.0


class ProcessError(RuntimeError):
  """A process failed, or did not finish by the deadline."""


@dataclasses.dataclass(frozen=True)
class _Job:
  """What a process is told; it finds it pickled in its directory."""

  path: str
  name: str
  args: tuple[Any, ...]
  index: int
  processes: int
  port: int
  deadline: float  # To have begun; the system's time, which all share.
  timeout: float  # Seconds for the function.


def run(
  fn: Callable[..., Any],
  *args: Any,
  processes: int,
  devices: int = 1,
  timeout: float = 300.0,
) -> list[Any]:
  """Calls ``fn(*args)`` in ``processes`` JAX processes at once.

  Args:
    fn: a function at the top level of its file, which each process imports.
    *args: arguments that can be pickled.
    processes: the number of processes.
    devices: the number of CPU devices of each.
    timeout: seconds until those that still run are killed, once all are there.

  Returns:
    What ``fn`` returned, in order of the processes.

  Raises:
    ProcessError: if a process fails or is not done in time; names which, and
      shows what all of them wrote.
  """
  # Not in the processes before they have begun to wait for each other.
  from optax_dist.coordinator.transport import addresses

  deadline = time.time() + _BEGINNING
  (port,) = addresses.free_ports()
  with tempfile.TemporaryDirectory() as folder:
    homes = [pathlib.Path(folder) / str(i) for i in range(processes)]
    children: list[subprocess.Popen] = []
    try:
      for i, home in enumerate(homes):
        home.mkdir()
        job = _Job(
          path=inspect.getfile(fn),
          name=fn.__name__,
          args=args,
          index=i,
          processes=processes,
          port=port,
          deadline=deadline,
          timeout=timeout,
        )
        (home / "job").write_bytes(pickle.dumps(job))
        children.append(_start(home, devices))
      _wait(children, homes, deadline + timeout)
    finally:
      codes = [child.poll() for child in children]
      for child in children:
        child.kill()
        child.wait()
        if child.stdin:
          child.stdin.close()
    if any(codes) or None in codes:
      raise ProcessError(_report(fn, codes, homes, timeout))
    return [pickle.loads((home / "result").read_bytes()) for home in homes]


def _start(home: pathlib.Path, devices: int) -> subprocess.Popen:
  env = {k: v for k, v in os.environ.items() if "_proxy" not in k.lower()}
  env |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": str(devices),
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
  }
  with open(home / "output", "wb") as output:
    return subprocess.Popen(
      [sys.executable, "-W", "error", __file__, str(home)],
      env=env,
      stdin=subprocess.PIPE,  # Its end tells the process that we are gone.
      stdout=output,
      stderr=subprocess.STDOUT,
    )


def _wait(
  children: list[subprocess.Popen], homes: list[pathlib.Path], deadline: float
) -> None:
  """Waits for all; once one has failed, no longer for the others."""
  # A process ends itself at the deadline, with a traceback: leave it the time.
  end = deadline + 20.0
  while time.time() < end:
    codes = [child.poll() for child in children]
    if None not in codes:
      return
    # One that has its result only ended because the others did not: they began
    # later, and say where they hang at their own deadline.
    if any(
      code and not (home / "result").exists()
      for code, home in zip(codes, homes, strict=True)
    ):
      # The others may be about to say more about the same cause.
      end = min(end, time.time() + 1.0)
    time.sleep(0.02)


def _report(fn, codes, homes, timeout) -> str:
  def fate(code, home):
    if code == 0:
      return "finished"
    if (home / "result").exists():
      return "finished and waited for the others"
    if code is None:
      return "was still running and was killed"
    return f"ended with exit code {code}"

  lines = [f"{fn.__name__} did not finish in every process ({timeout:g} s)."]
  for i, (code, home) in enumerate(zip(codes, homes, strict=True)):
    lines.append(
      f"--- Process {i} of {len(codes)} {fate(code, home)}. Its output:"
    )
    lines.append((home / "output").read_text(errors="replace").rstrip())
  return "\n".join(lines)


# --- In the process ----------------------------------------------------------


def _main(home: pathlib.Path) -> None:
  threading.Thread(target=_end_with_parent, daemon=True).start()
  job: _Job = pickle.loads((home / "job").read_bytes())
  left = max(0.1, job.deadline - time.time())
  faulthandler.dump_traceback_later(left, exit=True)
  initialize(job.port, job.processes, job.index, left)
  # What it imports belongs to its beginning, and is slow on a busy machine.
  fn = getattr(_imported(job.path), job.name)
  faulthandler.dump_traceback_later(job.timeout, exit=True)
  result = fn(*job.args)
  (home / "result").write_bytes(pickle.dumps(result))


def _end_with_parent() -> None:
  os.read(sys.stdin.fileno(), 1)
  os._exit(1)


def _imported(path: str) -> Any:
  # As pytest does, for the helpers that lie beside the file and above it.
  here = pathlib.Path(path).parent
  sys.path[:0] = [str(here), str(here.parent)]
  spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def initialize(port: int, processes: int, index: int, timeout: float) -> None:
  """Makes one JAX program of processes; nothing leaves loopback."""
  import jax
  from jax._src import distributed, xla_bridge
  from jax.extend import backend
  from jaxlib import _jax

  address = f"{HOST}:{port}"
  jax.distributed.initialize(
    coordinator_address=address,
    coordinator_bind_address=address,
    num_processes=processes,
    process_id=index,
    cluster_detection_method="deactivate",
    initialization_timeout=max(1, int(timeout)),
  )

  def cpu_client():
    return xla_bridge.make_cpu_client(
      _jax.make_gloo_tcp_collectives(
        distributed_client=distributed.global_state.client, hostname=HOST
      )
    )

  backend.register_backend_factory("cpu", cpu_client, fail_quietly=False)
  assert len(jax.devices()) == processes * jax.local_device_count()


if __name__ == "__main__":
  # Pickles name this module as it is imported by who starts the process.
  sys.modules["launch"] = sys.modules["__main__"]
  try:
    _main(pathlib.Path(sys.argv[1]))
  except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # At a normal exit JAX would wait for the other processes.
