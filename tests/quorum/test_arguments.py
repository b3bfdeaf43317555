"""The numbers of a run: staleness, tokens, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_dist import quorum


@given(st.integers(-5, 5), st.integers(-5, 5), st.integers(-1, 3))
def test_accepts_compares_the_steps_in_between(local_step, global_step, late):
  steps_late = global_step - local_step
  accepted = quorum.accepts(local_step, global_step, late)
  assert accepted == (steps_late <= late)


def test_integers_of_numpy_are_integers():
  checked = quorum.check_sync_arguments(np.int64(3), np.int32(2), np.uint8(1))
  assert checked == (3, 2, 1)
  assert all(type(number) is int for number in checked)


NAMES = ("replicas_to_aggregate", "total_num_replicas", "max_staleness")


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_limited_to_those_of_states_and_messages(name):
  arguments = {"replicas_to_aggregate": 1, name: quorum.UNBOUNDED}
  quorum.init(**arguments)
  arguments[name] += 1
  with pytest.raises(
    ValueError, match=f"`{name}` must be at most .*, got 2147483648"
  ):
    quorum.init(**arguments)


def test_without_a_limit_any_staleness_counts():
  state = quorum.init(1, 2, max_staleness=None, two_phase=False)
  events = [quorum.Join(0), quorum.Join(1)]
  events += [quorum.Arrive(0, local_step=step) for step in range(9)]
  for event in (*events, quorum.Arrive(1, local_step=0)):
    state, decisions = quorum.step(state, event)
  assert [d.staleness for d in decisions if isinstance(d, quorum.Accept)] == [9]
