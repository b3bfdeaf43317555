"""The order of ids, and the message of a run that can't go on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_dist.quorum import events

IDS = st.lists(
  st.integers() | st.text(max_size=2) | st.integers(0, 20).map(str), unique=True
)


@given(IDS, st.randoms())
def test_order_of_ids_does_not_depend_on_arrival(ids, random):
  shuffled = random.sample(ids, len(ids))
  result = events.ordered(shuffled)
  assert result == events.ordered(ids)
  numbers = [one for one in ids if isinstance(one, int)]
  names = [one for one in ids if isinstance(one, str)]
  assert result == (*sorted(numbers), *sorted(names))


def test_ids_may_come_from_an_iterator():
  assert events.ordered(iter(["b", 10, "a", 9])) == (9, 10, "a", "b")


@pytest.mark.parametrize(
  ("missing", "final", "words"),
  [
    ((0, "b"), False, "missing: 0, b; the step waits until they have joined"),
    ((), False, "missing: none; the step waits until more replicas join."),
    ((3,), True, "missing: 3; lower replicas_to_aggregate, or let leaves"),
  ],
)
def test_error_of_a_stuck_run_names_the_remedy(missing, final, words):
  text = str(events.CannotProceed(7, 1, 2, missing, final))
  assert text.startswith("step 7 needs 2 replicas and 1 can contribute; ")
  assert words in text
