"""Properties of the default rules under random events.

The coordinator's invariants, of which most are the rules', are in
tests/coordinator/runs/test_invariants.py.
"""

from hypothesis import given, settings
from rule_histories import CHOICES, OPTIONS, event_of, histories, started

from optax_dist import quorum


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
