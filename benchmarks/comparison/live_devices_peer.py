"""One of the processes of a cell: it takes steps until it is ended.

It prints a line of JSON for each step and each error. After SIGUSR1 its training
loop is stuck, while the process and its other threads live on.
"""

import json
import os
import signal
import sys
import time

PAUSE = 0.05  # Seconds of a step, as if a gradient took that long.


def say(**fields):
  print(json.dumps({"at": time.monotonic(), **fields}), flush=True)


def _get_stuck(*_):
  say(event="stuck")
  while True:
    time.sleep(1.0)


def jax_steps(settings):
  """Takes steps with `live_devices`, as JAX's documentation has it."""
  import jax
  import jax.numpy as jnp
  from jax.experimental import multihost_utils
  from jax.sharding import NamedSharding, PartitionSpec
  from jaxlib import _jax

  jax.config.update("jax_enable_recoverability", True)
  # By default gloo listens on the address of the host's name.
  gloo = _jax.make_gloo_tcp_collectives
  _jax.make_gloo_tcp_collectives = lambda **options: gloo(
    **options, hostname=settings["host"]
  )
  more = {}
  if settings["seconds"]:
    more["heartbeat_timeout_seconds"] = settings["seconds"]
  jax.distributed.initialize(
    coordinator_address=settings["address"],
    coordinator_bind_address=settings["address"],
    num_processes=settings["count"],
    process_id=settings["index"],
    cluster_detection_method="deactivate",
    initialization_timeout=60,
    **more,
  )

  def step(devices):
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
    split = NamedSharding(mesh, PartitionSpec("data"))
    own = [jnp.ones((1, 1000))]
    shape = (len(devices), 1000)
    both = jax.make_array_from_single_device_arrays(shape, split, own)
    jax.block_until_ready(jnp.sum(both, axis=0))

  signal.signal(signal.SIGUSR1, _get_stuck)
  number = 0
  while True:
    time.sleep(PAUSE)
    try:
      with multihost_utils.live_devices(jax.devices()) as devices:
        step(devices)
    except Exception as error:
      say(event="error", error=f"{type(error).__name__}: {error}"[:300])
    else:
      number += 1
      say(event="step", step=number, members=len(devices))


def our_steps(settings):
  """Takes steps with the coordinator."""
  import jax.numpy as jnp
  import optax

  from optax_dist import coordinator

  signal.signal(signal.SIGUSR1, _get_stuck)
  with coordinator.join(
    optax.sgd(0.1),
    jnp.zeros(1000),
    replica=settings["index"],
    total_num_replicas=settings["count"],
    replicas_to_aggregate=settings["quorum"],
    lower_on_loss=True,
    coordinator_address=settings["address"],
    secret=settings["secret"],
    on_sigterm="leave",
    timeout=60.0,
    silence_timeout=float(settings["seconds"]),
    transfer_timeout=float(settings["seconds"]),
    step_timeout=float(settings["seconds"]),
  ) as replica:
    while not replica.finished:
      time.sleep(PAUSE)
      outcome = replica.step(jnp.ones(1000))
      if outcome.accepted:
        say(
          event="step",
          step=outcome.global_step,
          members=len(outcome.members),
        )
  say(event="left")


if __name__ == "__main__":
  settings = json.loads(sys.argv[1])
  say(event="start", pid=os.getpid())
  (jax_steps if settings["kind"] == "jax" else our_steps)(settings)
