"""Properties of the default rules under random events.

The coordinator's invariants, of which most are the rules', are in
tests/coordinator/runs/test_invariants.py.
"""

from hypothesis import given, settings
from rule_histories import CHOICES, OPTIONS, event_of, histories, started

from optax_dist import quorum
from optax_dist.quorum import rules


@given(OPTIONS, CHOICES)
@settings(max_examples=150)
def test_the_ledger_adds_up(options, choices):
  sent = 0
  for _, event, _, after in histories(options, choices):
    sent += event.count if isinstance(event, quorum.Arrive) else 0
    ledger = quorum.ledger(after)
    assert ledger.arrived == sent
    assert sent == ledger.applied + ledger.inside + sum(ledger.dropped.values())


@given(OPTIONS, CHOICES)
@settings(max_examples=60)
def test_old_states_stay_as_they_were(options, choices):
  history = list(histories(options, choices))
  seen = [repr(before) for before, *_ in history]
  for (before, event, decisions, after), text in zip(
    reversed(history), reversed(seen), strict=True
  ):
    assert repr(before) == text
    assert quorum.step(before, event) == (after, decisions)


@given(OPTIONS, CHOICES)
@settings(max_examples=150)
def test_the_short_way_of_a_gradient_is_the_long_way(options, choices):
  for before, event, decisions, after in histories(options, choices):
    if isinstance(event, quorum.Arrive):
      draft = rules.Draft(before)
      rules._arrive(draft, event)
      assert (draft.freeze(), tuple(draft.decisions)) == (after, decisions)


@given(OPTIONS, CHOICES)
@settings(max_examples=150)
def test_gradients_taken_in_together_are_as_one_after_the_other(
  options, choices
):
  for before, *_ in histories(options, choices):
    live = [r for r, m in before.replicas.items() if m.live]
    for some in (live, live[1:], live[:2]):
      together = quorum.take_in(before, dict.fromkeys(some))
      after = before
      for replica in some if together is not None else ():
        arrive = quorum.Arrive(replica, before.step)
        after, decisions = quorum.step(after, arrive)
        kinds = [type(decision) for decision in decisions]
        assert kinds == [quorum.Accept, quorum.Wait]
      assert together in (None, after)


def test_what_completes_a_step_is_not_taken_in_together():
  state = quorum.init(4, two_phase=False)
  for replica in range(4):
    state, _ = quorum.step(state, quorum.Join(replica))
  state = quorum.take_in(state, {0: None, 2: 0})
  assert sorted(state.inside) == [0, 2]
  assert quorum.take_in(state, {1: None, 3: None}) is None
  assert quorum.take_in(state, {0: None}) is None  # A second one.
  assert quorum.take_in(state, {1: 7}) is None  # Of another incarnation.
  assert quorum.take_in(state, {1: None}).gathered == 3


def test_most_gradients_go_the_short_way():
  state = quorum.init(3, two_phase=False)
  for replica in range(3):
    state, _ = quorum.step(state, quorum.Join(replica))
  assert rules._one_more(state, quorum.Arrive(1, 0)) is not None
  state, _ = quorum.step(state, quorum.Arrive(1, 0))
  assert rules._one_more(state, quorum.Arrive(1, 0)) is None  # A second one.
  assert rules._one_more(state, quorum.Arrive(2, 0, finite=False)) is None
  state, _ = quorum.step(state, quorum.Arrive(2, 0))
  assert rules._one_more(state, quorum.Arrive(0, 0)) is None  # The last one.


@given(OPTIONS, CHOICES)
@settings(max_examples=100)
def test_enough_live_replicas_always_get_on(options, choices):
  state = started(options)
  for choice in choices:
    state, _ = quorum.step(state, event_of(choice, state))
  if state.finished:
    return
  # All come (back), work as they are told, and nothing more goes wrong.
  for replica in range(options["total_num_replicas"]):
    state, _ = quorum.step(state, quorum.Join(replica))
  target = state.step + 3
  for _ in range(200):
    if state.step >= target:
      break
    if state.attempt:
      (member, *_) = sorted(state.attempt.pending)
      event = quorum.Done(member, state.step, state.attempt.number)
    else:
      # Some replica has a token, or the run would stall.
      (worker, *_) = quorum.missing(state).computing
      asked = state.replicas.get(worker).asked
      event = quorum.Arrive(worker, state.step, count=asked)
    state, _ = quorum.step(state, event)
  assert state.step >= target


def test_an_event_costs_about_the_same_with_many_replicas():
  # Counted in rewritten leaves and nodes, not in seconds: sharing keeps all
  # but one path of the tree.
  def shared(number):
    state = quorum.init(number, number, two_phase=False)
    for replica in range(number):
      state, _ = quorum.step(state, quorum.Join(replica))
    after, _ = quorum.step(state, quorum.Arrive(0, 0))
    old = {id(node) for node in _nodes(state.replicas._root)}
    return sum(id(node) not in old for node in _nodes(after.replicas._root))

  assert 1 <= shared(20) <= shared(2000) <= 4


def _nodes(root):
  yield root
  if isinstance(root, tuple):
    for child in root:
      yield from _nodes(child)
