"""The rules of rounds of fragments: turns, windows and weights."""

import pytest

from optax_dist.coordinator.extras.decoupled_diloco import rules
from optax_dist.coordinator.protocol.entries import Fragments


def test_turns_are_spread_over_the_period():
  config = Fragments(fragments=3, period=10)
  assert [rules.turn(config, i) for i in range(3)] == [3, 3, 4]


def test_the_grace_window_is_a_share_of_the_fastest_learners_slack():
  """0.5 * (3 steps of 2 s - 1 s until the quorum - 1.5 s of merging)."""
  config = Fragments(fragments=1, period=4, overlap=3, safety=0.5)
  assert rules.grace_window(config, [2.0, 4.0], 1.0, 1.5) == 0.5 * 3.5
  assert rules.grace_window(config, [2.0, 4.0], 9.0, 1.5) == 0.0
  assert rules.grace_window(config, [], 0.0, 0.0) == 0.0


def test_weights_are_tokens_times_tokens_per_step_and_less_for_late_ones():
  result = rules.shares([(400, 4, 0), (200, 4, 0), (400, 4, 1)])
  assert result == pytest.approx([4 / 7, 1 / 7, 2 / 7])
  # Without any tokens, all weights are equal.
  assert rules.shares([(0, 4, 0), (0, 2, 1)]) == [0.5, 0.5]
