"""TensorFlow's `SyncReplicasOptimizer` as a whole, event for event.

There is one conditional accumulator per variable, one token queue, and one
leader (TensorFlow calls it chief) that takes from each accumulator as soon as
it has enough gradients, updates that variable at once, and when all are updated
raises the global step and enqueues tokens. Each event is followed by all of its
consequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from optax_dist.quorum.events import Replica, ordered
from tests.tensorflow1.events.accumulators import Accumulator
from tests.tensorflow1.events.moves import Moves
from tests.tensorflow1.events.outcomes import Outcome
from tests.tensorflow1.events.token_queue import TokenQueue
from tests.tensorflow1.events.tokens import initial_tokens


class Worker(NamedTuple):
  """A worker's session.

  Attributes:
    local_step: the step of its last token.
    session: its number.
    pushing: the local step it pushes, None if all is pushed.
    gated: variables it has not pushed yet.
    broken: variables whose gradient the leader cannot apply.
    dequeuing: whether it waits for a token.
  """

  local_step: int
  session: int
  pushing: int | None = None
  gated: tuple[int, ...] = ()
  broken: frozenset[int] = frozenset()
  dequeuing: bool = False

  @property
  def blocked(self) -> bool:
    """Whether its step has not returned."""
    return self.dequeuing or bool(self.gated)


class Observation(NamedTuple):
  """The externally visible state.

  Attributes:
    global_step: the number of updates.
    queue_size: tokens in the queue.
    num_accumulated: gradients in each accumulator.
    local_step: the local step of each worker.
    blocked: workers whose step has not returned, in order.
  """

  global_step: int
  queue_size: int
  num_accumulated: tuple[int, ...]
  local_step: dict[Replica, int]
  blocked: tuple[Replica, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SyncReplicas:
  """TensorFlow's sync replicas, as a value; created by `sync_replicas`.

  Attributes:
    replicas_to_aggregate: gradients that a step takes.
    total_num_replicas: as given to TensorFlow, for the number of tokens.
    global_step: the number of updates.
    accumulators: the accumulator of each variable.
    queue: the token queue.
    gated: variables whose push requires a permit.
    workers: the session of each worker.
    permits: pushes permitted in advance, by (worker, variable).
    taken: variables updated since the global step was last raised.
    running: whether the leader's loop is running.
    sessions: how many sessions have started.
  """

  replicas_to_aggregate: int
  total_num_replicas: int
  global_step: int
  accumulators: tuple[Accumulator, ...]
  queue: TokenQueue
  gated: frozenset[int]
  workers: Mapping[Replica, Worker] = dataclasses.field(default_factory=dict)
  permits: Mapping[tuple[Replica, int], int] = dataclasses.field(
    default_factory=dict
  )
  taken: frozenset[int] = frozenset()
  running: bool = True
  sessions: int = 0

  def observe(self) -> Observation:
    """The externally visible state."""
    known = {r: self.workers[r] for r in ordered(self.workers)}
    return Observation(
      self.global_step,
      self.queue.size,
      tuple(a.count for a in self.accumulators),
      {r: w.local_step for r, w in known.items()},
      tuple(r for r, w in known.items() if w.blocked),
    )

  def join(self, replica: Replica) -> SyncReplicas:
    """Starts a worker's session; a previous one is abandoned.

    Its first local step is the global step. A pending dequeue of a previous
    session stays in the queue, and will consume a token.
    """
    session = self.sessions + 1
    system = dataclasses.replace(self, sessions=session)
    return system.with_worker(replica, Worker(self.global_step, session))

  def lost(self, replica: Replica) -> SyncReplicas:
    """Kills a worker: its dequeue is cancelled, its gradients stay."""
    rest = dict(self.workers)
    worker = rest.pop(replica)
    queue, _ = self.queue.cancel((replica, worker.session))
    return dataclasses.replace(self, queue=queue, workers=rest)

  def worker_step(
    self,
    replica: Replica,
    local_step: int | None = None,
    *,
    broken: Iterable[int] = (),
  ) -> tuple[SyncReplicas, tuple[Outcome, ...]]:
    """One run of the train op: push every variable, then dequeue a token.

    Args:
      replica: the worker; it must not be blocked.
      local_step: the step it claims for its gradients; by default the step of
        its token.
      broken: variables whose gradient is accepted, but cannot be applied by the
        leader (a row that does not exist).

    Returns:
      The changed system, and the outcomes, in order.

    Raises:
      ValueError: the worker is unknown or blocked.
    """
    worker = self.workers.get(replica)
    if worker is None or worker.blocked:
      state = "has not joined" if worker is None else "is blocked"
      raise ValueError(f"worker {replica!r} {state}, so it cannot step.")
    pushing = worker.local_step if local_step is None else local_step
    todo = tuple(range(len(self.accumulators)))
    moves = Moves(
      self.with_worker(
        replica,
        worker._replace(pushing=pushing, gated=todo, broken=frozenset(broken)),
      )
    )
    for variable in todo:
      permits = moves.system.permits.get((replica, variable), 0)
      if variable not in self.gated:
        moves.push(replica, variable)
      elif permits:
        left = {**moves.system.permits, (replica, variable): permits - 1}
        moves.system = dataclasses.replace(moves.system, permits=left)
        moves.push(replica, variable)
    return moves.end()

  def release_gate(
    self, replica: Replica, variable: int
  ) -> tuple[SyncReplicas, tuple[Outcome, ...]]:
    """Permits one push of a gated variable, now or in a later step."""
    worker = self.workers.get(replica)
    moves = Moves(self)
    if worker is not None and variable in worker.gated:
      moves.push(replica, variable)
    else:
      key = (replica, variable)
      more = {**self.permits, key: self.permits.get(key, 0) + 1}
      moves.system = dataclasses.replace(self, permits=more)
    return moves.end()

  def enqueue_tokens(
    self, num_tokens: int
  ) -> tuple[SyncReplicas, tuple[Outcome, ...]]:
    """Runs `get_init_tokens_op(num_tokens)` at the current global step."""
    number = initial_tokens(
      num_tokens, self.replicas_to_aggregate, self.total_num_replicas
    )
    moves = Moves(self)
    moves.enqueue(number)
    return moves.end()

  def chief_init(
    self, global_step: int, chief: Replica = 0
  ) -> tuple[SyncReplicas, tuple[Outcome, ...]]:
    """Sets the global step, and the leader's and the accumulators' to it.

    Accumulated gradients are kept, and so are other workers' steps.
    """
    system = dataclasses.replace(
      self,
      global_step=global_step,
      accumulators=tuple(
        a.set_global_step(global_step)[0] for a in self.accumulators
      ),
    )
    worker = system.workers.get(chief)
    if worker is not None:
      system = system.with_worker(
        chief, worker._replace(local_step=global_step)
      )
    return system, ()

  def start_chief(self) -> tuple[SyncReplicas, tuple[Outcome, ...]]:
    """Starts or restarts the leader's loop; it may find leftovers to take."""
    moves = Moves(dataclasses.replace(self, running=True, taken=frozenset()))
    moves.start_round()
    return moves.end()

  def close(self) -> tuple[SyncReplicas, tuple[Outcome, ...]]:
    """Ends the leader gracefully: cancels its takes, and closes the queue."""
    moves = Moves(self)
    moves.stop()
    return moves.end()

  def with_queue(self, queue: TokenQueue) -> SyncReplicas:
    """The system with another queue: TensorFlow's optimizers share one."""
    return dataclasses.replace(self, queue=queue)

  def with_worker(self, replica: Replica, worker: Worker) -> SyncReplicas:
    """The system with another session of a worker."""
    workers = {**self.workers, replica: worker}
    return dataclasses.replace(self, workers=workers)


def sync_replicas(
  replicas_to_aggregate: int,
  total_num_replicas: int | None = None,
  *,
  num_tokens: int = -1,
  num_variables: int = 1,
  gated_variables: Iterable[int] = (),
  global_step: int = 0,
  workers: Iterable[Replica] | None = None,
) -> SyncReplicas:
  """Creates sync replicas with the leader running and tokens enqueued.

  Args:
    replicas_to_aggregate: gradients that a step takes.
    total_num_replicas: by default `replicas_to_aggregate`.
    num_tokens: initial tokens; -1 means `replicas_to_aggregate`.
    num_variables: the number of accumulators.
    gated_variables: variables whose push waits for `release_gate`.
    global_step: the step to start from.
    workers: workers that have started; by default `range(total_num_replicas)`.

  Returns:
    The system.

  Raises:
    ValueError: `num_tokens` is too small to finish the first step.

  Example:
    >>> system = sync_replicas(2, num_tokens=0)
    >>> system, _ = system.worker_step(0)
    >>> system.observe().blocked
    (0,)
    >>> system, out = system.worker_step(1)
    >>> system.observe().global_step, [type(o).__name__ for o in out]
    (1, ['Applied', 'Taken', 'Advanced', 'GotToken', 'GotToken'])
  """
  k = replicas_to_aggregate
  total = k if total_num_replicas is None else total_num_replicas
  books = Accumulator(step=global_step)
  system = SyncReplicas(
    k,
    total,
    global_step,
    (books,) * num_variables,
    TokenQueue(),
    frozenset(gated_variables),
  )
  for replica in range(total) if workers is None else workers:
    system = system.join(replica)
  system, _ = system.enqueue_tokens(num_tokens)
  return system.start_chief()[0]
