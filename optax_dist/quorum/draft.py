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
  few = not config.exact and k <= config.total_num_replicas
  if config.lower_on_leave and few:
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
  def exact(self) -> bool:
    """Whether a step has exactly as many gradients as it needs."""
    return self.config.exact

  @property
  def shared(self) -> bool:
    """Whether each replica sums several gradients (k > N)."""
    config = self.config
    return (
      self.exact or config.replicas_to_aggregate > config.total_num_replicas
    )

  def quorum(self) -> int:
    return needed(self)

  def quota(self, replica: ev.Replica) -> int:
    if self.exact:
      return max(1, self.quorum() - self.gathered)
    if not self.shared:
      return 1
    return -(-self.quorum() // (self.live + self.awaited))

  def excess(self, count: int) -> int:
    """The number of gradients in excess of a step with this many more."""
    if not self.exact:
      return 0
    attempt = self.attempt.members if self.attempt is not None else ()
    held = self.gathered + sum(member.count for member in attempt)
    return max(0, held + count - self.quorum())

  # Tokens and drops.

  def ask(self, replica: ev.Replica, count: int) -> None:
    """Gives the replica a token of the current step."""
    record = self.replicas[replica]
    self.working += not record.asked
    self.replicas[replica] = record._replace(asked=count)
    self.emit(ev.Token(replica, self.step, count))

  def drop(
    self,
    replica: ev.Replica,
    local_step: int,
    reason: ev.Reason,
    count: int,
    incarnation: int,
  ) -> None:
    self.dropped[reason] = self.dropped.get(reason, 0) + count
    self.emit(ev.Drop(replica, local_step, reason, count, incarnation))

  def drop_accepted(self, found: ev.Contribution, reason: ev.Reason) -> None:
    """Drops a gradient that was accepted before."""
    self.drop(
      found.replica, found.local_step, reason, found.count, found.incarnation
    )

  def withdraw(self, replica: ev.Replica, reason: ev.Reason) -> None:
    """Drops the replica's accepted gradients that are not in an attempt."""
    inside = self.inside.pop(replica, None)
    if inside is not None:
      self.gathered -= inside.count
      self.drop_accepted(inside, reason)

  # Attempts.

  def advance(self) -> None:
    """Starts an attempt if there are enough gradients, or asks for the rest."""
    while self.attempt is None and self.gathered >= self.quorum():
      open_ = self.config.window and not self.closed
      if open_ and self.working:
        break  # More may come.
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
    """K > N: asks for more if no replica computes and too few are in.

    In an exact step whoever has brought its gradients is asked at once.
    """
    if self.exact:
      known = self.replicas.items()
      for replica in ev.ordered(r for r, m in known if m.live and not m.asked):
        self.ask(replica, self.quota(replica))
      return
    if self.working or self.awaited or not self.live:
      return
    lacks = self.quorum() - self.gathered
    each = -(-lacks // self.live)
    for replica in ev.ordered(r for r, m in self.replicas.items() if m.live):
      # A sum cannot mix steps: an older one is replaced as a whole.
      inside = self.inside[replica]
      old = inside.count if inside.local_step != self.step else 0
      self.ask(replica, each + old)

  def is_here(self, member: ev.Contribution) -> bool:
    """Whether the replica of an accepted gradient is still the same one."""
    record = self.replicas[member.replica]
    return record.live and record.incarnation == member.incarnation

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
    if self.exact:
      # What others compute for this step was for nothing: they begin the next.
      free = ev.ordered(r for r, m in self.replicas.items() if m.live)
    else:
      free = tuple(m.replica for m in attempt.members if self.is_here(m))
    for replica in free:
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
      record, here = self.replicas[member.replica], self.is_here(member)
      if here and member.replica != failed_replica:
        self.inside[member.replica] = member
        self.gathered += member.count
        continue
      gone = ev.Reason.LEFT if record.left else ev.Reason.LOST
      why = reason if member.replica == failed_replica else gone
      self.drop_accepted(member, why)
      if here:
        # The same step may be tried again.
        counted = member.local_step - 1
        self.replicas[member.replica] = record._replace(counted=counted)
        self.ask(member.replica, self.quota(member.replica))
