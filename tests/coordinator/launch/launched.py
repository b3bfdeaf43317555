"""A launched replica for the tests: its arguments say what to do."""

import os
import pathlib
import signal
import sys
import threading
import time

from optax_dist.coordinator.launch import channel as channels
from optax_dist.coordinator.launch import environment


def main() -> int:
  channel = channels.Channel()
  what = sys.argv[1]
  channel.say("pid", pid=os.getpid())
  place = environment.Environment.read()
  replica, incarnation = place.replica, place.restarts
  channel.say("placed", replica=replica, incarnation=incarnation)
  if what == "die":
    wait_for_all(pathlib.Path(sys.argv[2]), replica)
  if what == "sleep":
    time.sleep(300)
  if what == "stop":
    if replica == 1:
      signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    time.sleep(300)
  if what == "fail" and replica == 1:
    print("the disk of replica one is full")
    return 3
  if what == "die" and replica == 1 and incarnation == 0:
    os.kill(os.getpid(), signal.SIGKILL)
  if what == "always" and replica == 1:
    os.kill(os.getpid(), signal.SIGKILL)
  if what in ("fail", "always") or (what == "die" and replica == 0):
    time.sleep(300)
  if what == "train":
    train(channel)
  channel.say("finished")
  return 0


def wait_for_all(folder: pathlib.Path, replica: int) -> None:
  """Waits until both replicas have their places: the run may end then."""
  (folder / str(replica)).touch()
  while not all((folder / name).exists() for name in ("0", "1")):
    time.sleep(0.01)


def train(channel: channels.Channel) -> None:
  import jax
  import jax.numpy as jnp
  import optax

  from optax_dist import coordinator

  grad = jax.jit(lambda p: p * 0.5)
  with coordinator.join(
    optax.sgd(0.1),
    jnp.ones(8),
    start_store=False,
    replicas_to_aggregate=1,
    timeout=60.0,
  ) as replica:
    end = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end and not replica.finished:
      replica.step(grad(replica.params))
      channel.say("step", step=replica.global_step)
      time.sleep(0.01)
    replica.finish()


if __name__ == "__main__":
  raise SystemExit(main())
