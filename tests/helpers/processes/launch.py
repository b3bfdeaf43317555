"""Runs a function in several JAX processes on loopback, and ends every one."""

from __future__ import annotations

import os
import pathlib
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import workers

from optax_dist.coordinator.extras.groups import jax_program
from optax_dist.coordinator.transport import addresses

# Seconds until all processes are there: they import JAX on a busy machine.
_BEGINNING = 300.0


class ProcessError(RuntimeError):
  """A process failed, or did not finish by the deadline."""


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
  (port,) = addresses.free_ports()
  with tempfile.TemporaryDirectory() as folder:
    started = [
      workers.Worker(
        f"process {index} of {processes}",
        _call,
        {
          "fn": fn,
          "args": args,
          "address": f"127.0.0.1:{port}",
          "processes": processes,
          "index": index,
        },
        pathlib.Path(folder) / f"{index}.log",
        jax_platforms="cpu",
        jax_num_cpu_devices=devices,
        jax_cpu_collectives_implementation="gloo",
        jax_numpy_dtype_promotion="strict",
        jax_numpy_rank_promotion="raise",
      )
      for index in range(processes)
    ]
    try:
      return _results(fn, started, timeout)
    finally:
      for one in started:
        one.kill()


def _results(
  fn: Callable[..., Any], started: Sequence[workers.Worker], timeout: float
) -> list[Any]:
  begun: set[workers.Worker] = set()
  results: dict[workers.Worker, Any] = {}
  end = time.monotonic() + _BEGINNING
  while left := [one for one in started if one not in results]:
    ready = workers.wait_for_messages(left, max(0.0, end - time.monotonic()))
    ended = not ready
    for one in ready:
      said, closed = one.read()
      for event in said:
        if event["event"] == "begun":
          begun.add(one)
          if len(begun) == len(started):
            end = time.monotonic() + timeout
        else:
          results[one] = event["result"]
      ended = ended or (closed and one not in results)
    if ended:
      words = []
      for one in left:
        # It may be about to say more about the same cause.
        if one.wait(1.0) is None:
          one.where()
        words.append(f"--- {one.name} {one.ending()}")
      raise ProcessError(
        "\n".join([f"{fn.__name__} did not end in each in time.", *words])
      )
  return [results[one] for one in started]


def _call(
  channel: workers.Channel,
  fn: Callable[..., Any],
  args: Sequence[Any],
  address: str,
  processes: int,
  index: int,
) -> None:
  channel.obey(lambda told: None)  # It ends with its parent.
  # Nothing goes over a proxy here.
  for name in [name for name in os.environ if "_proxy" in name.lower()]:
    del os.environ[name]
  warnings.simplefilter("error")
  jax_program.initialize(address, index, processes)
  channel.say("begun")
  channel.say("result", result=fn(*args))
  # If it ended now, JAX would end the others before they have a result.
  threading.Event().wait()
