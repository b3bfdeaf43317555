"""Tests of the report on sync_replicas."""

import maps
import numpy as np
import optax
import pytest

import optax_dist

N = 3


def _tx(needed=2):
  return optax_dist.sync_replicas(
    optax.sgd(1.0),
    maps.AXIS,
    replicas_to_aggregate=needed,
    total_num_replicas=N,
  )


def _after_three_ticks():
  tx = _tx()
  state = tx.init(np.float32(0))
  step = lambda state, g, here: tx.update(g, state, arrived=here)
  run = maps.stepper("vmap", step, state, N)
  for gradients, arrived in [
    ([1, 1, 1], [True, True, False]),
    ([1, np.nan, 1], [True, True, True]),
    ([1, 1, 1], [True, False, False]),
  ]:
    _, state = run(state, np.float32(gradients), np.array(arrived))
  return state


def test_the_outcome_of_every_iteration_is_reported():
  report = optax_dist.sync_report(_after_three_ticks())
  np.testing.assert_array_equal(report.accepted, [3, 1, 0])
  np.testing.assert_array_equal(report.absent, [0, 1, 2])
  np.testing.assert_array_equal(report.dropped["stale"], [0, 0, 1])
  np.testing.assert_array_equal(report.dropped["nonfinite"], [0, 1, 0])
  np.testing.assert_array_equal(report.dropped["overflow"], [0, 0, 0])
  ticks = report.accepted + report.absent + sum(report.dropped.values())
  np.testing.assert_array_equal(ticks, [3, 3, 3])
  assert report.global_step == 2
  np.testing.assert_array_equal(report.accumulated, [0, 0, 0])
  np.testing.assert_array_equal(report.local_step, [2, 1, 1])


def test_report_prints_as_a_table():
  report = optax_dist.sync_report(_after_three_ticks())
  title, head, *rows = str(report).splitlines()
  assert title == "global step 2"
  assert head.split()[:4] == ["replica", "accepted", "absent", "stale"]
  columns = [report.accepted, report.absent, *report.dropped.values()]
  expected = [
    [i, *(column[i] for column in columns)] for i in range(len(report.accepted))
  ]
  assert [[int(cell) for cell in row.split()] for row in rows] == expected
  assert len({len(line) for line in [head, *rows]}) == 1


def test_report_finds_the_state_in_chains_and_wrappers():
  inner = optax.chain(optax.clip(1.0), _tx())
  tx = optax.MultiSteps(inner, 2).gradient_transformation()
  report = optax_dist.sync_report(tx.init(np.zeros(2, np.float32)))
  assert report.accepted.tolist() == [0] * N


@pytest.mark.parametrize("map_name", ["vmap", "pmap"])
def test_report_reads_a_state_made_inside_a_map(map_name):
  tx = _tx()
  step = lambda x: tx.update(x, tx.init(x))[1]
  state = maps.run(map_name, step, np.ones(N, np.float32), size=N)
  report = optax_dist.sync_report(state)
  assert report.accepted.tolist() == [1] * N
  assert report.global_step == 1


@pytest.mark.parametrize("count", [0, 2])
def test_exactly_one_state_is_needed(count):
  state = [_tx().init(0.0) for _ in range(count)]
  with pytest.raises(ValueError, match=f"exactly one .* got {count}"):
    optax_dist.sync_report(state)
