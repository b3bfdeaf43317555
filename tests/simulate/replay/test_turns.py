"""The computations of a journal, and what each of them followed."""

import pytest

from optax_dist.simulate.replay import turns


def _gradient(replica, local_step, arrived, compute=1.0, **more):
  return {
    "replica": replica,
    "local_step": local_step,
    "arrived": arrived,
    "compute": compute,
    **more,
  }


def _commit(time, step, *members):
  return {"kind": "commit", "time": time, "step": step, "members": members}


def test_a_turn_follows_the_last_arrival_of_a_step():
  found = turns.of(
    [
      _commit(2.0, 0, _gradient("a", 0, 1.0), _gradient("b", 0, 2.0)),
      _commit(3.5, 1, _gradient("a", 1, 3.5, compute=1.25)),
    ]
  )
  first, second, third = found
  assert (first.since, first.delay, first.ready) == (None, None, None)
  assert (second.replica, second.arrived) == ("b", 2.0)
  # Not after its own arrival: after that of the step's last gradient.
  assert (third.since, third.ready, third.after_commit) == (2.0, 2.0, True)
  assert third.delay == pytest.approx(3.5 - 1.25 - 2.0)


def test_a_turn_follows_a_drop():
  drop = {"kind": "drop", "time": 3.0, "step": 1, **_gradient("b", 0, 3.0)}
  records = [
    _commit(2.0, 0, _gradient("a", 0, 2.0)),
    drop,
    _commit(4.5, 1, _gradient("b", 1, 4.5)),
  ]
  *_, last = turns.of(records)
  assert (last.since, last.after_commit, last.delay) == (3.0, False, 0.5)
  assert last.ready == 2.0


@pytest.mark.parametrize("kind", ["join", "lost", "leave"])
def test_a_membership_between_hides_what_it_followed(kind):
  between = {"kind": kind, "time": 2.5, "replica": "a"}
  records = [
    _commit(2.0, 0, _gradient("a", 0, 2.0)),
    between,
    _commit(4.0, 1, _gradient("a", 1, 4.0)),
  ]
  *_, last = turns.of(records)
  assert (last.since, last.delay) == (None, None)


def test_compiling_is_no_computing():
  told = {"timings": {"compiled": 0.75}}
  (turn,) = turns.of([_commit(2.0, 0, _gradient("a", 0, 2.0, **told))])
  assert (turn.compute, turn.compiled) == (0.25, 0.75)


def test_unknown_times_make_no_turn():
  assert not [*turns.of([_commit(2.0, 0, _gradient("a", 0, 2.0, None))])]
  (turn,) = turns.of([_commit(2.0, 0, _gradient("a", 0, None))])
  assert (turn.arrived, turn.compiled) == (2.0, None)


def test_a_step_ends_with_its_last_arrival():
  records = [
    _commit(2.5, 0, _gradient("a", 0, 1.0), _gradient("b", 0, 2.0)),
    _commit(3.5, 1, _gradient("a", 1, None)),
    {"kind": "exchange", "time": 4.0, "replica": "a"},
  ]
  assert turns.ends(records) == [2.0, 3.5, 4.0]
