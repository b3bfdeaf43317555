"""All consequences of one event in TensorFlow's sync replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Generic, TypeVar, cast

from optax_dist.quorum.events import Replica
from tests.tensorflow1.events.accumulators import Accumulator
from tests.tensorflow1.events.outcomes import (
  Advanced,
  Applied,
  Completed,
  GotToken,
  Outcome,
  StepFailed,
  Taken,
)
from tests.tensorflow1.events.tokens import tokens_per_step

_CHIEF = "chief"

# A frozen dataclass with the fields of `SyncReplicas`, in a module above.
System = TypeVar("System", bound=Any)


class Moves(Generic[System]):
  """A system that an event is changing, along with all consequences."""

  def __init__(self, system: System):
    self.system = system
    self.outcomes: list[Outcome] = []

  def end(self) -> tuple[System, tuple[Outcome, ...]]:
    return self.system, tuple(self.outcomes)

  def _set(self, **changes: Any) -> None:
    self.system = dataclasses.replace(self.system, **changes)

  def _set_books(self, variable: int, books: Accumulator) -> None:
    every = self.system.accumulators
    self._set(accumulators=(*every[:variable], books, *every[variable + 1 :]))

  def push(self, replica: Replica, variable: int) -> None:
    """Pushes one variable; after the last one comes the dequeue."""
    worker = self.system.workers.get(replica)
    gated = tuple(v for v in worker.gated if v != variable)
    worker = worker._replace(gated=gated)
    self.system = self.system.with_worker(replica, worker)
    tag = (replica, worker.pushing, variable in worker.broken)
    books, out = self.system.accumulators[variable].apply(worker.pushing, tag)
    self._set_books(variable, books)
    for outcome in out:
      if isinstance(outcome, Applied):
        member = (replica, worker.pushing)
        self.outcomes.append(
          Applied(member, outcome.accepted, outcome.error, variable)
        )
      else:
        self.take(variable, outcome)
    if not gated:
      self.dequeue(replica)

  def dequeue(self, replica: Replica) -> None:
    worker = self.system.workers.get(replica)
    worker = worker._replace(pushing=None, dequeuing=True)
    self.system = self.system.with_worker(replica, worker)
    queue, out = self.system.queue.dequeue((replica, worker.session))
    self._set(queue=queue)
    self.serve(out)

  def take(self, variable: int, take: Completed) -> None:
    """Completes the leader's take: it updates the variable."""
    assert take.step is not None
    if any(broken for *_, broken in take.value):
      self.outcomes.append(StepFailed(_CHIEF, "the update failed"))
      self.stop()
      return
    members = tuple((replica, at) for replica, at, _ in take.value)
    self.outcomes.append(Taken(variable, take.step, members))
    self._set(taken=self.system.taken | {variable})

    if len(self.system.taken) < len(self.system.accumulators):
      return
    step = self.system.global_step + 1
    self._set(global_step=step, taken=frozenset())
    self.outcomes.append(Advanced(step))
    self.enqueue(
      tokens_per_step(
        self.system.total_num_replicas, self.system.replicas_to_aggregate
      )
    )
    if self.system.running:
      self.start_round()

  def start_round(self) -> None:
    """Requests the next mean from every accumulator, as the leader."""
    for variable in range(len(self.system.accumulators)):
      if not self.system.running:
        return
      books, out = self.system.accumulators[variable].take(
        _CHIEF, self.system.replicas_to_aggregate
      )
      self._set_books(variable, books)
      for take in out:
        self.take(variable, take)

  def enqueue(self, number: int) -> None:
    queue, out = self.system.queue.enqueue_many(
      [self.system.global_step] * number
    )
    self._set(queue=queue)
    if out and out[0].kind == "enqueue":
      assert out[0].error is not None
      self.outcomes.append(StepFailed(_CHIEF, out[0].error))
      self.stop()
      return
    self.serve(out)

  def serve(self, out: Iterable[Completed]) -> None:
    """Completes dequeues: their workers continue."""
    for done in out:
      replica, session = cast(tuple[Replica, int], done.id)
      worker = self.system.workers.get(replica)
      # The token of an abandoned session is lost.
      if worker is None or worker.session != session:
        continue
      if done.error is not None:
        worker = worker._replace(dequeuing=False)
        self.outcomes.append(StepFailed(replica, done.error))
      else:
        worker = worker._replace(dequeuing=False, local_step=done.value)
        self.outcomes.append(GotToken(replica, done.value))
      self.system = self.system.with_worker(replica, worker)

  def stop(self) -> None:
    """Stops the leader's loop, and closes the queue."""
    books = tuple(a.close()[0] for a in self.system.accumulators)
    queue, out = self.system.queue.close()
    self._set(accumulators=books, queue=queue, running=False)
    self.serve(out)
