"""A replica that hardly needs more than Python; its arguments say what it does."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

_SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]


def _take_part(line):
  """Says that it has joined a run, and left it: then it may end."""
  line.sendall(b'{"event": "joined"}\n{"event": "left"}\n')


def _sleep():
  print("sleeps", flush=True)
  time.sleep(300)


def _stop(number, frame):
  print("leaves", flush=True)
  sys.exit(0)


def _hear(number, frame):
  print("hears", flush=True)


def _end_together(sign, died):
  """Waits until the replica that died has started again."""
  if died:
    pathlib.Path(sign).touch()
  while not os.path.exists(sign):
    time.sleep(0.01)


def main():
  variables = {
    name.removeprefix("OPTAX_DIST_"): value
    for name, value in os.environ.items()
    if name.startswith("OPTAX_DIST_")
  }
  if "STANDBY" in variables:
    print("stands by", flush=True)
    time.sleep(300)
  replica, restarts = int(variables["REPLICA"]), int(variables["RESTARTS"])
  process = int(variables.get("PROCESS_INDEX", "0"))
  line = socket.socket(fileno=int(variables["CHANNEL"]))
  match sys.argv[1:]:
    case ["environment", *rest]:
      for name in ("CHANNEL", "LAUNCH"):
        del variables[name]
      print(rest, sorted(variables.items()))
      _take_part(line)
    case ["compiled"]:
      names = (
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
      )
      print([os.environ.get(name) for name in names])
      _take_part(line)
    case ["killed-twice", _] if replica == 0 and restarts < 2:
      os.kill(os.getpid(), signal.SIGKILL)
    case ["killed-twice", sign]:
      _end_together(sign, replica == 0)
      _take_part(line)
    case ["fail", which] if replica == int(which):
      print("no disk", file=sys.stderr)
      sys.exit(9)
    case ["die-once", _] if replica == 1 and process == 1 and not restarts:
      print("dies", flush=True)
      os.kill(os.getpid(), signal.SIGKILL)
    case ["die-once", _] if not restarts and replica == 1:
      _sleep()
    case ["die-once", sign]:
      _end_together(sign, replica == 1)
      _take_part(line)
      print("ends")
    case ["fail-quietly"]:
      line.sendall(b'{"event": "failed", "reason": "all were removed"}\n')
    case ["fail-late"]:
      line.sendall(b'{"event": "joined"}\n')
      # By the one that fails: if the other one came first and said so, this one
      # could be too late to count.
      if replica:
        line.sendall(b'{"event": "finished"}\n')
        sys.exit(4)
    case ["grace"]:
      signal.signal(signal.SIGTERM, _stop)
      line.sendall(b'{"event": "joined"}\n')
      _sleep()
    case ["half", *joins] if process:
      if joins:
        line.sendall(b'{"event": "joined"}\n')
      print("has nothing to do")
    case ["half", *_]:
      _sleep()
    case ["fail-in-turn", sign]:
      line.sendall(b'{"event": "joined"}\n')
      _end_together(sign, not process)
      if process:
        time.sleep(0.3)  # Its own end takes longer.
        sys.exit("no data")
      line.sendall(b'{"event": "failed", "reason": "process 1 is lost"}\n')
      sys.exit("process 1 is lost")
    case ["twice"]:
      line.sendall(b'{"event": "joined"}\n{"event": "finished"}\n')
      line.sendall(b'{"event": "failed", "reason": "", "final": "missed"}\n')
      sys.exit(3)
    case ["jax-distributed"]:
      import jax

      from optax_dist.coordinator.transport import addresses

      # A program of its own: what becomes of signals is the same.
      (port,) = addresses.free_ports()
      jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
      # JAX takes SIGTERM for the notice of a preemption, and goes on.
      _sleep()
    case ["drops"]:
      try:
        _sleep()
      except KeyboardInterrupt:
        print("goes on", flush=True)
        _sleep()
    case ["deaf"]:
      line.sendall(b'{"event": "joined"}\n')
      signal.signal(signal.SIGTERM, signal.SIG_IGN)
      subprocess.Popen(_SLEEP)
      signal.signal(signal.SIGTERM, _hear)
      _sleep()
    case ["user-signal"]:
      signal.signal(signal.SIGUSR1, _stop)
      _take_part(line)
      _sleep()
    case _:
      print("does nothing")
      _take_part(line)


if __name__ == "__main__":
  main()
