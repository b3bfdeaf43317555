"""A launched replica for the tests: its arguments say what to do."""

import os
import pathlib
import signal
import sys
import time

from optax_dist.coordinator.launch import channel as channels
from optax_dist.coordinator.launch import environment


def main() -> int:
  channel = channels.current()
  what = sys.argv[1]
  place = environment.ProcessEnvironment.read()
  replica, incarnation = place.replica, place.restarts
  print("placed", replica, incarnation, os.getpid(), flush=True)
  if what == "sleep":
    time.sleep(300)
  if what == "alone":
    folder = pathlib.Path(sys.argv[2])
    if replica != 1 or incarnation:
      wait_for(folder, str(replica), "trained")
      train(0.5)
    else:
      train(60.0, lambda: (folder / "trained").touch())
  if what == "end-if-standby":
    if place.standby:
      return 3
    channel.say("joined")
    wait_for(pathlib.Path(sys.argv[2]), str(replica), "said")
    channel.say("left")
    return 0
  if what == "stand-by-in-turn":
    in_turn(pathlib.Path(sys.argv[2]), place)
    return 0
  if what == "malloc":
    print(
      "malloc",
      *(
        f"{k}={v}"
        for k, v in sorted(os.environ.items())
        if k.startswith("MALLOC_")
      ),
      flush=True,
    )
    channel.say("joined")
    channel.say("left")
    return 0
  if what == "both-die":
    die_with_the_coordinator()
    return 0
  if what == "stand-by":
    stand_by(pathlib.Path(sys.argv[2]), place)
    return 0
  if what == "train":
    train(float(sys.argv[2]))
  channel.say("finished")
  return 0


def wait_for(folder: pathlib.Path, mine: str, *names: str) -> None:
  """Writes a file, and waits until others have written theirs."""
  (folder / mine).touch()
  while not all((folder / name).exists() for name in names):
    time.sleep(0.01)


def in_turn(
  folder: pathlib.Path, place: environment.ProcessEnvironment
) -> None:
  """Replicas end once three processes stand by, of which one starts at a time."""
  channel = channels.current()
  if place.standby:
    starting = folder / "starting"
    starting.touch(exist_ok=False)
    time.sleep(0.3)
    starting.unlink()
    (folder / f"{os.getpid()} stands by").touch()
    channels.stand_by(channel)
  channel.say("joined")
  until = time.monotonic() + 60.0
  while len([*folder.glob("* stands by")]) < 3 and time.monotonic() < until:
    time.sleep(0.01)
  channel.say("left")


def die_with_the_coordinator() -> None:
  """Replica 1 kills the coordinator and itself; the other one goes on."""
  import jax.numpy as jnp
  import optax

  from optax_dist import coordinator

  with coordinator.join(
    optax.sgd(0.1),
    jnp.ones(3),
    timeout=300.0,
    silence_timeout=100.0,
    lower_on_loss=True,
  ) as replica:
    for step in range(8):
      if step == 4 and replica.replica == 1:
        os.kill(the_coordinator(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
      outcome = replica.step(jnp.ones(3))
    assert outcome.members == (0,)
    replica.finish()


def the_coordinator() -> int:
  """The process that this one's launcher has started."""
  for folder in pathlib.Path("/proc").iterdir():
    if folder.name.isdigit():
      try:
        parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        command = (folder / "cmdline").read_bytes()
      except OSError:
        continue
      if int(parent) == os.getppid() and b"coordinator.server" in command:
        return int(folder.name)
  raise LookupError("no coordinator")


def stand_by(
  folder: pathlib.Path, place: environment.ProcessEnvironment
) -> None:
  """Replica 1 dies once another process stands by, which takes its place."""
  import jax.numpy as jnp
  import optax

  from optax_dist import coordinator

  if place.standby:
    assert place.replica is None
    (folder / "stands by").touch()
  with coordinator.join(
    optax.sgd(0.1), jnp.ones(3), timeout=60.0, lower_on_loss=True
  ) as replica:
    print("joined", replica.replica, os.getpid(), flush=True)
    while not replica.finished:
      replica.step(jnp.ones(3))
      time.sleep(0.01)
      if replica.replica == 1 and not place.standby:
        while not (folder / "stands by").exists():
          replica.step(jnp.ones(3))
        os.kill(os.getpid(), signal.SIGKILL)
      if place.standby:
        now = environment.ProcessEnvironment.read()
        assert (now.replica, now.restarts, now.standby) == (1, 1, None)
        replica.finish()


def train(seconds, trained=None) -> None:
  """Trains until the run ends, or dies after three steps.

  Args:
    seconds: that it trains, and then ends the run.
    trained: called before it dies.
  """
  import jax
  import jax.numpy as jnp
  import optax

  from optax_dist import coordinator

  grad = jax.jit(lambda p: p * 0.5)
  with coordinator.join(
    optax.sgd(0.1),
    jnp.ones(8),
    start_coordinator=False,
    replicas_to_aggregate=1,
    timeout=60.0,
  ) as replica:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not replica.finished:
      replica.step(grad(replica.params))
      print("step", replica.global_step, flush=True)
      time.sleep(0.01)
      if trained is not None and replica.global_step == 3:
        trained()
        os.kill(os.getpid(), signal.SIGKILL)
    replica.finish()


if __name__ == "__main__":
  raise SystemExit(main())
