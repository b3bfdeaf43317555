"""A process that joins twice as one replica: twins, and cells that run again."""

import contextlib
import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import served
import waiting

from optax_dist import coordinator

_PATIENT = {"timeout": 120.0, "transfer_timeout": 30.0, "silence_timeout": 10.0}


@pytest.fixture
def address():
  with served.served() as made:
    yield made


def _options(address, replica=0, total=1, **options):
  return {
    "coordinator_address": address,
    "secret": served.SECRET,
    "total_num_replicas": total,
    "replica": replica,
    **_PATIENT,
    **options,
  }


def _join(address, replica=0, total=1, **options):
  return coordinator.join(
    optax.sgd(0.5), jnp.zeros(2), **_options(address, replica, total, **options)
  )


def _run_cell(source, names):
  """Runs a cell of a notebook."""
  exec(compile(source, "a cell", "exec"), names)


def _is_replaced(replica):
  with pytest.raises(
    coordinator.CoordinatorError, match=r"replaced by a later.* a run="
  ):
    replica.step(jnp.ones(2))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_second_join_of_a_replica_in_a_process_is_an_error(address, elsewhere):
  with _join(address) as first:
    result = []

    def join_again():
      with pytest.raises(coordinator.CoordinatorError) as caught:
        _join(address)
      result.append(str(caught.value))

    if elsewhere:
      thread = threading.Thread(target=join_again)
      thread.start()
      thread.join()
    else:
      join_again()
    [said] = result
    assert said.startswith("This process is replica 0 of the run already")
    assert "give each a run= of its own" in said
    assert first.step(jnp.ones(2)).accepted


def test_one_process_may_join_two_runs_as_the_same_replica(address):
  with _join(address, run="a") as first, _join(address, run="b") as second:
    for replica in (first, second):
      assert replica.step(jnp.ones(2)).accepted


def test_rerun_notebook_cell_replaces_its_replica(address):
  names = {"join": lambda: _join(address)}
  _run_cell("replica = join()", names)
  first = names["replica"]
  first.step(jnp.ones(2))
  _run_cell("replica = join()", names)
  # No other replica has the parameters, so the run begins again.
  with names["replica"] as second:
    assert second.global_step == 0
    assert second.step(jnp.ones(2)).global_step == 1
  _is_replaced(first)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, ValueError, None])
def test_replica_that_was_alone_begins_a_new_run_after_its_block(
  address, ending
):
  """It may have ended in any way, and its coordinator still runs."""
  for _ in range(2):
    with (
      contextlib.suppress(KeyboardInterrupt, ValueError),
      _join(address) as replica,
    ):
      assert replica.global_step == 0
      assert replica.step(jnp.ones(2)).global_step == 1
      if ending is not None:
        raise ending
  np.testing.assert_array_equal(replica.params, np.full(2, -0.5, np.float32))


def test_replica_that_never_joined_does_not_restart_an_ended_run(address):
  options = {"total": 2, "replicas_to_aggregate": 1, "transfer_timeout": 0.2}
  with _join(address, 0, **options) as replica:
    assert replica.step(jnp.ones(2)).accepted
  with pytest.raises(coordinator.RunFinished):
    _join(address, 1, **options)


def test_interrupted_notebook_cell_rejoins_the_run_of_the_others(address):
  options = {"total": 2, "replicas_to_aggregate": 1}
  with _join(address, 1, **options) as other:
    with (
      contextlib.suppress(KeyboardInterrupt),
      _join(address, **options) as one,
    ):
      one.step(jnp.ones(2))
      raise KeyboardInterrupt
    with _join(address, **options) as again:
      assert again.global_step == 1
      again.step(jnp.ones(2))
    waiting.until(lambda: other.step(jnp.zeros(2)).accepted)
    np.testing.assert_array_equal(other.params, np.full(2, -1.0, np.float32))


def test_unreferenced_replica_is_replaced(address):
  made = []
  thread = threading.Thread(target=lambda: made.append(_join(address)))
  thread.start()
  thread.join()
  with _join(address) as second:
    assert second.step(jnp.ones(2)).accepted
  _is_replaced(made[0])
  _join(address)  # It is gone at once.
  with _join(address) as fourth:
    assert fourth.step(jnp.ones(2)).accepted


def test_join_is_possible_after_a_failed_join(address):
  with pytest.raises(ValueError, match="got 'any'"):
    _join(address, ports="any")
  with _join(address) as replica:
    assert replica.step(jnp.ones(2)).accepted


def test_two_coordinated_optimizers_of_one_replica_are_an_error(address):
  params, grads = jnp.zeros(2), jnp.ones(2)
  first, second = (
    coordinator.as_optimizer(optax.sgd(0.5), total_steps=4, **_options(address))
    for _ in range(2)
  )
  with contextlib.closing(first), contextlib.closing(second):
    state = first.tx.init(params)
    _, state = first.tx.update(grads, state, params)
    with pytest.raises(coordinator.CoordinatorError, match="a run= of its own"):
      second.tx.update(grads, second.tx.init(params), params)
    assert int(state.step) == 1
