"""Time of a step of torchft, and the stall after a replica was killed.

Replica groups of one process each, and a lighthouse, on loopback. A step is a
quorum, an allreduce of the gradient over gloo, the vote to commit, and the update.
A gradient is the parameters times a number.

    python benchmarks/comparison/torchft_peer.py --params 1000
    python benchmarks/comparison/torchft_peer.py --kill replica
    python benchmarks/comparison/torchft_peer.py --kill coordinator

The interpreter is one with torchft 0.2.0 (`--python`, if not this one).
"""

import argparse
import datetime
import time
from typing import Any

import peers
import processes
import stall

WARM_UP = 20
# What the lighthouse waits for a replica that is silent.
HEARTBEAT_MS = 1000
# Seconds in which replicas may go on after the lighthouse was killed.
LOOK = 40.0


def measure(args: argparse.Namespace) -> dict[str, Any]:
  """Runs the lighthouse and the replicas.

  Args:
    args: those of the command line.

  Returns:
    Seconds for a step, or of the stall, with what was measured.

  Raises:
    processes.Failed: if a process fails or is not done in time.
  """
  from optax_dist.coordinator.transport import addresses

  port, *stores = addresses.free_ports(1 + args.replicas)
  with processes.group(args.timeout) as group:

    def start(role: str, store: int):
      return group.start(
        f"torchft's {role}",
        [
          *peers.command(
            args, role, port=port, store=store, replicas=args.replicas
          ),
          *(["--kill", args.kill] if args.kill else []),
          *("--retries", str(args.retries)),
        ],
        {
          "TORCHFT_LIGHTHOUSE": f"http://{processes.HOST}:{port}",
          "GLOO_SOCKET_IFNAME": "lo",
          "CUDA_VISIBLE_DEVICES": "",
          "OMP_NUM_THREADS": "1",
          "RUST_LOG": "error",
        },
      )

    lighthouse = start("lighthouse", 0)
    group.wait_for(lighthouse)
    started = [start(f"replica{i}", p) for i, p in enumerate(stores)]
    common = {
      "params": args.params,
      "replicas": args.replicas,
      "heartbeat_ms": HEARTBEAT_MS,
    }
    if args.kill == "coordinator":

      def kill() -> None:
        stall.killing(lighthouse)()
        lighthouse.popen.wait()
        start("lighthouse", 0)

      return common | stall.of_a_kill(
        group, kill, [], started, args.moment, LOOK
      )
    if args.kill:
      victim = started.pop()
      return common | stall.of_a_kill(
        group, stall.killing(victim), [victim], started, args.moment
      )
    return common | group.wait_for(started[0])


# --- In a process ------------------------------------------------------------


def _lighthouse(args: argparse.Namespace) -> None:
  from torchft.coordination import LighthouseServer

  # With a kill, the survivors continue; otherwise all start together.
  server = LighthouseServer(
    bind=f"{processes.HOST}:{args.port}",
    min_replicas=1 if args.kill == "replica" else args.replicas,
    heartbeat_timeout_ms=HEARTBEAT_MS,
  )
  processes.say(address=server.address())
  while True:
    time.sleep(60)


def _replica(args: argparse.Namespace) -> None:
  import importlib.metadata

  import torch
  import torch.distributed
  import torchft

  torch.set_num_threads(1)
  seconds = lambda n: datetime.timedelta(seconds=n)
  # Held: the replica group's own store lives with this process.
  store = torch.distributed.TCPStore(
    processes.HOST, args.store, is_master=True, wait_for_workers=False
  )
  weights = torch.ones(args.params)
  manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=seconds(10)),
    load_state_dict=lambda state: weights.copy_(state["weights"]),
    state_dict=lambda: {"weights": weights},
    min_replica_size=1,
    timeout=seconds(10),
    quorum_timeout=seconds(30),
    # By default a replica ends if the lighthouse does not answer.
    quorum_retries=args.retries,
    rank=0,
    world_size=1,
    store_addr=processes.HOST,
    store_port=args.store,
    replica_id=args.role,
    hostname=processes.HOST,
    init_sync=False,
  )

  def step() -> bool:
    manager.start_quorum()
    gradient = weights * 1e-3
    manager.allreduce(gradient).wait()
    if not manager.should_commit():
      return False
    weights.sub_(gradient, alpha=0.01)
    return True

  together = 0
  while together < WARM_UP:
    if step():
      together += manager.num_participants() == args.replicas
  if args.kill:
    stall.watch(step, LOOK if args.kill == "coordinator" else stall.AFTER)
  if not args.role.endswith("0"):
    while True:
      step()
  steps, begin = 0, time.monotonic()
  while (end := time.monotonic()) < begin + args.seconds:
    steps += step()
  processes.say(
    peer=f"torchft {importlib.metadata.version('torchft')},"
    f" torch {torch.__version__}",
    steps=steps,
    seconds=end - begin,
    seconds_per_step=(end - begin) / steps,
  )
  del store
  processes.leave()


def _play(args: argparse.Namespace) -> None:
  if args.role == "lighthouse":
    _lighthouse(args)
  else:
    _replica(args)


def _main() -> None:
  parser = peers.parser(__doc__, timeout=90.0)
  parser.add_argument("--replicas", type=int, default=2)
  parser.add_argument(
    "--kill", choices=stall.WHOM, help="whom to kill, to time the stall"
  )
  parser.add_argument(
    "--moment",
    type=float,
    default=0.0,
    help="seconds after the warm-up when it is killed",
  )
  parser.add_argument("--retries", type=int, default=0, help="of a quorum")
  parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
  parser.add_argument("--store", type=int, help=argparse.SUPPRESS)
  peers.run(parser.parse_args(), measure, _play)


if __name__ == "__main__":
  _main()
