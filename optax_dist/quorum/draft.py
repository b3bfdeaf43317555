"""A mutable copy of a state while an event is applied to it."""

from __future__ import annotations

import operator

from optax_dist.quorum import events as ev
from optax_dist.quorum.arguments import accepts
from optax_dist.quorum.state import Attempt, Config, ReplicaState, State

# Much faster than reading one field after the other, for each gradient.
_FIELDS = operator.itemgetter(*State._fields)


def needed(state: State | Draft) -> int:
  """How many gradients a step takes now, after leaves and losses.

  Example:
    >>> from optax_dist import quorum
    >>> needed(quorum.init(3))
    3
  """
  config = state.config
  k = config.replicas_to_aggregate
  if config.lower_on_leave and k <= config.total_num_replicas:
    return max(1, min(k, state.live + state.awaited + state.lost))
  return k


class Draft:
  """A state that an event is changing: mutable, and never returned."""

  def __init__(self, state: State):
    self.__dict__.update(zip(State._fields, state, strict=True))
    self.replicas = dict(state.replicas)
    self.inside = dict(state.inside)
    self.dropped = dict(state.dropped)
    self.decisions: list[ev.Decision] = []
    # The ranks of the live replicas, computed on first use.
    self._ranks: dict[ev.Replica, int] | None = None

  # The fields of State; mypy cannot see that __dict__ defines them.
  config: Config
  step: int
  replicas: dict[ev.Replica, ReplicaState]
  inside: dict[ev.Replica, ev.Contribution]
  gathered: int
  attempt: Attempt | None
  attempts: int
  live: int
  working: int
  awaited: int
  lost: int
  arrived: int
  applied: int
  dropped: dict[ev.Reason, int]
  finished: bool
  closed: bool

  def freeze(self) -> State:
    return State._make(_FIELDS(self.__dict__))

  def emit(self, decision: ev.Decision) -> None:
    self.decisions.append(decision)

  # How many gradients are needed, and how many each replica must bring.

  @property
  def shared(self) -> bool:
    """Whether each replica sums several gradients (k > N)."""
    return self.config.replicas_to_aggregate > self.config.total_num_replicas

  @property
  def exact(self) -> bool:
    """Whether a step has exactly as many gradients as it needs."""
    return self.shared and self.config.exact

  def quorum(self) -> int:
    return needed(self)

  def quota(self, replica: ev.Replica) -> int:
    if not self.shared:
      return 1
    needed, sharers = self.quorum(), self.live + self.awaited
    if not self.exact:
      return -(-needed // sharers)
    if self._ranks is None:
      live = ev.ordered(r for r, m in self.replicas.items() if m.live)
      self._ranks = {r: rank for rank, r in enumerate(live)}
    each, more = divmod(needed, sharers)
    return max(1, each + (self._ranks[replica] < more))

  def excess(self, count: int) -> int:
    """The number of gradients in excess of a step with this many more."""
    if not self.exact:
      return 0
    return max(0, self.gathered + count - self.quorum())

  # Tokens and drops.

  def ask(self, replica: ev.Replica, count: int) -> None:
    """Gives the replica a token of the current step."""
    record = self.replicas[replica]
    self.working += not record.asked
    self.replicas[replica] = record._replace(asked=count)
    self.emit(ev.Token(replica, self.step, count))

  def drop(
    self, replica: ev.Replica, local_step: int, reason: ev.Reason, count: int
  ) -> None:
    self.dropped[reason] = self.dropped.get(reason, 0) + count
    self.emit(ev.Drop(replica, local_step, reason, count))

  def withdraw(self, replica: ev.Replica, reason: ev.Reason) -> None:
    """Drops the replica's accepted gradients that are not in an attempt."""
    inside = self.inside.pop(replica, None)
    if inside is not None:
      self.gathered -= inside.count
      self.drop(replica, inside.local_step, reason, inside.count)

  # Attempts.

  def advance(self) -> None:
    """Starts an attempt if there are enough gradients, or asks for the rest."""
    while self.attempt is None and self.gathered >= self.quorum():
      open_ = self.config.window and not self.closed
      if open_ and self.working and not self.exact:
        return  # More may come.
      self.start()
      if self.config.two_phase:
        return
      self.commit()
    if self.attempt is None and self.shared:
      self.ask_for_the_rest()

  def start(self) -> None:
    members = tuple([self.inside[r] for r in ev.ordered(self.inside)])
    self.inside, self.gathered = {}, 0
    self.attempts += 1
    who = {}  # Without reports it is complete at once.
    if self.config.two_phase:
      who = {c.replica: c.incarnation for c in members}
      self.emit(ev.StartAttempt(self.step, self.attempts, members))
    self.attempt = Attempt(self.attempts, members, who, who)

  def ask_for_the_rest(self) -> None:
    """K > N: asks for more if no replica computes and too few are in."""
    if self.working or self.awaited or not self.live:
      return
    lacks = self.quorum() - self.gathered
    each = -(-lacks // self.live)
    for replica in ev.ordered(r for r, m in self.replicas.items() if m.live):
      if self.exact:
        each = min(each, lacks)
        lacks -= each
        if not each:
          return
      # A sum cannot mix steps: an older one is replaced as a whole.
      inside = self.inside[replica]
      old = inside.count if inside.local_step != self.step else 0
      self.ask(replica, each + old)

  def commit(self) -> None:
    """Ends the attempt and the step."""
    attempt = self.attempt
    assert attempt is not None
    self.emit(ev.Commit(self.step, attempt.members, attempt.number))
    self.attempt, self.attempts, self.closed = None, 0, False
    self.applied += sum(c.count for c in attempt.members)
    self.step += 1
    # Gradients that came during the attempt are one step staler now.
    for replica in ev.ordered(self.inside):
      held = self.inside[replica]
      if accepts(held.local_step, self.step, self.config.max_staleness):
        self.inside[replica] = self.aged(held)
      else:
        self.withdraw(replica, ev.Reason.STALE)
        self.ask(replica, self.quota(replica))
    for member in attempt.members:
      replica = member.replica
      record = self.replicas[replica]
      if record.live and record.incarnation == member.incarnation:
        self.ask(replica, self.quota(replica))

  def aged(self, held: ev.Contribution) -> ev.Contribution:
    return self.contribution(
      held.replica, held.local_step, held.count, held.incarnation
    )

  def contribution(
    self, replica: ev.Replica, local_step: int, count: int, incarnation: int
  ) -> ev.Contribution:
    """An accepted gradient, with its current staleness and weight."""
    late = self.step - local_step
    weight = self.config.weight
    factor = 1.0 if weight is None else float(weight(late))
    return ev.Contribution(
      replica, local_step, late, count, factor, incarnation
    )

  def abandon(self, failed_replica: ev.Replica, reason: ev.Reason) -> None:
    """Abandons the attempt; the survivors' gradients stay accepted."""
    attempt = self.attempt
    assert attempt is not None
    self.emit(ev.Abandon(self.step, attempt.number, failed_replica))
    self.attempt = None
    for member in attempt.members:
      record = self.replicas[member.replica]
      here = record.live and record.incarnation == member.incarnation
      if here and member.replica != failed_replica:
        self.inside[member.replica] = member
        self.gathered += member.count
        continue
      gone = ev.Reason.LEFT if record.left else ev.Reason.LOST
      why = reason if member.replica == failed_replica else gone
      self.drop(member.replica, member.local_step, why, member.count)
      if here:
        # The same step may be tried again.
        counted = member.local_step - 1
        self.replicas[member.replica] = record._replace(counted=counted)
        self.ask(member.replica, self.quota(member.replica))
