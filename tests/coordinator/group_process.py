"""A process of a replica with several, as `group_runs` tells it.

The model is sharded over the devices of all processes of its replica, and its
gradient and update need collectives among them (gloo, on loopback).
"""

import logging
import os
import signal
import threading
import time

import launch  # tests/processes: collectives that stay on loopback.

from optax_dist.coordinator.launch import channel as channels

TARGET = 8


def model(mesh, width):
  """The optimizer, sharded parameters, and the gradient of a number."""
  import jax
  import jax.numpy as jnp
  import optax
  from jax.sharding import NamedSharding, PartitionSpec

  specs = {"b": PartitionSpec(), "w": PartitionSpec("fsdp", None)}
  values = {"b": jnp.linspace(-1.0, 1.0, 70), "w": jnp.ones((4, width))}
  params = {
    name: jax.make_array_from_callback(
      value.shape,
      NamedSharding(mesh, specs[name]),
      lambda index, value=value: value[index],
    )
    for name, value in values.items()
  }

  @jax.jit
  def gradient(params, x):
    # The total needs all processes of the replica.
    total = jnp.sum(params["w"]) / params["w"].size
    return jax.tree.map(lambda p: 0.1 * p + jnp.sin(x + p + total), params)

  # The clipped norm does, too.
  opt = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
  return opt, params, gradient


def main():
  channel = channels.Channel()
  began = time.time()
  logging.basicConfig(
    level=logging.INFO, format="%(relativeCreated)d %(message)s"
  )
  import jax
  import numpy as np
  from jax.experimental import multihost_utils

  from optax_dist import coordinator
  from optax_dist.coordinator import checkpoint, phases

  times = {"at": began, "imported": time.time() - began}
  job = channel.receive()
  # As tests/processes/launch.py does, but for the store's sake not at exit.
  launch.initialize(job["port"], job["processes"], job["process"], 60.0)
  times["met"] = time.time() - began
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
  opt, params, gradient = model(mesh, job["width"])
  fault, reached = job.get("fault"), [0]

  def listen(phase, replica):
    if fault is None or phase != fault["phase"]:
      return
    reached[0] += 1
    if reached[0] == fault["time"]:
      channel.say("struck", phase=phase, at=time.time())
      os.kill(os.getpid(), signal.SIGKILL)

  phases.listen(listen)
  start = {"params": params}
  if job.get("restore"):
    start = checkpoint.restore(job["restore"], params, opt.init(params))
  gradient(params, np.float32(0.0))["w"].block_until_ready()
  times["compiled"] = time.time() - began
  prints = {}
  with coordinator.join(
    opt,
    **start,
    replica=job["replica"],
    processes_per_replica=job["processes"],
    **job["join"],
  ) as replica:
    times["joined"] = time.time() - began
    prints[replica.global_step] = replica.fingerprint()
    channel.say("begun", step=replica.global_step, times=times)
    number, before = 0, None
    told = threading.Event()
    threading.Thread(
      target=lambda: (channel.receive(), told.set()), daemon=True
    ).start()
    while replica.global_step < job["target"]:
      # All processes of the replica must end at the same step: one decides.
      if bool(multihost_utils.broadcast_one_to_all(np.int32(told.is_set()))):
        break
      x = np.float32(10 * job["replica"] + number)
      outcome = replica.step(gradient(replica.params, x), batch=number)
      number += 1
      if outcome.finished:
        break
      prints[outcome.global_step] = replica.fingerprint()
      channel.say(
        "step",
        step=outcome.global_step,
        at=time.time(),
        members=list(outcome.members),
        accepted=outcome.accepted,
      )
      if before is None:
        before = (outcome.global_step, replica.stats())
      if job.get("save") and outcome.global_step == job["save"][0]:
        checkpoint.save(job["save"][1], replica)
    after = (replica.global_step, replica.stats())
    replica.finish()
    prints[replica.global_step] = replica.fingerprint()
  channel.say(
    "result",
    prints={str(k): v for k, v in prints.items()},
    before=before,
    after=after,
    step=replica.global_step,
    params={k: float(abs(v).sum()) for k, v in replica.params.items()},
  )
  told.wait(60.0)  # Until all have said so.
  os._exit(0)


if __name__ == "__main__":
  raise SystemExit(main())
