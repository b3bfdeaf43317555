"""Random histories of the default rules: events, decisions, states."""

from typing import NamedTuple

from hypothesis import strategies as st

from optax_dist import quorum

OPTIONS = st.fixed_dictionaries(
  {
    "replicas_to_aggregate": st.integers(1, 6),
    "total_num_replicas": st.integers(1, 4),
    "max_staleness": st.integers(0, 2),
    "two_phase": st.booleans(),
    "window": st.booleans(),
  }
)


class Choice(NamedTuple):
  """An event before it is known which step the run is at."""

  kind: str
  replica: int
  offset: int
  finite: bool
  incarnation: int | None
  count: int
  other: int


CHOICES = st.lists(
  st.builds(
    Choice,
    # Mostly what goes well, or hardly a step would ever be committed.
    st.sampled_from(
      ["work"] * 12
      + ["arrive"] * 5
      + ["join"] * 3
      + ["lost", "failed"] * 2
      + ["done", "leave", "close"]
    ),
    st.integers(0, 4),
    st.sampled_from([0, 0, 0, 0, -1, -2, 1]),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([None, None, None, 0, 1]),
    st.sampled_from([1, 1, 2, 3]),
    st.integers(0, 4),
  ),
  min_size=15,
  max_size=60,
)


def event_of(choice, state):
  """The event that a choice means at a state."""
  number = state.attempt.number if state.attempt else 1
  kind = choice.kind
  if kind == "work":
    missing = quorum.missing(state)
    waited_for = missing.reporting or missing.computing
    if not waited_for:
      return quorum.Join(choice.replica)
    replica = waited_for[choice.replica % len(waited_for)]
    if missing.reporting:
      return quorum.Done(replica, state.step, number)
    asked = state.replicas.get(replica).asked
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
      return quorum.Done(choice.replica, state.step, number)
  return quorum.Failed(choice.replica, state.step, number, choice.other)


def started(options):
  """A run in which all but the last replica have joined."""
  state = quorum.init(**options)
  for replica in range(options["total_num_replicas"] - 1):
    state, _ = quorum.step(state, quorum.Join(replica))
  return state


def histories(options, choices):
  """Yields (state before, event, decisions, state after)."""
  state = started(options)
  for choice in choices:
    event = event_of(choice, state)
    after, decisions = quorum.step(state, event)
    yield state, event, decisions, after
    state = after
