"""All replicas die while their store lives, and others come."""

import embedded_runs as runs
import pytest

from optax_dist import coordinator


def _die_after(world, steps):
  """Two replicas that take so many steps and die; what the first had then."""
  found = []

  def train(replica, result):
    runs.to_step(steps)(replica, result)
    found.append((replica.params, replica.opt_state))
    raise runs.Killed

  results = runs.run(train, 2, world=world)
  assert [type(r.error) for r in results] == [runs.Killed] * 2
  return found[0]


def _come(world, timeout, **state):
  """One that comes later, alone, and takes a step if it can."""
  result = runs.Result()
  quick = {"attempt_timeout": 0.5, "leader_timeout": 0.5}
  one = runs.make(world, 2, k=1, n=2, timeout=timeout, **quick, **state)
  train = lambda replica, result: runs.to_step(replica.global_step + 1)(
    replica, result
  )
  runs.finish([runs.start(one, train, result)])
  return result


def test_before_the_first_step_the_run_begins_again():
  world = runs.endpoint.World()
  _die_after(world, 0)
  result = _come(world, 60.0)
  assert result.error is None
  assert result.outcomes[-1].global_step == 1


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_replica_that_joins_a_run_without_survivors_gets_an_error(
  has_checkpoint,
):
  """Nobody can tell whether a checkpoint is of this run: it needs another name."""
  world = runs.endpoint.World()
  params, opt_state = _die_after(world, 2)
  state = {"params": params, "opt_state": opt_state, "global_step": 2}
  result = _come(world, 1.0, **(state if has_checkpoint else {}))
  assert isinstance(result.error, coordinator.CoordinatorError)
  assert "start the job again from a checkpoint" in str(result.error)
