"""Steps per second of TensorFlow's SyncReplicasOptimizer, on loopback.

One parameter server and two workers, processes over gRPC; both workers' gradients
make a step. A gradient is the variable times a number, computed by the worker, so
that a worker fetches the parameters and sends a gradient of their size, as any
training step does.

    python benchmarks/comparison/tensorflow_peer.py --params 1000 --variables 1
    python benchmarks/comparison/tensorflow_peer.py --kill

The interpreter is one with TensorFlow 2.21 (`--python`, if not this one).
"""

import argparse
import tempfile
import time
from typing import Any

import peers
import processes
import stall

WORKERS = 2
WARM_UP = 3
# Seconds in which the other worker may go on after the chief was killed.
LOOK = 40.0


def measure(args: argparse.Namespace) -> dict[str, Any]:
  """Runs the three processes.

  Args:
    args: those of the command line.

  Returns:
    Committed steps per second, with what was measured.

  Raises:
    processes.Failed: if a process fails or is not done in time.
  """
  from optax_dist.coordinator.transport import addresses

  ports = ",".join(map(str, addresses.free_ports(1 + WORKERS)))
  with (
    tempfile.TemporaryDirectory() as folder,
    processes.group(args.timeout) as group,
  ):

    def start(role: str):
      own = {"ports": ports, "variables": args.variables, "folder": folder}
      return group.start(
        f"TensorFlow's {role}",
        [
          *peers.command(args, role, **own),
          *(["--kill"] if args.kill else []),
        ],
        {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
      )

    _, chief, other = map(start, ("ps", "worker0", "worker1"))
    if not args.kill:
      return group.wait_for(chief)

    def kill() -> None:
      stall.killing(chief)()
      chief.popen.wait()
      start("worker0")

    return stall.of_a_kill(group, kill, [], [other], 0.0, LOOK)


# --- In a process ------------------------------------------------------------


def _serve(role: str, ports: list[int]):
  import tensorflow as tf

  addresses = [f"{processes.HOST}:{port}" for port in ports]
  job, index = ("ps", 0) if role == "ps" else ("worker", int(role[6:]))
  return tf.distribute.Server(
    {"ps": addresses[:1], "worker": addresses[1:]},
    job_name=job,
    task_index=index,
  )


def _train(role: str, args: argparse.Namespace) -> None:
  import tensorflow as tf

  v1 = tf.compat.v1
  server = _serve(role, args.ports)
  index = int(role[6:])
  size = args.params // args.variables
  v1.disable_eager_execution()
  with tf.device("/job:ps/task:0"):
    global_step = v1.train.get_or_create_global_step()
    weights = [
      v1.get_variable(f"w{i}", [size], initializer=v1.ones_initializer())
      for i in range(args.variables)
    ]
  optimizer = v1.train.SyncReplicasOptimizer(
    v1.train.GradientDescentOptimizer(0.01),
    replicas_to_aggregate=WORKERS,
    total_num_replicas=WORKERS,
  )
  with tf.device(f"/job:worker/task:{index}"):
    gradients = [(w * tf.constant(1e-3), w) for w in weights]
    train = optimizer.apply_gradients(gradients, global_step=global_step)
  with v1.train.MonitoredTrainingSession(
    master=server.target,
    is_chief=index == 0,
    hooks=[optimizer.make_session_run_hook(index == 0)],
    # Who starts again goes on from here.
    checkpoint_dir=args.folder if args.kill else None,
    save_checkpoint_secs=1,
    log_step_count_steps=None,
    save_summaries_steps=None,
    save_summaries_secs=None,
  ) as session:
    # Both workers take part from the first step: it takes two gradients.
    while session.run(global_step) < WARM_UP:
      session.run(train)
    if args.kill and index:

      def step() -> bool:
        session.run(train)
        return True

      stall.watch(step, LOOK)
    if args.kill or index:
      while True:
        session.run(train)
    half = time.monotonic() + min(2.0, args.seconds / 4)
    while time.monotonic() < half:
      session.run(train)
    first, begin = session.run(global_step), time.monotonic()
    while time.monotonic() < begin + args.seconds:
      session.run(train)
    last, end = session.run(global_step), time.monotonic()
    processes.say(
      peer=f"tensorflow {tf.__version__}",
      params=size * args.variables,
      variables=args.variables,
      steps=int(last - first),
      seconds=end - begin,
      steps_per_second=float(last - first) / (end - begin),
    )
  processes.leave()


def _play(args: argparse.Namespace) -> None:
  if args.role == "ps":
    _serve(args.role, args.ports).join()
  else:
    _train(args.role, args)


def _main() -> None:
  parser = peers.parser(__doc__, timeout=180.0)
  parser.add_argument("--variables", type=int, default=1)
  parser.add_argument(
    "--kill", action="store_true", help="kill the chief, to time the stall"
  )
  parser.add_argument("--folder", help=argparse.SUPPRESS)
  parser.add_argument(
    "--ports",
    type=lambda text: list(map(int, text.split(","))),
    help=argparse.SUPPRESS,
  )
  peers.run(parser.parse_args(), measure, _play)


if __name__ == "__main__":
  _main()
