"""Random histories of the default rules: events, decisions, states."""

import dataclasses
import functools
import random
from typing import NamedTuple

from optax_dist import quorum


class Choice(NamedTuple):
  """An event before it is known which step the run is at."""

  kind: str
  replica: int
  offset: int
  finite: bool
  incarnation: int | None
  count: int
  other: int


def event_of(choice, state):
  """The event that a choice means at a state."""
  number = state.round.number if state.round else 1
  kind = choice.kind
  if kind == "part":
    # Some of what was asked for, which the rest may follow.
    computing = quorum.missing(state).computing
    if not computing:
      return quorum.Join(choice.replica)
    replica = computing[choice.replica % len(computing)]
    count = min(choice.count, state.replicas.get(replica).requested)
    return quorum.Arrive(replica, state.step, choice.finite, count=count)
  if kind == "work":
    computing = quorum.missing(state).computing
    if state.round:
      return quorum.Done(state.step, number)
    if not computing and state.accepted_count:  # The step has all.
      return quorum.Close(state.step)
    if not computing:
      return quorum.Join(choice.replica)
    replica = computing[choice.replica % len(computing)]
    asked = state.replicas.get(replica).requested
    if state.config.exact:
      # Others bring some of the rest meanwhile.
      asked = min(choice.count, quorum.needed(state) - state.accepted_count)
    if not asked:
      return quorum.Close(state.step)
    return quorum.Arrive(replica, state.step, count=asked)
  match kind:
    case "arrive":
      return quorum.Arrive(
        choice.replica,
        max(0, state.step + choice.offset),
        choice.finite,
        choice.incarnation,
        choice.count,
      )
    case "join":
      return quorum.Join(choice.replica, choice.incarnation)
    case "lost":
      return quorum.Lost(choice.replica, choice.incarnation)
    case "leave":
      return quorum.Leave(choice.replica, choice.incarnation)
    case "close":
      return quorum.Close(max(0, state.step + choice.offset))
    case "done":
      return quorum.Done(state.step, number)
  members = state.round.members if state.round else ()
  if not members:
    return quorum.Failed(state.step, number, choice.other)
  failed = members[choice.other % len(members)].replica
  return quorum.Failed(state.step, number, failed)


def started(options):
  """A run in which all but the last replica have joined."""
  state = quorum.init(**options)
  for replica in range(options["total_num_replicas"] - 1):
    state, _ = quorum.step(state, quorum.Join(replica))
  return state


# Drawn by `random`, which is much quicker than by hypothesis, and the same in all
# tests that ask for them: some 18,000 events in a second.

ANY = (
  ["work"] * 14
  + ["arrive"] * 5
  + ["join"] * 3
  + ["lost", "failed"] * 2
  + ["done", "leave", "close"]
)
HEALTHY = ["work"] * 12 + ["close"]
CROWDED = (
  ["work", "part"] * 6 + ["join"] * 4 + ["lost"] * 3 + ["failed", "leave"]
)
KINDS = {"any": ANY, "healthy": HEALTHY, "crowded": CROWDED}


def options_of(r, kind):
  # In a crowd there are more replicas than were expected.
  n = r.randrange(1, 3 if kind == "crowded" else 5)
  exact = r.random() < 0.5
  return {
    "replicas_to_aggregate": r.randrange(1, 8),
    "total_num_replicas": n,
    "max_staleness": 0 if exact else r.choice((0, 0, 1, 2)),
    "two_phase": r.random() < 0.6,
    "window": r.random() < 0.3,
    "exact": exact,
    "lower_on_leave": r.random() < 0.5,
    "weight": r.choice((None, lambda late: late + 2)),
    "global_step": r.choice((0, 3)),
  }


@functools.cache
def random_history(seed, kind, length=60):
  """A list of (event, state before, decisions, state after)."""
  r = random.Random(seed)
  options = options_of(r, kind)
  state = started(options)
  if kind == "healthy":
    last = options["total_num_replicas"] - 1
    state, _ = quorum.step(state, quorum.Join(last))
  result = []
  for number in range(length):
    choice = Choice(
      r.choice(KINDS[kind]),
      r.randrange(5),
      r.choice((0, 0, 0, 0, -1, -2, 1)),
      r.random() < 0.8,
      r.choice((None, None, None, 0, 1)),
      r.choice((1, 1, 2, 3)),
      r.randrange(5),
    )
    event = event_of(choice, state)
    if kind == "any" and state.round and r.random() < 0.1:
      # On the outcome of the round, by a member of it.
      early = r.choice(state.round.members).replica
      event = quorum.Arrive(early, state.step + r.choice((1, 1, 1, 2)))
    if kind == "any" and isinstance(event, quorum.Arrive) and r.random() < 0.1:
      event = dataclasses.replace(event, finite=False)
    if isinstance(event, quorum.Done | quorum.Failed) and r.random() < 0.1:
      # On another round.
      past = r.choice(({"step": event.step - 1}, {"round": event.round - 1}))
      event = dataclasses.replace(event, **past)
    if kind == "any" and number == length - 1 and seed % 4 == 0:
      event = quorum.Finish()
    after, decisions = quorum.step(state, event)
    result.append((event, state, decisions, after))
    state = after
  return result


def check(holds, *kinds):
  """`holds` makes its assertions on one event."""
  for kind in kinds or ("any", "crowded"):
    for seed in range(300):
      for number, event in enumerate(random_history(seed, kind)):
        try:
          holds(*event)
        except AssertionError as error:
          error.add_note(f"{kind} history {seed}, event {number}: {event[0]}")
          raise
