"""Starts the processes of one measurement, and ends every one of them.

Knows the standard library alone: it is also imported in the environments of the
libraries that are compared with.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import pathlib
import queue
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HOST = "127.0.0.1"
# For all that are compared, as `optax-dist launch` sets it: freed arrays of up to 64
# MiB stay with the process, and larger ones are of huge pages. Fresh small pages cost
# as much as the copies that are measured.
_KEEP_MEMORY = {
  "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
  "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
  "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


class Failed(RuntimeError):
  """A process failed, or said nothing before the deadline."""


@dataclasses.dataclass
class Process:
  """One process that was started.

  Attributes:
    name: for messages.
    popen: the process.
    output: where its standard error goes.
    said: what it printed that is not read yet; None at the end.
  """

  name: str
  popen: subprocess.Popen
  output: pathlib.Path
  said: "queue.Queue[str | None]"


class Group:
  """Processes that end together."""

  def __init__(self, folder: pathlib.Path, deadline: float):
    self._folder = folder
    self._deadline = deadline
    self._processes: list[Process] = []

  def start(
    self,
    name: str,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
  ) -> Process:
    """Starts a process that calls `end_with_parent`."""
    clean = {k: v for k, v in os.environ.items() if "_proxy" not in k.lower()}
    output = self._folder / f"{len(self._processes)}"
    with open(output, "wb") as errors:
      popen = subprocess.Popen(
        command,
        env={
          **_KEEP_MEMORY,
          **clean,
          "PYTHONUNBUFFERED": "1",
          "BENCHMARK_SECONDS": f"{self._left():.1f}",
          **(env or {}),
        },
        stdin=subprocess.PIPE,  # Its end tells the process that we are gone.
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
      )
    process = Process(name, popen, output, queue.Queue())
    self._processes.append(process)
    threading.Thread(target=_listen, args=(process,), daemon=True).start()
    return process

  def start_replicas(
    self, count: int, address: str, *more: str
  ) -> list[Process]:
    """Starts this program again, as so many replicas.

    Args:
      count: how many; each gets its number as ``--role``.
      address: that of the coordinator, for ``--address``.
      *more: further arguments.
    """
    command = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]
    return [
      self.start(
        f"replica {i}",
        [*command, "--role", str(i), "--address", address, *more],
        {"JAX_PLATFORMS": "cpu"},
      )
      for i in range(count)
    ]

  def wait_for(self, process: Process) -> dict[str, Any]:
    """Waits for the next line of JSON that a process prints.

    Raises:
      Failed: it, or another of the group, has failed, or the time is over.
    """
    while self._left() > 0:
      try:
        line = process.said.get(timeout=min(0.2, self._left()))
      except queue.Empty:
        for other in self._processes:
          # A process that was killed on purpose is not a failure.
          if other.popen.poll() not in (None, 0, -signal.SIGKILL):
            raise Failed(self._report(f"{other.name} failed.")) from None
        continue
      if line is None:
        raise Failed(self._report(f"{process.name} ended too early."))
      if line.startswith("{"):
        return json.loads(line)
    raise Failed(self._report(f"{process.name} said nothing in time."))

  def go(self, *processes: Process) -> None:
    """Lets processes that wait for `end_with_parent`'s event continue."""
    for process in processes:
      assert process.popen.stdin is not None
      process.popen.stdin.write("go\n")
      process.popen.stdin.flush()

  def end(self) -> None:
    """Kills everything that still runs, with what it has started itself."""
    for process in self._processes:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.popen.pid, signal.SIGKILL)
      process.popen.wait()

  def _left(self) -> float:
    return self._deadline - time.monotonic()

  def _report(self, message: str) -> str:
    lines = [message]
    for process in self._processes:
      text = process.output.read_text(errors="replace").rstrip()
      lines.append(f"--- {process.name}, code {process.popen.poll()}:")
      lines.extend(text.splitlines()[-25:])
    return "\n".join(lines)


@contextlib.contextmanager
def group(timeout: float) -> Iterator[Group]:
  """Yields a group that has ended when the block does.

  Args:
    timeout: seconds until its processes end themselves.
  """
  with tempfile.TemporaryDirectory() as folder:
    made = Group(pathlib.Path(folder), time.monotonic() + timeout)
    try:
      yield made
    finally:
      made.end()


def _listen(process: Process) -> None:
  assert process.popen.stdout is not None
  for line in process.popen.stdout:
    process.said.put(line)
  process.said.put(None)


def launch(apart: bool = True) -> None:
  """To be called by a program that starts a group, if it may itself be in one.

  Args:
    apart: whether to go on in a network of its own, with a loopback interface
      and no more. The libraries that are compared with listen on all interfaces,
      partly without an option. Where the system allows no such network, the
      program goes on where it is.
  """
  if apart:
    _go_apart()
  if "BENCHMARK_SECONDS" in os.environ:
    end_with_parent()


def _go_apart() -> None:
  if os.environ.setdefault("BENCHMARK_APART", "no") != "no":
    return
  within = ["unshare", "--map-root-user", "--net", "sh", "-c"]
  up = "ip link set lo up"
  with contextlib.suppress(OSError):
    if not subprocess.run([*within, up], capture_output=True).returncode:
      os.environ["BENCHMARK_APART"] = "yes"
      again = [sys.executable, *sys.argv]
      os.execvp(within[0], [*within, up + ' && exec "$@"', "sh", *again])
  print("No network apart: ports are open meanwhile.", file=sys.stderr)


# --- In a process ------------------------------------------------------------


def end_with_parent() -> threading.Event:
  """Ends this process when who started it is gone, or its time is over.

  Returns:
    What is set when who started it calls `Group.go`.
  """
  # Works also while native code holds the interpreter.
  left = float(os.environ.get("BENCHMARK_SECONDS", "600"))
  faulthandler.dump_traceback_later(max(0.1, left), exit=True)
  goes = threading.Event()
  threading.Thread(target=_wait_for_end, args=(goes,), daemon=True).start()
  return goes


def _wait_for_end(told: threading.Event) -> None:
  while os.read(sys.stdin.fileno(), 4096):
    told.set()
  os._exit(1)


def used() -> dict[str, float]:
  """What this process has used so far; other processes matter little to it."""
  result = resource.getrusage(resource.RUSAGE_SELF)
  return {
    "cpu_seconds": result.ru_utime + result.ru_stime,
    "page_faults": result.ru_minflt,
  }


class Memory:
  """Watches what this process takes from now on: of shared pages, its share."""

  def __init__(self, seconds: float = 0.002):
    """Looks every so many seconds, in a thread."""
    self._seconds = seconds
    self._before = self._peak = _memory()
    threading.Thread(target=self._watch, daemon=True).start()

  def most(self) -> int:
    """The most bytes since the last call, beyond those at the beginning."""
    peak, self._peak = self._peak, 0
    return peak - self._before

  def _watch(self) -> None:
    while True:
      self._peak = max(self._peak, _memory())
      time.sleep(self._seconds)


def _memory() -> int:
  lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
  (share,) = [line.split()[1] for line in lines if line.startswith("Pss:")]
  return 1024 * int(share)


def say(**fields: Any) -> None:
  """Prints a line that `Group.wait_for` reads."""
  print(json.dumps(fields), flush=True)


def leave() -> None:
  """Ends this process at once: not all libraries do so by themselves."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(0)
