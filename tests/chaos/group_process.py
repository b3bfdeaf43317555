"""A process of a multi-process replica, which takes part in a run of `groups`.

The model is sharded over the devices of all processes of its replica, and its
gradient and update need collectives among them (gloo, on loopback).
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import workers
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from optax_dist import coordinator
from optax_dist.coordinator import checkpoint, phases
from optax_dist.coordinator.launch import environment

# What process 0 decides before a step, for all processes of its replica.
_GO_ON, _FINISH, _SAVE = range(3)
_LINGER = 60.0  # Seconds; the launcher kills it before.


def model(mesh: Any, width: int) -> tuple[Any, Any, Any]:
  """The optimizer, sharded parameters, and the gradient of a number."""
  specs = {"b": PartitionSpec(), "w": PartitionSpec("fsdp", None)}
  rows = 2 * mesh.size
  values = {
    "b": np.linspace(-1.0, 1.0, 70, dtype=np.float32),
    # All shards differ.
    "w": np.linspace(0.5, 1.5, rows * width, dtype=np.float32).reshape(
      rows, width
    ),
  }

  def place(name: str) -> jax.Array:
    value = values[name]
    where = NamedSharding(mesh, specs[name])
    return jax.make_array_from_callback(value.shape, where, value.__getitem__)

  params = {name: place(name) for name in values}

  @jax.jit
  def gradient(params, x):
    # The total is a collective over all processes of the replica.
    total = jnp.sum(params["w"]) / params["w"].size
    return jax.tree.map(lambda p: 0.1 * p + jnp.sin(x + p + total), params)

  # So is the clipped norm.
  opt = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
  return opt, params, gradient


class _Kill:
  """Kills this process, or has the coordinator killed, when it enters a phase."""

  def __init__(self, channel: workers.Channel, told: Any):
    self._channel = channel
    self._phase, self._left = "", 0
    self.arm(told or {"phase": "", "time": 0})

  def arm(self, told: dict[str, Any]) -> None:
    """Sets the phase, at which occurrence of it to kill, and what."""
    self._left, self._phase = told["time"], told["phase"]
    self._dies = told.get("victim") != "coordinator"

  def __call__(self, phase: str, replica: object) -> None:
    if phase != self._phase:
      return
    self._left -= 1
    if self._left == 0:
      self._channel.say("struck", phase=phase, at=time.monotonic())
      if self._dies:
        os.kill(os.getpid(), signal.SIGKILL)


def main(channel: workers.Channel, job: dict[str, Any]) -> None:
  """Trains until told to finish, and reports its observations."""
  logging.basicConfig(
    level=logging.INFO, format="%(relativeCreated)d %(message)s"
  )
  kill = _Kill(channel, job["fault"])
  commands: queue.Queue[int] = queue.Queue()

  def obey(told: dict[str, Any]) -> None:
    match told["do"]:
      case "arm":
        kill.arm(told)
        channel.say("armed")
      case "save":
        commands.put(_SAVE)
      case "finish":
        commands.put(_FINISH)

  channel.obey(obey)
  phases.listen(kill)
  told = environment.Environment(
    coordinator_address=job["join"]["coordinator_address"],
    secret=job["secret"],
    num_replicas=job["join"]["total_num_replicas"],
  )
  which = environment.ProcessEnvironment(
    replica=job["replica"],
    num_processes=job["processes"],
    process_index=job["rank"],
  )
  os.environ.update(told.variables() | which.variables())
  coordinator.initialize_processes()
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
  opt, params, gradient = model(mesh, job["width"])
  start: dict[str, Any] = {"params": params}
  if job.get("restore"):
    start = checkpoint.restore(job["restore"], params, opt.init(params))
  gradient(params, np.float32(0.0))["w"].block_until_ready()
  prints: dict[int, str] = {}
  accepted: list[int] = []
  reasons: dict[str, str] = {}
  waited, number, before = 0.0, 0, None
  with coordinator.join(
    opt,
    **start,
    replica=job["replica"],
    secret=job["secret"],
    **job["join"],
  ) as replica:
    prints[replica.global_step] = replica.fingerprint()
    channel.say(
      "joined",
      step=replica.global_step,
      print=prints[replica.global_step],
      bytes_in=replica.stats()["bytes_in"],
    )
    while replica.global_step < job["target"]:
      # All processes of a replica must do the same at the same step.
      order = _GO_ON if commands.empty() else commands.get()
      order = int(multihost_utils.broadcast_one_to_all(np.int32(order)))
      if order == _FINISH:
        break
      if order == _SAVE:
        name = f"{job['incarnation']}-{replica.global_step}"
        checkpoint.save(os.path.join(job["saves"], name), replica)
      time.sleep(job.get("pause", 0.0))
      x = np.float32(10 * job["replica"] + number % 100)
      key = [job["replica"], job["incarnation"], number]
      number += 1
      outcome = replica.step(gradient(replica.params, x), batch=key)
      waited = max(waited, outcome.waited)
      if outcome.accepted:
        accepted.append(number - 1)
      else:
        reasons[str(number - 1)] = outcome.reason
      if outcome.finished:
        break
      prints[outcome.global_step] = replica.fingerprint()
      channel.say(
        "step",
        step=outcome.global_step,
        at=time.monotonic(),
        members=list(outcome.members),
        print=prints[outcome.global_step],
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
    calls=list(range(number)),
    accepted=accepted,
    reasons=reasons,
    waited=waited,
    prints=prints,
    before=before,
    after=after,
    stats=replica.stats(),
    step=replica.global_step,
  )
  # If it exited now, it would end the other processes before they report.
  time.sleep(_LINGER)
  os._exit(0)
