"""Time of a step of one program over two hosts: `psum` over `jax.distributed`.

A step is what it is in `replicas.py` with `--latency constant:SECONDS`: each host
sleeps, which stands for computing; then one compiled program has the gradient, its
mean by `psum` over gloo, and the update. If a host fails, all do.

    python benchmarks/comparison/psum_peer.py --params 10000000 --latency 0.1
"""

import argparse
import os
import socket
import time
from typing import Any

import between_hosts
import peers
import processes

PORT = 29500
WARM_UP = 5


def measure(args: argparse.Namespace) -> dict[str, Any]:
  """Runs a process on each of two hosts.

  Args:
    args: those of the command line.

  Returns:
    The time of a step, with what was measured.

  Raises:
    processes.Failed: if a process fails or is not done in time.
  """
  more = {"steps": args.steps, "latency": args.latency}
  with (
    between_hosts.made(2, "bridge") as hosts,
    processes.group(args.timeout) as group,
  ):
    started = [
      group.start(
        f"psum {rank}",
        [
          *("ip", "netns", "exec", hosts.names[rank], "unshare", "--uts"),
          *peers.command(args, str(rank), address=hosts.address(0), **more),
          *("--own", hosts.address(rank)),
        ],
        {"JAX_PLATFORMS": "cpu"},
      )
      for rank in range(2)
    ]
    return group.wait_for(started[0])


# --- In a process ------------------------------------------------------------


def _play(args: argparse.Namespace) -> None:
  import jax
  import jax.numpy as jnp
  import optax
  from jax.sharding import Mesh, PartitionSpec

  # gloo listens where the host's name leads.
  socket.sethostname(args.own)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  place = f"{args.address}:{PORT}"
  jax.distributed.initialize(
    place,
    2,
    int(args.role),
    # By default, all addresses.
    coordinator_bind_address=place if args.role == "0" else None,
  )
  optimizer = optax.sgd(0.01)
  mesh = Mesh(jax.devices(), ("replicas",))
  everywhere = PartitionSpec()

  def init():
    params = jnp.ones(args.params, jnp.float32)
    return params, optimizer.init(params)

  def step(params, state):
    # Cast to vary: the gradient is each host's own, as in `replicas.py`.
    own = jax.lax.pcast(params, "replicas", to="varying")
    mean = jax.lax.psum(own * 1e-3, "replicas") / 2
    updates, state = optimizer.update(mean, state, params)
    return optax.apply_updates(params, updates), state

  sharding = jax.NamedSharding(mesh, everywhere)
  params, state = jax.jit(init, out_shardings=sharding)()
  step = jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(everywhere, everywhere),
      out_specs=(everywhere, everywhere),
    )
  )
  begin = 0.0
  for number in range(WARM_UP + args.steps):
    if number == WARM_UP:
      begin = time.monotonic()
    time.sleep(args.latency)
    params, state = step(params, state)
    jax.block_until_ready(params)
  seconds = time.monotonic() - begin
  processes.say(
    peer=f"psum of jax {jax.__version__}",
    params=args.params,
    steps=args.steps,
    seconds=seconds,
    seconds_per_step=seconds / args.steps,
  )
  processes.leave()


def _main() -> None:
  # The hosts are networks of their own already.
  os.environ.setdefault("BENCHMARK_APART", "in hosts")
  parser = peers.parser(__doc__, timeout=90.0)
  parser.add_argument("--steps", type=int, default=30)
  parser.add_argument("--latency", type=float, default=0.1)
  for name in ("--address", "--own"):
    parser.add_argument(name, help=argparse.SUPPRESS)
  peers.run(parser.parse_args(), measure, _play)


if __name__ == "__main__":
  _main()
