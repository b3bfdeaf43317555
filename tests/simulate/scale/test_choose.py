"""A choice for a fleet: the best first, the runner-up, and the reason."""

import pytest

from optax_dist import simulate
from optax_dist.simulate import scale
from tests.simulate.scale.fleets import fleet


def test_without_failures_and_stragglers_nothing_is_dropped():
  found = scale.choose(
    fleet(failure_rate=0.0), local_step_value=0.9, repetitions=1
  )
  best = found.recommended
  assert best.progress == pytest.approx(1.0)
  assert best.period is None
  assert best.replicas_to_aggregate is None
  assert found.options[-1].progress <= best.progress


def test_where_the_network_is_slow_groups_train_alone():
  slow = fleet(
    failure_rate=1e-6, nbytes=1e9, network=simulate.Network(0.05, 1e9)
  )
  found = scale.choose(slow, repetitions=1)
  assert found.recommended.period is not None
  assert found.runner_up is not None
  kinds = [
    o.name.partition(",")[0] for o in (found.recommended, found.runner_up)
  ]
  assert kinds[0] != kinds[1]
  # Unless local steps are worth little.
  cheap = scale.choose(slow, repetitions=1, local_step_value=0.1)
  assert cheap.recommended.period is None
  assert "worth more" in cheap.reason or "less on" in cheap.reason


def test_group_sizes_and_reasons():
  found = scale.choose(
    fleet(chips=512, per_group=8, save=1.0, restart=5.0, latency="gamma:9,0.1"),
    group_sizes=(8, 32),
    periods=(20,),
    repetitions=2,
  )
  assert {o.chips_per_group for o in found.options} == {8, 32}
  # Fewer chips are lost with a failure of a small group.
  assert found.recommended.chips_per_group == 8
  assert "points less on" in found.reason
  checkpoints = [o for o in found.options if o.checkpoint_interval is not None]
  assert {o.name.partition(",")[0] for o in checkpoints} == {
    "one program",
    "elastic restart",
  }
  for option in checkpoints:
    every = f"checkpoints every {option.checkpoint_interval:.4g} s"
    assert option.name.endswith(every)
  report = found.recommended.report()
  assert sum(report["outcome"]["shares"].values()) == pytest.approx(1.0)


def test_numbers_out_of_range_are_refused():
  for options in ({"local_step_value": 0.0}, {"repetitions": 0}):
    with pytest.raises(ValueError, match=next(iter(options))):
      scale.choose(fleet(), **options)
