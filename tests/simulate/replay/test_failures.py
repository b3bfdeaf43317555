"""Losses of replicas with their cause and length."""

import math

import pytest

from optax_dist.simulate.replay import failures


def _commit(time, replicas, start=None):
  members = [
    {"replica": i, "timings": None if start is None else {"start": start}}
    for i in replicas
  ]
  return {"kind": "commit", "time": time, "members": members}


def test_a_fault_has_a_cause_and_a_length():
  records = [
    {"kind": "run", "time": 0.0},
    {"kind": "leader", "time": 0.0, "replica": 0},
    {"kind": "join", "time": 0.0, "replica": 0},
    {"kind": "join", "time": 0.0, "replica": 1},
    _commit(1.0, [0, 1]),
    _commit(2.0, [0, 1]),
    {"kind": "lost", "time": 6.0, "replica": 1, "reason": "silent"},
    {"kind": "join", "time": 9.0, "replica": 1},
    _commit(10.5, [0, 1], start=9.5),
    _commit(11.5, [0, 1], start=10.5),
    {"kind": "lost", "time": 12.0, "replica": 0, "reason": "reset"},
    {"kind": "leader", "time": 13.0, "replica": 1},
    _commit(14.5, [1]),
  ]
  found = failures.of(records, usual=1.0)
  first, second = found.faults
  assert first == failures.Fault(1, 6.0, "silent", 3.0, 3.0, 0.5)
  assert first.length == 3.5
  assert second.replica == 0
  assert math.isinf(second.restarted)
  # 6 and 5.5 of replica 1, 12 of replica 0.
  assert found.up == pytest.approx(6 + 5.5 + 12)
  # 3.0 between the commits, of which 1.0 is usual.
  assert found.takeovers == (2.0,)


def test_leaving_is_no_fault():
  records = [
    {"kind": "join", "time": 0.0, "replica": 0},
    {"kind": "leave", "time": 5.0, "replica": 0},
  ]
  found = failures.of(records, usual=1.0)
  assert found == failures.Found((), 5.0, ())
