"""What holds for the default rules whatever happens."""

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from optax_dist import rules

_options = st.fixed_dictionaries(
  {
    "replicas_to_aggregate": st.integers(1, 6),
    "total_num_replicas": st.integers(1, 4),
    "max_staleness": st.integers(0, 2),
    "two_phase": st.booleans(),
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


_choices = st.lists(
  st.builds(
    Choice,
    st.sampled_from(
      ["arrive"] * 6 + ["done"] * 4 + ["join"] * 3 + ["lost", "leave", "failed"]
    ),
    st.integers(0, 4),
    st.sampled_from([0, 0, 0, 0, -1, -2, 1]),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([None, None, None, 0, 1]),
    st.sampled_from([1, 1, 2, 3]),
    st.integers(0, 4),
  ),
  max_size=60,
)


def event_of(choice, state):
  """The event that a choice means at a state."""
  number = state.attempt.number if state.attempt else 1
  match choice.kind:
    case "arrive":
      return rules.Arrive(
        choice.replica,
        max(0, state.step + choice.offset),
        choice.finite,
        choice.incarnation,
        choice.count,
      )
    case "join":
      return rules.Join(choice.replica, choice.incarnation)
    case "lost":
      return rules.Lost(choice.replica, choice.incarnation)
    case "leave":
      return rules.Leave(choice.replica, choice.incarnation)
    case "done":
      return rules.Done(choice.replica, state.step, number)
  return rules.Failed(choice.replica, state.step, number, choice.other)


def started(options):
  """A run in which all but the last replica have joined."""
  state = rules.init(**options)
  for replica in range(options["total_num_replicas"] - 1):
    state, _ = rules.step(state, rules.Join(replica))
  return state


def histories(options, choices):
  """Yields (state before, event, decisions, state after)."""
  state = started(options)
  for choice in choices:
    event = event_of(choice, state)
    after, decisions = rules.step(state, event)
    yield state, event, decisions, after
    state = after


@given(_options, _choices)
@settings(max_examples=150)
def test_commits_are_whole_fresh_in_order_and_once(options, choices):
  k, late = options["replicas_to_aggregate"], options["max_staleness"]
  committed, counted, accepted = 0, set(), {}
  incarnations = {}
  for before, _, decisions, after in histories(options, choices):
    for decision in decisions:
      match decision:
        case rules.Accept(replica, at, staleness, count):
          key = (replica, after.replicas.get(replica).incarnation, at)
          accepted[key] = accepted.get(key, 0) + count
          incarnations[replica] = key[1]
          assert 0 <= staleness <= late
        case rules.Drop(replica, at, _, _):
          accepted.pop((replica, incarnations.get(replica), at), None)
        case rules.Commit(step, members):
          assert step == committed
          committed += 1
          assert sum(member.count for member in members) >= k
          names = [member.replica for member in members]
          assert names == sorted(set(names))
          for member in members:
            assert member.staleness == step - member.local_step
            assert 0 <= member.staleness <= late
            key = (member.replica, member.incarnation, member.local_step)
            # Counted once ever, and with all that was accepted of it.
            assert key not in counted
            assert accepted[key] == member.count
            counted.add(key)
    assert after.step == committed
    assert after.step - before.step == sum(
      isinstance(decision, rules.Commit) for decision in decisions
    )


@given(_options, _choices)
@settings(max_examples=150)
def test_the_ledger_adds_up_and_nobody_is_forgotten(options, choices):
  k, total = options["replicas_to_aggregate"], options["total_num_replicas"]
  sent = 0
  for _, event, decisions, after in histories(options, choices):
    sent += event.count if isinstance(event, rules.Arrive) else 0
    ledger = rules.ledger(after)
    assert ledger.arrived == sent
    assert sent == ledger.applied + ledger.inside + sum(ledger.dropped.values())
    for decision in decisions:
      if isinstance(decision, rules.Token):
        # No token of an old step, and none for the dead.
        record = after.replicas.get(decision.replica)
        assert record.live
        assert decision.step in (after.step, after.step - 1)
        assert k > total or decision.count == 1
    tokens = [d for d in decisions if isinstance(d, rules.Token)]
    if tokens and not any(isinstance(d, rules.Commit) for d in decisions):
      assert {token.step for token in tokens} == {after.step}
    members = after.attempt.incarnations if after.attempt else {}
    for replica, record in after.replicas.items():
      held = replica in after.inside or replica in after.early
      if record.live and not after.finished:
        # Whoever is there computes, or has something in.
        member = members.get(replica) == record.incarnation
        assert record.asked or held or member
      else:
        assert not record.asked
        assert not held


@given(_options, _choices)
@settings(max_examples=60)
def test_old_states_stay_as_they_were(options, choices):
  history = list(histories(options, choices))
  seen = [repr(before) for before, *_ in history]
  for (before, event, decisions, after), text in zip(
    reversed(history), reversed(seen), strict=True
  ):
    assert repr(before) == text
    assert rules.step(before, event) == (after, decisions)


@given(_options, _choices)
@settings(max_examples=100)
def test_enough_live_replicas_always_get_on(options, choices):
  state = started(options)
  for choice in choices:
    state, _ = rules.step(state, event_of(choice, state))
  if state.finished:
    return
  # All come (back), work as they are told, and nothing more goes wrong.
  for replica in range(options["total_num_replicas"]):
    state, _ = rules.step(state, rules.Join(replica))
  target = state.step + 3
  for _ in range(200):
    if state.step >= target:
      break
    if state.attempt:
      (member, *_) = sorted(state.attempt.pending)
      event = rules.Done(member, state.step, state.attempt.number)
    else:
      # Somebody has a token, or the run would stand still.
      (worker, *_) = rules.missing(state).computing
      asked = state.replicas.get(worker).asked
      event = rules.Arrive(worker, state.step, count=asked)
    state, _ = rules.step(state, event)
  assert state.step >= target


def test_an_event_costs_about_the_same_with_many_replicas():
  # Counted in rewritten leaves and nodes, not in seconds: sharing keeps all
  # but one path of the tree.
  def shared(number):
    state = rules.init(number, number, two_phase=False)
    for replica in range(number):
      state, _ = rules.step(state, rules.Join(replica))
    after, _ = rules.step(state, rules.Arrive(0, 0))
    old = {id(node) for node in _nodes(state.replicas._root)}
    return sum(id(node) not in old for node in _nodes(after.replicas._root))

  assert 1 <= shared(20) <= shared(2000) <= 4


def _nodes(root):
  yield root
  if isinstance(root, tuple):
    for child in root:
      yield from _nodes(child)
