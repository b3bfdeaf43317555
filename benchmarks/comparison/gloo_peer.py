"""Steps per second of a loop around torch's gloo between two hosts.

A step is what it is in `replicas.py`, by hand: a gradient by JAX, an all-reduce,
and the mean and its update by JAX. Nothing is checked, counted or
agreed upon.

    python benchmarks/comparison/gloo_peer.py --params 1000

The interpreter is one with torch, JAX and optax (`--python`, if not this one).
"""

import argparse
import os
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
    Steps per second, with what was measured.

  Raises:
    processes.Failed: if a process fails or is not done in time.
  """
  with (
    between_hosts.made(2, "bridge") as hosts,
    processes.group(args.timeout) as group,
  ):
    started = [
      group.start(
        f"gloo {rank}",
        [
          *("ip", "netns", "exec", hosts.names[rank]),
          *peers.command(args, str(rank), address=hosts.address(0)),
        ],
        {
          "GLOO_SOCKET_IFNAME": "wire",
          "CUDA_VISIBLE_DEVICES": "",
          "JAX_PLATFORMS": "cpu",
          "OMP_NUM_THREADS": "1",
        },
      )
      for rank in range(2)
    ]
    return group.wait_for(started[0])


# --- In a process ------------------------------------------------------------


def _play(args: argparse.Namespace) -> None:
  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax
  import torch
  import torch.distributed as dist

  os.environ |= {"MASTER_ADDR": args.address, "MASTER_PORT": str(PORT)}
  rank = int(args.role)
  dist.init_process_group("gloo", rank=rank, world_size=2)
  optimizer = optax.sgd(0.01)
  params = jnp.ones(args.params, jnp.float32)
  state = optimizer.init(params)
  gradient = jax.jit(lambda x: x * 1e-3)

  @jax.jit
  def update(params, state, total):
    updates, state = optimizer.update(total / 2, state, params)
    return optax.apply_updates(params, updates), state

  # A gradient is copied into it: JAX's arrays must not be written to.
  buffer = torch.zeros(args.params)
  total = buffer.numpy()
  over = torch.zeros(1)

  def step() -> None:
    nonlocal params, state
    np.copyto(total, gradient(params))
    dist.all_reduce(buffer)
    params, state = update(params, state, total)
    jax.block_until_ready(params)

  for _ in range(WARM_UP):
    step()
  # Both must stop at the same one, so they agree on how many before.
  count, begin = 1, time.monotonic()
  steps, used = 0, processes.used()
  while True:
    for _ in range(count):
      step()
    steps += count
    seconds = time.monotonic() - begin
    over[0] = float(rank == 0 and seconds >= args.seconds)
    dist.all_reduce(over)
    if over[0]:
      break
    count = max(1, min(100, steps // 4))
  used = {k: v - used[k] for k, v in processes.used().items()}
  processes.say(
    peer=f"gloo of torch {torch.__version__}",
    params=args.params,
    steps=steps,
    seconds=seconds,
    steps_per_second=steps / seconds,
    **{f"{k}_per_step": v / steps for k, v in used.items()},
  )
  processes.leave()


def _main() -> None:
  # The hosts are networks of their own already.
  os.environ.setdefault("BENCHMARK_APART", "in hosts")
  parser = peers.parser(__doc__, timeout=60.0)
  parser.add_argument("--address", help=argparse.SUPPRESS)
  peers.run(parser.parse_args(), measure, _play)


if __name__ == "__main__":
  _main()
