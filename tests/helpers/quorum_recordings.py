"""A recording of SyncReplicasOptimizer through the public `quorum` alone."""

import sync_replicas_recordings as sync

from optax_dist import quorum, tensorflow1

# What has no event of `quorum`: it is about one of TensorFlow's processes.
_CHIEF_ONLY = ("chief restarted", "chief_restart (no checkpoint)", "assign ")


def not_replayed(recording):
  """Why events of `quorum` cannot say what the recording has, or None."""
  config = recording["config"]
  if config.get("gate_vars"):
    return (
      "replicas push one variable at a time; an arrival is a whole gradient"
    )
  if any(e["op"].startswith(_CHIEF_ONLY) for e in recording["events"]):
    return (
      "TensorFlow's chief is restarted or rewound; a state is restored whole"
    )
  sparse = config.get("sparse_vars", ())
  for event in recording["events"]:
    for i in sparse:
      gradients = event.get("grads")
      if gradients and max(gradients[i][0]) >= len(config["init"][i]):
        return "the chief fails in the update, which is not the quorum's"
  return None


class QuorumSystem:
  """Drives `tensorflow1.strict_quorum` by events, and applies its decisions."""

  def __init__(self, config):
    self.config, self.dtype = config, config.get("dtype", "float32")
    self.variables = sync.variables_of(config)
    self.averages = [v.value for v in self.variables]
    self.state = tensorflow1.strict_quorum(
      config["R"],
      config["total"],
      num_tokens=config["num_tokens"],
      global_step=config["gs_init"],
    )
    self.local_step, self.blocked, self.gradients = {}, set(), {}
    self.finished = False
    for worker in config.get("initially_started", range(config["num_workers"])):
      self.join(worker)

  def tell(self, event):
    self.state, decisions = quorum.step(self.state, event)
    failed = False
    for decision in decisions:
      match decision:
        case quorum.Token(replica, step):
          self.local_step[replica] = step
          self.blocked.discard(replica)
        case quorum.Wait(replica):
          self.blocked.add(replica)
        case quorum.Accept(replica, at):
          for v, g in zip(self.variables, self.gradients[replica], strict=True):
            v.push(g, at)
        case quorum.Drop(replica, at, reason):
          assert reason is quorum.Reason.STALE
          assert at < self.state.step or at < self.local_step[replica]
        case quorum.Commit(step, members):
          assert step == self.state.step - 1
          self.commit(members)
        case quorum.Finished():
          failed = self.finished = True
        case other:
          raise AssertionError(f"unexpected decision {other}")
    return failed

  def commit(self, members):
    for variable in self.variables:
      assert int(variable.state.count) == len(members)
      variable.update(self.config["R"])
    half = self.averages[0].dtype.type(0.5)
    self.averages = [
      a - (a - v.value) * half
      for a, v in zip(self.averages, self.variables, strict=True)
    ]

  def step(self, worker, gradients):
    self.gradients[worker] = gradients
    failed = self.tell(quorum.Arrive(worker, self.local_step[worker]))
    return {worker: "OutOfRangeError"} if failed else {}

  def join(self, worker):
    # A new session of a worker is not blocked, whatever the former one was.
    self.blocked.discard(worker)
    self.tell(quorum.Join(worker))
    return {}

  def lost(self, worker):
    self.tell(quorum.Lost(worker))
    self.blocked.discard(worker)
    del self.local_step[worker]
    return {}

  def close(self):
    self.tell(quorum.Finish())
    return {}

  def see(self):
    count = quorum.ledger(self.state).inside
    return {
      "global_step": self.state.step,
      "num_accumulated": [count] * len(self.variables),
      "local_step": {str(w): s for w, s in sorted(self.local_step.items())},
      "blocked": sorted(self.blocked),
      "queue_size": self.state.system.queue.size,
      "queue_closed": self.finished,
      "running": not self.finished,
      "vars": [v.value for v in self.variables],
      "ema": self.averages,
    }

  same_values = sync.StrictSystem.same_values
