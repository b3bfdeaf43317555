"""The state of the default rules, and the replicas that are missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from optax_dist.quorum import events as ev
from optax_dist.quorum.arguments import accepts


class Config(NamedTuple):
  """The configuration of a run.

  Attributes:
    replicas_to_aggregate: gradients that a step takes.
    total_num_replicas: replicas expected at the start.
    max_staleness: largest staleness of a gradient, in steps.
    weight: the weight of a gradient, as a function of its staleness.
    lower_on_leave: whether graceful leaves lower the quorum.
    two_phase: whether a commit waits for `Done`.
    exact: whether a step has exactly `replicas_to_aggregate` gradients.
    window: whether a step that has enough waits for more, until `Close`.
  """

  replicas_to_aggregate: int
  total_num_replicas: int
  max_staleness: int
  weight: Callable[[int], float] | None
  lower_on_leave: bool
  two_phase: bool
  exact: bool
  window: bool


class ReplicaState(NamedTuple):
  """The state of one replica.

  Attributes:
    incarnation: how often this id has started.
    live: whether it currently takes part.
    left: whether it left gracefully.
    requested: gradients requested by its token; 0 while it waits or is not live.
    start: the first step this incarnation was given.
    counted: the last local step that counted, or -1.
    suspect: whether its latest gradient was not finite.
  """

  incarnation: int
  live: bool
  left: bool
  requested: int
  start: int
  counted: int = -1
  suspect: bool = False


class Round(NamedTuple):
  """An aggregation in progress.

  Attributes:
    number: counts the rounds at this step, from 1.
    members: the gradients to average, in replica order.
  """

  number: int
  members: tuple[ev.Contribution, ...]

  def has(self, replica: ev.Replica) -> bool:
    """Whether a gradient of this replica is in it."""
    return any(member.replica == replica for member in self.members)


@dataclasses.dataclass
class State:
  """The state of the default rules: a value, for `step` changes a copy of it.

  Its methods but for `copy` are for the rules.

  Attributes:
    config: the configuration of the run.
    step: the global step, which is the number of commits.
    replicas: the state of each replica.
    accepted: accepted gradients that are in no round, by replica.
    accepted_count: the number of gradients in `accepted`.
    round: the aggregation in progress, or None.
    rounds: how many rounds this step has had.
    live: replicas that take part.
    working: of these, the ones that hold a token.
    awaited: expected replicas that have never joined.
    lost: replicas that were lost, and may come back.
    finished: whether the run has ended.
    closed: whether the step's grace window is over.
    decisions: the decisions on the event that is being applied.
  """

  config: Config
  step: int
  replicas: dict[ev.Replica, ReplicaState] = dataclasses.field(
    default_factory=dict
  )
  accepted: dict[ev.Replica, ev.Contribution] = dataclasses.field(
    default_factory=dict
  )
  accepted_count: int = 0
  round: Round | None = None
  rounds: int = 0
  live: int = 0
  working: int = 0
  awaited: int = 0
  lost: int = 0
  finished: bool = False
  closed: bool = False
  decisions: list[ev.Decision] = dataclasses.field(default_factory=list)

  def copy(self) -> State:
    """A state that may be changed."""
    # Much faster than `dataclasses.replace`: it is done for every gradient.
    draft = object.__new__(State)
    draft.__dict__.update(self.__dict__)
    draft.replicas, draft.accepted = dict(self.replicas), dict(self.accepted)
    draft.decisions = []
    return draft

  def emit(self, decision: ev.Decision) -> None:
    self.decisions.append(decision)

  # How many gradients are needed, and how many each replica must contribute.

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

  @property
  def replicas_needed(self) -> int:
    """How many replicas a step needs: with k > N one can bring all gradients."""
    return 1 if self.shared else self.quorum()

  @property
  def lacks(self) -> int:
    """How many gradients the step lacks; negative if it has more."""
    return self.quorum() - self.accepted_count

  def quota(self, replica: ev.Replica) -> int:
    if self.exact:
      return max(1, self.lacks)
    if not self.shared:
      return 1
    return -(-self.quorum() // (self.live + self.awaited))

  def excess(self, count: int) -> int:
    """The number of gradients in excess of a step with this many more."""
    if not self.exact:
      return 0
    round_ = self.round.members if self.round is not None else ()
    held = self.accepted_count + sum(member.count for member in round_)
    return max(0, held + count - self.quorum())

  # Tokens and drops.

  def request(self, replica: ev.Replica, count: int) -> None:
    """Gives the replica a token of the current step."""
    record = self.replicas[replica]
    self.working += not record.requested
    self.replicas[replica] = record._replace(requested=count)
    self.emit(ev.Token(replica, self.step, count))

  def drop(
    self,
    replica: ev.Replica,
    local_step: int,
    reason: ev.Reason,
    count: int,
    incarnation: int,
  ) -> None:
    self.emit(ev.Drop(replica, local_step, reason, count, incarnation))

  def drop_accepted(self, gradient: ev.Contribution, reason: ev.Reason) -> None:
    """Drops a gradient that was accepted before."""
    self.drop(
      gradient.replica,
      gradient.local_step,
      reason,
      gradient.count,
      gradient.incarnation,
    )

  def unaccept(self, replica: ev.Replica, reason: ev.Reason) -> None:
    """Drops the replica's accepted gradients that are not in a round."""
    accepted = self.accepted.pop(replica, None)
    if accepted is not None:
      self.accepted_count -= accepted.count
      self.drop_accepted(accepted, reason)

  # Attempts.

  def advance(self) -> None:
    """Starts a round if there are enough gradients, or asks for the rest."""
    while self.round is None and self.accepted_count >= self.quorum():
      if self.config.window and not self.closed:
        break  # More gradients may arrive in the window.
      self.start()
      if self.config.two_phase:
        return
      self.commit()
    if self.round is None and self.shared:
      self.ask_for_the_rest()

  def start(self) -> None:
    members = tuple([self.accepted[r] for r in ev.ordered(self.accepted)])
    self.accepted, self.accepted_count = {}, 0
    self.rounds += 1
    if self.config.two_phase:
      self.emit(ev.StartRound(self.step, self.rounds, members))
    self.round = Round(self.rounds, members)

  def ask_for_the_rest(self) -> None:
    """If k > N: requests more gradients if no replica computes and too few arrived.

    A replica whose latest gradient was not finite is not waited for. In an exact step a
    replica that has contributed its gradients is asked at once.
    """
    if self.exact:
      known = self.replicas.items()
      for replica in ev.ordered(
        r for r, m in known if m.live and not m.requested
      ):
        self.request(replica, self.quota(replica))
      return
    lacks = self.lacks
    able = {r: m for r, m in self.replicas.items() if m.live and not m.suspect}
    working = any(m.requested for m in able.values())
    if lacks <= 0 or working or self.awaited or not able:
      return
    each = -(-lacks // len(able))
    for replica in ev.ordered(able):
      # A sum cannot mix steps: an older one is replaced as a whole.
      accepted = self.accepted[replica]
      old = accepted.count if accepted.local_step != self.step else 0
      self.request(replica, each + old)

  def commit(self) -> None:
    """Ends the round and the step."""
    round_ = self.round
    assert round_ is not None
    self.emit(ev.Commit(self.step, round_.members, round_.number))
    self.round, self.rounds, self.closed = None, 0, False
    self.step += 1
    # Gradients that came during the round are one step staler now.
    for replica in ev.ordered(self.accepted):
      held = self.accepted[replica]
      if accepts(held.local_step, self.step, self.config.max_staleness):
        self.accepted[replica] = self.aged(held)
      else:
        self.unaccept(replica, ev.Reason.STALE)
        self.request(replica, self.quota(replica))
    if self.exact:
      # Other replicas' work on this step is void, so all begin the next step.
      free = ev.ordered(r for r, m in self.replicas.items() if m.live)
    else:
      free = tuple(m.replica for m in round_.members)
    for replica in free:
      self.request(replica, self.quota(replica))

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
    """Abandons the round; the other gradients stay, unless replicas have newer ones."""
    round_ = self.round
    assert round_ is not None
    self.emit(ev.Abandon(self.step, round_.number, failed_replica))
    self.round = None
    for member in round_.members:
      failed = member.replica == failed_replica
      if not failed and member.replica not in self.accepted:
        self.accepted[member.replica] = member
        self.accepted_count += member.count
        continue
      self.drop_accepted(member, reason if failed else ev.Reason.SUPERSEDED)
      record = self.replicas[member.replica]
      if record.live and member.replica not in self.accepted:
        # The same step may be tried again.
        counted = member.local_step - 1
        self.replicas[member.replica] = record._replace(counted=counted)
        self.request(member.replica, self.quota(member.replica))


def needed(state: State) -> int:
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


class Missing(NamedTuple):
  """The replicas that the current step waits for.

  Attributes:
    computing: live replicas whose gradient has not been accepted.
    absent: replicas that never joined, were lost, or left.
  """

  computing: tuple[ev.Replica, ...]
  absent: tuple[ev.Replica, ...]


def missing(state: State) -> Missing:
  """The replicas that the current step waits for, by what is missing; O(n).

  Example:
    >>> from optax_dist import quorum
    >>> state, _ = quorum.step(quorum.init(2), quorum.Join(1))
    >>> missing(state)
    Missing(computing=(1,), absent=(0,))
  """
  known = state.replicas
  computing = (r for r, m in known.items() if m.requested)
  lost = (r for r, m in known.items() if not m.live)
  # Ids usually count from 0.
  expected = range(state.config.total_num_replicas)
  never = [r for r in expected if r not in known][: state.awaited]
  return Missing(ev.ordered(computing), ev.ordered((*lost, *never)))
