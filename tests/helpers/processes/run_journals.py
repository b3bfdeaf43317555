"""Journals of small runs, written by hand or by the simulator."""

from optax_dist import simulate
from optax_dist.coordinator import journal
from optax_dist.coordinator.metrics import run_numbers


def member(replica, step, age, compute=0.5):
  """A gradient in a commit."""
  return {
    "replica": replica,
    "incarnation": 0,
    "local_step": step,
    "staleness": 0,
    "count": 1,
    "weight": 1.0,
    "batches": f"[[{replica}, {step}]]",
    "compute": compute,
    "age": age,
  }


def begin(written, replicas=range(3)):
  """A run in which all replicas have joined."""
  written.write("run", strategy="sync_replicas", step=0)
  written.write("coordinator", epoch=0, step=0, time=0.0)
  for replica in replicas:
    written.write("join", replica=replica, incarnation=0, step=0, time=0.1)


def simulated(path):
  """A run of 3 of 4 replicas; returns the path of its journal."""
  with journal.Journal(path) as file:
    simulate.simulate_timing(
      simulate.sync_replicas(3),
      simulate.parse_latency("exponential:1"),
      4,
      steps=100,
      journal=file,
    )
  return path


def commit(written, step, *replicas, at):
  """A step of these replicas, whose gradients came 0.2 s before."""
  written.write(
    "commit",
    step=step,
    round=1,
    members=[member(r, step, 0.2) for r in replicas],
    time=at,
  )


def drop(written, step, replica, *, at, reason="stale"):
  """A gradient of the step before that is dropped as it comes."""
  written.write(
    "drop",
    step=step,
    replica=replica,
    incarnation=0,
    local_step=step - 1,
    count=1,
    reason=reason,
    compute=0.9,
    age=0.0,
    time=at,
  )


def ended(path):
  """Writes a run of two replicas, a late one, and a loss; returns its path."""
  with journal.Journal(path) as written:
    begin(written)
    for step in range(4):
      commit(written, step, 0, 1, at=1.0 + step)
      drop(written, step + 1, 2, at=1.1 + step)
    written.write("lost", replica=1, incarnation=0, step=4, time=5.0)
    written.write("finish", step=4, reason="finished", time=6.0)
  return path


def whole(path):
  """The records of a journal without an invalid line."""
  records, problems = journal.read(path)
  assert not problems
  return records


def numbers_of(*records):
  """The numbers of records, in order."""
  numbers = run_numbers.RunNumbers()
  numbers.update(records)
  return numbers
