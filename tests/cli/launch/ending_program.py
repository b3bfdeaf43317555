"""A replica of a small run that ends in one of the ways that there are."""

import atexit
import os
import pathlib
import signal
import sys
import time


def _end(how):
  """Ends this process."""
  print("ends", flush=True)
  match how:
    case "killed":
      os.kill(os.getpid(), signal.SIGKILL)
    case "exits":
      os._exit(0)
    case "raises":
      raise ValueError("no data")
    case "raises-and-is-slow":
      atexit.register(time.sleep, 0.5)  # The launcher has heard of the end.
      atexit.register(_wait_for, pathlib.Path(sys.argv[1]) / "over-0")
      raise ValueError("no data")
    case _:
      sys.exit(int(how))


def _wait_for(path):
  while not path.exists():
    time.sleep(0.01)


def _evaluate(replica, how):
  """Has the launcher stopped, and takes no step until it looks at `preempted`."""
  if not replica.processes.index:
    os.kill(os.getppid(), signal.SIGTERM)
  while how == "sleeps" or not replica.preempted:
    time.sleep(0.01)
  print("saves", flush=True)


def main():
  """A replica, or "all", ends at a time in a way; only its first start, if once."""
  number = os.environ["OPTAX_DIST_REPLICA"]
  restarts = os.environ["OPTAX_DIST_RESTARTS"]
  folder, which, when, how, *once = sys.argv[1:]
  folder = pathlib.Path(folder)
  ends = which in (number, "all") and not (once and int(restarts))
  if ends and how == "hangs":
    time.sleep(600)
  if ends and when == "imports":
    _end(how)
  if ends and when == "last":
    _wait_for(folder / "leaves")

  import jax.numpy as jnp
  import optax

  from optax_dist import coordinator

  coordinator.initialize_processes()
  if ends and when == "model" and os.environ["OPTAX_DIST_PROCESS_INDEX"] == "1":
    _end(how)
  timeout = float(os.environ.get("ENDING_TIMEOUT", "300"))
  replica = coordinator.join(optax.sgd(0.5), jnp.zeros(2), timeout=timeout)
  print("joined", flush=True)
  (folder / f"joined-{number}-{restarts}").touch()
  if when == "run" and restarts == "0":
    _wait_for(folder / "joined-0-0")
    _wait_for(folder / "joined-1-0")
  if when == "forgets":
    while replica.global_step < 3:
      replica.step(jnp.ones(2))
    return
  with replica:
    if when == "waits":
      replica.step(jnp.ones(2))
      if ends:  # Nobody gets its next gradient.
        _evaluate(replica, "sleeps")
      outcome = replica.step(jnp.ones(2))
      print("leaves", outcome.finished, replica.global_step, flush=True)
      return
    if when == "signal":
      # It reaches the last process alone.
      replica.step(jnp.ones(2))
      if replica.processes.index == replica.processes.count - 1:
        os.kill(os.getpid(), signal.SIGTERM)
      while replica.global_step < 3000 and not replica.finished:
        replica.step(jnp.ones(2))
      print("leaves", replica.has_left, replica.preempted, flush=True)
      return
    if when == "last" and not ends:
      replica.step(jnp.ones(2))
      (folder / "leaves").touch()
      return
    if when == "evaluation":
      replica.step(jnp.ones(2))
      _evaluate(replica, how)
    steps = 0
    while replica.global_step < 8 and not replica.finished:
      outcome = replica.step(jnp.ones(2))
      steps += 1
      if ends and when == "run" and steps == 2:
        _end(how)
      if once and not ends and steps == 4 and restarts == "0":
        # The other one comes back before the end.
        _wait_for(folder / f"joined-{which}-1")
      print("members", *outcome.members, flush=True)
    replica.finish()
    (folder / f"over-{number}").touch()
    if when == "end":
      _wait_for(folder / "over-0")
      _wait_for(folder / "over-1")
      time.sleep(0.3)  # The launcher has heard of the end.
      if ends:
        _end(how)


if __name__ == "__main__":
  main()
