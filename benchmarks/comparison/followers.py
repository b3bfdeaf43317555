r"""Steps per second of a leader with many followers, who compute nothing.

    python benchmarks/comparison/followers.py --followers 256

One process is a replica like any other, and the leader; another one has all
followers in one loop: each submits the same gradient as soon as a step is
committed, over a connection of its own with the transport's handshake and
frames. They take part in every step, and hold no state.

With `--freeze` the leader calls `gc.freeze()` when all have joined: the garbage
collector then passes over what JAX has made no more.
"""

import argparse
import gc
import itertools
import os
import resource
import select
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import processes
import side_by_side
from side_by_side import Line

COUNTS = (16, 64, 256)
_RECORDED, _COMMITTED = b"Recorded", b"Committed"
_FRAME = struct.Struct("<IBQ")  # The head of a frame: its length comes first.


def lines(args: argparse.Namespace) -> Iterator[Line]:
  """Yields steps per second by the number of followers, and how they grow."""
  times = {}
  for count in COUNTS:
    options = {"followers": count, "seconds": args.seconds}
    said = [
      side_by_side.run("followers.py", options, 90.0)
      for _ in range(args.repeats)
    ]
    rate = max(side_by_side.values(said, "steps_per_second"))
    times[count] = 1 / rate
    yield Line(
      f"leader with {count} followers",
      rate,
      "steps/s",
      ratio=rate,
      note=f"(leader: {1e3 * said[0]['cpu_seconds_per_step']:.2f} ms of CPU)",
    )
  for few, many in itertools.pairwise(COUNTS):
    grown = times[many] / times[few] / (many / few)
    yield Line(
      f"time from {few} to {many} followers, by their number",
      times[many] / times[few],
      "times",
      "the number grows",
      many / few,
      grown,
      (0.0, 1.0),
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
  """Runs the store, the leader and its followers."""
  from optax_dist.coordinator.store import process as store_process

  with (
    tempfile.TemporaryDirectory() as folder,
    store_process.start(b"", bind=processes.HOST, port=0) as store,
    processes.group(args.timeout) as group,
  ):
    common = [
      *(sys.executable, os.path.abspath(__file__), *sys.argv[1:]),
      *("--address", store.address.partition(",")[0]),
      *("--told", f"{folder}/told"),
    ]
    env = {"JAX_PLATFORMS": "cpu"}
    leader = group.start("leader", [*common, "--role", "leader"], env)
    group.wait_for(leader)
    followers = group.start("followers", [*common, "--role", "followers"], env)
    group.wait_for(followers)
    group.go(leader, followers)
    return group.wait_for(leader)


# --- In a process ------------------------------------------------------------


def _lead(args: argparse.Namespace) -> None:
  told = processes.end_with_parent()
  import jax.numpy as jnp
  import optax

  from optax_dist import coordinator
  from optax_dist.coordinator.protocol import messages

  grads = jnp.ones(args.params, jnp.float32)
  with coordinator.join(
    optax.sgd(0.01),
    grads,
    total_num_replicas=args.followers + 1,
    coordinator_address=args.address,
    replica=0,
    start_store=False,
    timeout=60.0,
  ) as replica:
    config, driver = replica._participant.config, replica._participant.driver
    hello = messages.Hello(
      config.agreement,
      1,
      "127.0.0.1:1",
      *(-1, -1, -1, 1),
    )
    with open(args.told, "wb") as file:
      file.write(messages.MESSAGES.encode(hello))
    with open(f"{args.told}.leader", "w") as file:
      print(config.process, config.address, driver._nonce, file=file)
    processes.say(ready=True)
    told.wait()
    for _ in range(3):
      replica.step(grads)
    if args.freeze:
      gc.collect()
      gc.freeze()
    used, steps, begin = processes.used(), 0, time.monotonic()
    while time.monotonic() < begin + args.seconds:
      steps += replica.step(grads).accepted
    seconds = time.monotonic() - begin
    used = {k: v - used[k] for k, v in processes.used().items()}
    processes.say(
      followers=args.followers,
      steps=steps,
      seconds=seconds,
      steps_per_second=steps / seconds,
      cpu_seconds_per_step=used["cpu_seconds"] / max(1, steps),
    )
    processes.leave()


class _Follower:
  """A connection that submits a gradient after each commit."""

  def __init__(self, number: int, leader: str, path: str, key: bytes):
    from optax_dist.coordinator.transport import handshake

    self.sock = socket.socket(socket.AF_UNIX)
    self.sock.connect("\0" + path)
    shake = handshake.Handshake(key, f"z-light-{number:04}", wanted=leader)
    while output := b"".join(shake.output()):
      self.sock.sendall(output)
      shake.sent(len(output))
      while not (shake.done or shake.output()):
        shake.received(self.sock.recv_into(shake.room()[0]))
        if shake.undecided:
          shake.use()
    self.came, self.steps = b"", 0

  def say(self, frame: bytes) -> None:
    if self.sock.send(frame) < len(frame):
      raise BlockingIOError("the leader does not read")

  def commits(self, room: memoryview) -> int:
    """How many steps were committed, of what there is to read.

    Args:
      room: where to read to; all followers use the same, one after the other.
    """
    got = self.sock.recv_into(room)
    if not got:
      raise ConnectionError("the leader has left")
    if self.came:
      data = memoryview(self.came + room[:got])
    else:
      data = room[:got]
    found = start = 0
    while (body := start + _FRAME.size) <= len(data):
      end = body + _FRAME.unpack_from(data, start)[0]
      if end > len(data):
        break
      head = bytes(data[body : min(end, body + 120)])
      found += _RECORDED in head and _COMMITTED in head
      start = end
    self.came = bytes(data[start:])
    return found


def _frame(parts: list[bytes]) -> bytes:
  """A message as it is written where nothing is signed: the same for all."""
  from optax_dist.coordinator.transport import session
  from optax_dist.coordinator.transport import shared_memory as memory

  made = session.Session("", memory.Pool(), lambda event: None)
  made.start(None, process=0)
  made.send(parts)
  return b"".join(made.output())


def _follow(args: argparse.Namespace) -> None:
  told = processes.end_with_parent()
  import msgspec

  from optax_dist.coordinator.protocol import messages
  from optax_dist.coordinator.transport import handshake

  _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
  with open(f"{args.told}.leader") as file:
    leader, address, nonce = file.read().split()
  with open(args.told, "rb") as file:
    hello = messages.MESSAGES.decode(file.read())
  unix = next(w for w in address.split(",") if w.startswith("unix:"))
  key = handshake.job_key(b"", nonce.encode())
  selector = select.epoll()
  encode = messages.MESSAGES.encode
  all_: dict[int, _Follower] = {}
  for number in range(1, args.followers + 1):
    one = _Follower(number, leader, unix.removeprefix("unix:"), key)
    one.say(_frame([encode(msgspec.structs.replace(hello, replica=number))]))
    selector.register(one.sock, select.EPOLLIN)
    all_[one.sock.fileno()] = one
  processes.say(ready=True)
  told.wait()
  payload = bytes(-(-args.params // 16) * 64)

  def arrival(step: int) -> bytes:
    return _frame(
      [
        encode(
          messages.Arrive(
            step, step, 1, 1, True, step, None, payload, "[]", None
          )
        )
      ]
    )

  latest, frame = 0, arrival(0)
  for one in all_.values():
    one.say(frame)
  room = memoryview(bytearray(1 << 18))
  while True:
    for ready, _ in selector.poll():
      one = all_[ready]
      commits = one.commits(room)
      if commits:
        one.steps += commits
        if one.steps > latest:
          latest, frame = one.steps, arrival(one.steps)
        one.say(frame)


def _main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--followers", type=int, default=256)
  add("--params", type=int, default=16)
  add("--seconds", type=float, default=3.0)
  add("--timeout", type=float, default=80.0)
  add("--freeze", action="store_true", help="gc.freeze() in the leader")
  for name in ("--role", "--address", "--told"):
    add(name, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.role is None:
    processes.launch(apart=False)
    processes.say(**measure(args))
  elif args.role == "leader":
    _lead(args)
  else:
    _follow(args)


if __name__ == "__main__":
  _main()
