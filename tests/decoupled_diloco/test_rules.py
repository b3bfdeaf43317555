"""Tests of when fragments are merged: one rule per test, then random events."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_dist.decoupled_diloco import rules
from optax_dist.decoupled_diloco.rules import (
  Abort,
  Adopt,
  Call,
  Config,
  Contribute,
  Drop,
  Join,
  Leave,
  Merge,
  Merged,
  Reason,
  Tick,
)


def _started(learners="abc", **config):
  config = {"fragments": 1, "period": 4, "quorum": 2, **config}
  state = rules.init(Config(**config))
  for learner in learners:
    state, decisions = rules.step(state, Join(learner), 0.0)
    assert decisions == ()
  return state


def _give(learner, version=0, tokens=100, steps=10, fragment=0, seconds=1.0):
  return Contribute(learner, fragment, version, tokens, steps, seconds)


def _run(state, *events):
  """Applies (event, time) pairs; returns the state and the last decisions."""
  decisions = ()
  for event, now in events:
    state, decisions = rules.step(state, event, now)
  return state, decisions


def _members(merge):
  return [learner for learner, _ in merge.members]


def test_no_merge_below_the_quorum():
  state, decisions = _run(_started(), (_give("a"), 1.0), (Tick(), 1e9))
  assert decisions == ()
  assert rules.deadline(state) is None


def test_a_round_that_everyone_is_in_is_merged_at_once():
  _, decisions = _run(
    _started(overlap=100),
    (_give("a"), 1.0),
    (_give("b"), 1.0),
    (_give("c"), 1.0),
  )
  (merge,) = decisions
  assert _members(merge) == ["a", "b", "c"]


def test_the_grace_window_is_a_share_of_the_slack():
  """0.5 * (3 steps of 2 s - 1 s until the quorum - 0 s of merging)."""
  state = _started(overlap=3, safety=0.5)
  state, decisions = _run(
    state, (_give("a", seconds=2.0), 10.0), (_give("b", seconds=4.0), 11.0)
  )
  assert decisions == ()
  assert rules.deadline(state) == 11.0 + 0.5 * (3 * 2.0 - 1.0)
  assert rules.step(state, Tick(), 13.4)[1] == ()
  (merge,) = rules.step(state, Tick(), 13.5)[1]
  assert _members(merge) == ["a", "b"]


def test_the_window_shrinks_by_what_the_last_merge_took():
  state = _started(overlap=3, safety=0.5)
  state, _ = _run(
    state,
    *[(_give(x, seconds=2.0), 0.0) for x in "abc"],
    (Merged(0, 1), 1.5),
    (_give("a", version=1, seconds=2.0), 20.0),
    (_give("b", version=1, seconds=2.0), 20.0),
  )
  assert rules.deadline(state) == 20.0 + 0.5 * (3 * 2.0 - 1.5)


def test_without_slack_the_quorum_is_enough():
  state = _started(overlap=1, safety=1.0)
  _, decisions = _run(state, (_give("a"), 0.0), (_give("b"), 5.0))
  assert _members(decisions[0]) == ["a", "b"]


def test_weights_are_tokens_times_tokens_in_a_step():
  """1000 tokens in 10 steps, and 500 in 10: 100000 to 25000."""
  _, decisions = _run(
    _started("ab"),
    (_give("a", tokens=1000), 0.0),
    (_give("b", tokens=500), 0.0),
  )
  assert decisions[0].members == (("a", 0.8), ("b", 0.2))


def test_no_tokens_at_all_count_alike():
  _, decisions = _run(
    _started("ab"), (_give("a", tokens=0), 0.0), (_give("b", tokens=0), 0.0)
  )
  assert decisions[0].members == (("a", 0.5), ("b", 0.5))


def _a_late_one(**config):
  """A contribution is based on version 0 when there is version 1."""
  state = _started(overlap=0, **config)
  return _run(
    state,
    (_give("a"), 0.0),
    (_give("b"), 0.0),
    (Merged(0, 1), 1.0),
    (_give("c"), 2.0),
  )


def test_late_contributions_are_carried_at_half_the_weight():
  state, decisions = _a_late_one()
  assert decisions == ()
  _, decisions = _run(state, (_give("a", version=1), 3.0))
  assert decisions[-1].members == (("c", 1 / 3), ("a", 2 / 3))


def test_late_contributions_are_dropped_by_choice():
  _, decisions = _a_late_one(late="drop")
  assert decisions == (Drop(_give("c"), Reason.STALE),)


def test_a_late_contribution_is_dropped():
  state, _ = _a_late_one()
  state, _ = _run(state, (_give("a", version=1), 3.0), (Merged(0, 2), 4.0))
  assert state.rounds[0].version == 2
  _, decisions = _run(state, (_give("b"), 5.0))
  assert decisions == (Drop(_give("b"), Reason.STALE),)


def test_what_comes_during_a_merge_goes_into_the_next_round():
  state, _ = _run(_started(overlap=0), (_give("a"), 0.0), (_give("b"), 0.0))
  state, decisions = _run(state, (_give("c"), 0.5))
  assert decisions == ()
  state, decisions = _run(state, (Merged(0, 1), 1.0))
  assert decisions == (Adopt(0, 1, ("a", "b")),)
  assert state.rounds[0].inside == (_give("c"),)


def test_a_newer_contribution_supersedes_its_learners_older_one():
  old, new = _give("a", tokens=10), _give("a", tokens=30)
  state, decisions = _run(_started(), (old, 0.0), (new, 1.0))
  assert decisions == (Drop(old, Reason.SUPERSEDED),)
  assert state.rounds[0].inside == (new,)


def test_fragments_have_rounds_of_their_own():
  state = _started("ab", fragments=2, overlap=0)
  state, _ = _run(
    state,
    (_give("a"), 0.0),
    (_give("a", fragment=1), 0.0),
    (_give("b", fragment=1), 0.0),
    (Merged(1, 1), 1.0),
  )
  assert [r.version for r in state.rounds] == [0, 1]
  assert state.rounds[0].inside == (_give("a"),)


def test_rounds_of_two_fragments_are_merged_at_the_same_time():
  """The rules allow it; the coordinator merges one after the other."""
  state = _started("abc", fragments=2, overlap=0)
  merges = []
  for fragment in (0, 1):
    state, found = _run(
      state,
      (_give("a", fragment=fragment), 0.0),
      (_give("b", fragment=fragment), 1.0),
    )
    merges += found
  assert [(m.fragment, m.attempt) for m in merges] == [(0, 1), (1, 2)]
  assert all(r.merging for r in state.rounds)
  # Who is lost takes both with it; the other merge ends before the first.
  lost, decisions = _run(state, (Leave("a"), 2.0))
  aborted = [d.fragment for d in decisions if isinstance(d, Abort)]
  assert aborted == [0, 1]
  assert not any(r.merging for r in lost.rounds)
  state, (adopt,) = _run(state, (Merged(1, 2), 2.0))
  assert adopt == Adopt(1, 1, ("a", "b"))
  state, (adopt,) = _run(state, (Merged(0, 1), 3.0))
  assert adopt == Adopt(0, 1, ("a", "b"))


class TestALearnerIsLost:
  def test_before_the_merge(self):
    state, decisions = _run(_started(), (_give("a"), 0.0), (Leave("a"), 1.0))
    assert decisions == (Drop(_give("a"), Reason.LOST),)
    assert state.rounds[0] == rules.Round()

  def test_in_the_window_the_quorum_is_no_more(self):
    state = _started(overlap=9)
    state, _ = _run(
      state, (_give("a"), 0.0), (_give("b"), 0.0), (Leave("a"), 0.1)
    )
    assert rules.deadline(state) is None
    _, decisions = _run(state, (_give("c"), 0.2))
    assert _members(decisions[-1]) == ["b", "c"]

  def test_in_the_merge_the_others_merge_without_it(self):
    state = _started()
    state, _ = _run(state, *[(_give(x), 0.0) for x in "abc"])
    state, decisions = _run(state, (Leave("b"), 0.5))
    abort, drop, merge = decisions
    assert abort == Abort(0, 1)
    assert drop == Drop(_give("b"), Reason.LOST)
    assert (merge.attempt, _members(merge)) == (2, ["a", "c"])
    # The end of the first merge changes nothing.
    assert _run(state, (Merged(0, 1), 0.6)) == (state, ())
    _, decisions = _run(state, (Merged(0, 2), 0.7))
    assert decisions == (Adopt(0, 1, ("a", "c")),)

  def test_in_the_merge_while_another_has_sent_a_newer_one(self):
    state, _ = _run(_started(), *[(_give(x), 0.0) for x in "abc"])
    newer = _give("a", tokens=900)
    state, _ = _run(state, (newer, 0.3))
    _, decisions = _run(state, (Leave("b"), 0.5))
    assert Drop(_give("a"), Reason.SUPERSEDED) in decisions
    assert _members(decisions[-1]) == ["c", "a"]

  def test_and_comes_back(self):
    state, _ = _run(_started(), (_give("a"), 0.0))
    state, decisions = _run(state, (Join("a"), 1.0))
    assert decisions == (Drop(_give("a"), Reason.LOST),)
    assert state.learners == ("b", "c", "a")

  def test_contributions_of_strangers_are_ignored(self):
    _, decisions = _run(_started(), (_give("z"), 0.0))
    assert decisions == (Drop(_give("z"), Reason.UNKNOWN_LEARNER),)


def test_turns_are_spread_over_the_period():
  config = Config(fragments=3, period=10)
  assert [rules.turn(config, i) for i in range(3)] == [3, 3, 4]
  assert rules.clocks(config) == [7, 4, 0]


class TestOthersAreCalled:
  def test_once_in_a_round(self):
    _, decisions = _run(_started(), (_give("b"), 0.0))
    assert decisions == (Call(0, ("a", "c")),)
    state, decisions = _run(_started(overlap=9), (_give("b"), 0.0))
    assert _run(state, (_give("a"), 0.1))[1] == ()
    assert _run(state, (_give("b", tokens=900), 0.1))[1] == (
      Drop(_give("b"), Reason.SUPERSEDED),
    )

  def test_again_in_the_next(self):
    state, _ = _run(_started(), *[(_give(x), 0.0) for x in "abc"])
    state, _ = _run(state, (Merged(0, 1), 0.5))
    _, decisions = _run(state, (_give("c", version=1), 9.0))
    assert decisions == (Call(0, ("a", "b")),)

  def test_not_by_what_is_late(self):
    """Neither what came during a merge nor what is of an old version."""
    state, _ = _run(_started(overlap=0), (_give("a"), 0.0), (_give("b"), 0.0))
    state, decisions = _run(state, (_give("c"), 0.1))
    assert decisions == ()
    state, _ = _run(state, (Merged(0, 1), 0.5))
    assert _run(state, (_give("c", tokens=900), 0.6))[1] == (
      Drop(_give("c"), Reason.SUPERSEDED),
    )
    # The one that is late has more to give by now.
    _, decisions = _run(state, (_give("a", version=1), 0.7))
    assert Call(0, ("b", "c")) in decisions

  def test_two_that_are_late_are_no_round(self):
    state = _started("abcd", overlap=0)
    state, _ = _run(state, *[(_give(x), 0.0) for x in "abcd"])
    state, decisions = _run(state, (Merged(0, 1), 1.0), (Tick(), 9.0))
    assert decisions == ()
    assert [c.learner for c in state.rounds[0].inside] == ["c", "d"]
    _, decisions = _run(state, (_give("a", version=1), 10.0))
    assert _members(decisions[-1]) == ["c", "d", "a"]

  def test_without_missing_learners_none_is_named(self):
    _, decisions = _run(_started("a", quorum=1), (_give("a"), 0.0))
    assert [type(d) for d in decisions] == [Merge]


@pytest.mark.parametrize(
  ("config", "message"),
  [
    ({"fragments": 0}, "fragments must be an integer from 1, got 0"),
    ({"quorum": 0}, "quorum .* got 0"),
    ({"safety": 1.5}, "safety must be from 0 to 1, got 1.5"),
    ({"late": "never"}, "late must be .* got 'never'"),
  ],
)
def test_bad_numbers_are_refused(config, message):
  with pytest.raises(ValueError, match=message):
    rules.init(Config(**{"fragments": 1, "period": 1, **config}))


@pytest.mark.parametrize(
  ("event", "message"),
  [
    (_give("a", fragment=1), "no fragment 1"),
    (_give("a", version=1), "versions up to 0, got 1"),
    (_give("a", steps=0), "needs steps"),
    (_give("a", tokens=-1), "needs steps"),
  ],
)
def test_bad_contributions_are_refused(event, message):
  with pytest.raises(ValueError, match=message):
    rules.step(_started(), event, 0.0)


# Whatever happens.


@dataclasses.dataclass
class Run:
  """A run of the rules, and what every contribution came to."""

  state: rules.State
  sent: int = 0
  merged: int = 0
  dropped: int = 0
  now: float = 0.0

  def apply(self, event):
    before, text = self.state, repr(self.state)
    self.sent += isinstance(event, Contribute)
    merging = [r.merging for r in before.rounds]
    self.state, decisions = rules.step(before, event, self.now)
    assert repr(before) == text, "A state was changed in place."
    for decision in decisions:
      match decision:
        case Adopt(fragment, version, members):
          assert version == before.rounds[fragment].version + 1
          self.merged += len(members)
          assert len(members) == len(merging[fragment])
        case Drop():
          self.dropped += 1
        case Merge(_, attempt, members):
          learners = [m for m, _ in members]
          assert len(set(learners)) == len(learners)
          assert len(learners) >= self.state.config.quorum
          assert set(learners) <= set(self.state.learners)
          assert sum(w for _, w in members) == pytest.approx(1.0)
          assert attempt > before.attempts
        case Call(fragment, learners):
          assert learners
          assert set(learners) <= set(self.state.learners)
          assert before.rounds[fragment].began is None
    self.check()
    return decisions

  def check(self):
    """What holds in every state."""
    inside = 0
    for this in self.state.rounds:
      inside += len(this.inside) + len(this.merging)
      for some in (this.inside, this.merging):
        learners = [c.learner for c in some]
        assert len(set(learners)) == len(learners)
        assert set(learners) <= set(self.state.learners)
      assert bool(this.merging) == bool(this.attempt)
      # No round stays open past its window.
      assert this.closes is None or this.closes > self.now
    assert self.sent == self.merged + self.dropped + inside


_CHOICES = st.lists(
  st.tuples(
    st.sampled_from(
      ["join", "leave", "give", "give", "give", "merged", "tick"]
    ),
    st.integers(0, 3),
    st.integers(0, 1),
    st.floats(0, 3),
  ),
  max_size=60,
)
_CONFIGS = st.builds(
  Config,
  fragments=st.just(2),
  period=st.just(4),
  quorum=st.integers(1, 3),
  overlap=st.integers(0, 4),
  safety=st.floats(0, 1),
  late=st.sampled_from(["carry", "drop"]),
  max_staleness=st.integers(0, 2),
)


def _happen(run, choices):
  for kind, learner, fragment, passed in choices:
    # A driver looks at the deadline in between.
    due = rules.deadline(run.state)
    if due is not None and due <= run.now + passed:
      run.now, passed = due, run.now + passed - due
      run.apply(Tick())
    run.now += passed
    this = run.state.rounds[fragment]
    match kind:
      case "join":
        run.apply(Join(learner))
      case "leave":
        run.apply(Leave(learner))
      case "give":
        version = max(0, this.version - int(passed))
        run.apply(Contribute(learner, fragment, version, 7, 2, passed))
      case "merged":
        run.apply(Merged(fragment, this.attempt))
      case _:
        run.apply(Tick())


@given(_CONFIGS, _CHOICES)
@settings(max_examples=150, deadline=None)
def test_every_contribution_comes_to_one_thing(config, choices):
  _happen(Run(rules.init(config)), choices)


@given(_CONFIGS, _CHOICES)
@settings(max_examples=80, deadline=None)
def test_where_enough_learners_live_rounds_go_on(config, choices):
  run = Run(rules.init(config))
  _happen(run, choices)
  for learner in range(4):
    run.now += 1.0
    run.apply(Join(learner))
  for fragment in range(2):
    target = run.state.rounds[fragment].version + 3
    for _ in range(20):
      if run.state.rounds[fragment].version >= target:
        break
      this = run.state.rounds[fragment]
      if this.attempt:
        run.apply(Merged(fragment, this.attempt))
      for learner in range(4):
        version = run.state.rounds[fragment].version
        run.apply(Contribute(learner, fragment, version, 7, 2, 1.0))
    assert run.state.rounds[fragment].version >= target
