"""Tests of the training loop's view: exact numbers, outcomes, a clean end."""

import math
import os
import re
import threading
import time

import embedded_runs as runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import run_journals
import waiting

from optax_dist import coordinator
from optax_dist.coordinator import strategies
from optax_dist.coordinator.aggregation import means
from optax_dist.coordinator.runtime import driver, endpoint

WAYS = pytest.mark.parametrize(
  "inline", ["moved", "in place", "inline"], indirect=True
)


@pytest.fixture
def inline(request, monkeypatch):
  """The bytes that are sent in messages.

  Some gradients stay where they are, as if replicas were on hosts of their own.
  """
  if request.param == "in place":
    monkeypatch.setattr(driver.Driver, "shares_memory", False)
    monkeypatch.setattr(means, "_IN_PLACE", 0)
  return 64 << 10 if request.param == "inline" else 0


def check_replay(results, path):
  """The state of each replica after each step is that of the journal."""
  prints = runs.replay(runs.records(path))
  for result in results:
    assert result.error is None, result.error
    for step, digest in result.prints.items():
      assert digest == prints[step], step


@WAYS
def test_every_step_averages_all_replicas(inline, tmp_path):
  path = tmp_path / "run.jsonl"
  results = runs.run(runs.to_step(6), 3, inline_bytes=inline, journal=path)
  check_replay(results, path)
  for result in results:
    assert result.counts == {"applied": 6}
    assert [o.members for o in result.outcomes] == [(0, 1, 2)] * 6
    assert [o.global_step for o in result.outcomes] == [1, 2, 3, 4, 5, 6]
    assert [o.committed for o in result.outcomes] == [1, 2, 3, 4, 5, 6]

  # The same by hand, one replica after another.
  params, state = runs.PARAMS, runs.OPT.init(runs.PARAMS)
  for step in range(6):
    grads = [
      jax.tree.map(
        np.asarray,
        runs.gradient(params, jnp.asarray(runs.batch_of(replica, step))),
      )
      for replica in range(3)
    ]
    total = jax.tree.map(lambda a, b, c: (a + b) + c, *grads)
    mean = jax.tree.map(lambda x: x / np.float32(3), total)
    updates, state = runs.OPT.update(mean, state, params)
    params = optax.apply_updates(params, updates)
  for result in results:
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
      result.params,
      params,
    )


@WAYS
@pytest.mark.parametrize(
  "quorum",
  [{}, {"max_staleness": 2}, {"max_staleness": 3, "weight": "inverse"}],
  ids=["fresh", "stale", "weighted"],
)
def test_every_step_averages_enough_replicas(inline, quorum, tmp_path):
  path = tmp_path / "run.jsonl"
  # Replica 2 sends its first gradient after another step was made, and the step
  # after that needs it.
  stepped, sent = threading.Event(), threading.Event()

  def train(replica, result):
    while replica.global_step < 12:
      grads, batch = runs.compute(replica, result.computed)
      if replica.replica == 2:
        assert stepped.wait(60.0)
      if replica.replica == 1 and result.computed:
        assert sent.wait(60.0)
      result.computed += 1
      replica.step(grads, batch=batch)
      result.prints[replica.global_step] = replica.fingerprint()
      if replica.replica == 0:
        stepped.set()
      if replica.replica == 2:
        sent.set()

  results = runs.run(
    train, 3, k=2, inline_bytes=inline, journal=path, quorum=quorum
  )
  check_replay(results, path)
  answer = runs.records(path)
  late = quorum.get("max_staleness", 0)
  left = any(r["kind"] == "leave" for r in answer)
  runs.check_journal(answer, 1 if left else 2, late)
  runs.check_ledger(dict(enumerate(results)), answer)
  reasons = set().union(*(r.counts for r in results))
  assert reasons <= {"applied", "stale"}
  staleness = [
    m["staleness"]
    for c in answer
    if c["kind"] == "commit"
    for m in c["members"]
  ]
  assert (max(staleness) > 0) == bool(late)


@WAYS
def test_replicas_share_a_step_of_more_gradients_than_replicas(
  inline, tmp_path
):
  path = tmp_path / "run.jsonl"
  results = runs.run(runs.to_step(4), 2, k=5, inline_bytes=inline, journal=path)
  check_replay(results, path)
  answer = runs.records(path)
  runs.check_journal(answer, 5)
  runs.check_ledger(dict(enumerate(results)), answer)
  commits = [r for r in answer if r["kind"] == "commit"]
  for commit in commits:
    assert 5 <= sum(m["count"] for m in commit["members"]) <= 6
  for result in results:
    # A summed gradient is reported as accepted, though its step is yet to come; unless
    # the others' gradients were enough before it came.
    refused = {o.reason for o in result.outcomes if not o.accepted}
    assert refused <= {"superseded", "stale"}


def test_one_replica_trains_alone():
  (result,) = runs.run(runs.to_step(5), 1)
  assert result.error is None
  assert result.counts == {"applied": 5}


@WAYS
def test_a_gradient_that_is_not_finite_never_reaches_the_mean(inline, tmp_path):
  path = tmp_path / "run.jsonl"

  def train(replica, result):
    while replica.global_step < 5:
      grads, batch = runs.compute(replica, result.computed)
      if replica.replica == 1 and result.computed == 1:
        bad = jnp.where(jnp.arange(70) == 69, jnp.nan, grads["b"])
        grads = grads | {"b": bad}
      result.computed += 1
      result.outcomes.append(replica.step(grads, batch=batch))
      result.prints[replica.global_step] = replica.fingerprint()

  results = runs.run(train, 2, inline_bytes=inline, journal=path)
  check_replay(results, path)
  assert results[1].outcomes[1].reason == "non_finite"
  assert results[1].counts == {"applied": 5, "non_finite": 1}
  assert np.isfinite(results[0].params["w"]).all()
  drops = [r for r in runs.records(path) if r["kind"] == "drop"]
  assert [(d["replica"], d["reason"]) for d in drops] == [(1, "non_finite")]


def test_data_may_run_out_on_some_replicas_first(tmp_path):
  # TensorFlow issue 20342: the others waited indefinitely.
  path = tmp_path / "run.jsonl"

  def train(replica, result):
    for number in range(3 if replica.replica else 9):
      grads, batch = runs.compute(replica, number)
      result.computed += 1
      result.outcomes.append(replica.step(grads, batch=batch))
      result.prints[replica.global_step] = replica.fingerprint()

  results = runs.run(train, 3, journal=path, inline_bytes=0)
  check_replay(results, path)
  assert [r.counts["applied"] for r in results] == [9, 3, 3]
  members = [o.members for o in results[0].outcomes]
  assert members[:3] == [(0, 1, 2)] * 3
  assert members[-1] == (0,)


def test_departure_that_must_not_lower_the_quorum_is_an_error(tmp_path):
  def train(replica, result):
    while replica.replica or replica.global_step < 2:
      replica.step(runs.compute(replica, 0)[0])

  first, second = runs.run(train, 2, quorum={"lower_on_leave": False})
  assert first.error is None
  with pytest.raises(coordinator.CoordinatorError, match="missing: 0"):
    raise second.error


def test_finish_is_seen_by_all_with_the_same_parameters():
  def train(replica, result):
    while True:
      outcome = replica.step(runs.compute(replica, 0)[0])
      if outcome.finished:
        assert replica.finished
        # Nothing more happens, and nothing is an error.
        again = replica.step(runs.compute(replica, 0)[0])
        assert again.finished
        assert again.reason == "finished"
        break
      if replica.replica == 1 and outcome.global_step >= 4:
        replica.finish("the loss is low enough")
        return replica.fingerprint(), replica.global_step
    return replica.fingerprint(), replica.global_step

  results = runs.run(train, 3, k=2)
  assert [r.error for r in results] == [None] * 3
  steps = {r.value[1] for r in results}
  last = {r.value[0] for r in results if r.value[1] == max(steps)}
  assert len(last) == 1
  assert max(steps) - min(steps) <= 1


def test_abandoned_stale_gradient_is_counted_as_stale():
  turn = threading.Event()

  def train(replica, result):
    if replica.replica == 2:
      assert not replica.is_stale
      turn.set()
      waiting.until(lambda: replica.is_stale)
      assert replica.is_stale
      outcome = replica.abandon()
      assert (outcome.accepted, outcome.reason) == (False, "stale")
      assert outcome.global_step >= 1
      assert not replica.is_stale
      return replica.stats()["gradients"]
    assert turn.wait(60.0)
    replica.step(runs.compute(replica, 0)[0])
    return None

  results = runs.run(train, 3, k=2)
  assert [r.error for r in results] == [None] * 3
  assert results[2].value == {"applied": 0, "stale": 1}


def test_abandoned_fresh_gradient_leaves_the_replica_unchanged():
  def train(replica, result):
    params = replica.params
    assert replica.abandon().reason == "abandoned"
    assert replica.params is params
    assert not replica.is_stale
    assert replica.step(runs.compute(replica, 0)[0]).accepted
    return replica.stats()["gradients"]

  (result,) = runs.run(train, 1)
  assert result.error is None
  assert result.value == {"applied": 1, "abandoned": 1}


def test_all_replicas_save_after_the_same_step():
  saved = {}

  def train(replica, result):
    while replica.global_step < 20 or replica.replica not in saved:
      if replica.replica == 2:
        time.sleep(0.01)  # It passes steps over.
      outcome = replica.step(runs.compute(replica, 0)[0])
      if replica.replica == 0 and outcome.global_step == 5:
        replica.save_soon()
      if outcome.save is not None:
        shared, step = replica.state_to_save()
        assert step == outcome.save <= outcome.global_step
        saved[replica.replica] = step, coordinator.fingerprint(shared)

  results = runs.run(train, 3, k=2)
  assert [r.error for r in results] == [None] * 3
  assert sorted(saved) == [0, 1, 2]
  assert len(set(saved.values())) == 1
  assert saved[0][0] >= 6


def test_a_later_checkpoint_has_the_later_step():
  def train(replica, result):
    announced = []
    while replica.global_step < 12:
      outcome = replica.step(runs.compute(replica, 0)[0])
      if outcome.global_step == 2:
        replica.save_soon()
      announced.append(outcome.save)
      shared, step = replica.state_to_save()
      assert step == outcome.global_step
      assert coordinator.fingerprint(shared) == replica.fingerprint()
    return announced

  (result,) = runs.run(train, 1)
  assert result.error is None
  assert len([step for step in result.value if step is not None]) == 1


def test_the_common_step_is_announced_where_samples_are_drawn():
  data = coordinator.Batches(num_samples=1000, global_batch=1)
  gone_on, announced = threading.Event(), threading.Event()

  def train(replica):
    if replica.replica:
      assert gone_on.wait(60.0)
    for _ in replica.batches():
      outcome = replica.step(jnp.ones(2))
      if replica.replica:
        announced.set()
        return outcome.save
      if outcome.global_step == 1:
        replica.save_soon()
      if outcome.global_step == 5:
        gone_on.set()
        assert announced.wait(60.0)
        return outcome.save

  _, late = coordinator.run_embedded(
    train,
    2,
    optax.sgd(0.1),
    jnp.zeros(2),
    replicas_to_aggregate=1,
    data=data,
  )
  assert 2 <= late <= 5


def test_the_journal_has_a_join_of_each_replica(tmp_path):
  path = tmp_path / "journal"

  def train(replica):
    while replica.global_step < 3:
      replica.step(jnp.ones(2))

  coordinator.run_embedded(train, 3, optax.sgd(0.1), jnp.zeros(2), journal=path)
  records = run_journals.whole(path)
  joined = [r["replica"] for r in records if r["kind"] == "join"]
  assert sorted(joined) == [0, 1, 2]


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_do_not_wait_for_one_that_raised_an_error(replicas):
  # With time-outs longer than any step may take, only the messages matter.
  slow = {"timeout": 300.0, "transfer_timeout": 8.0, "silence_timeout": 100.0}
  waited = []

  def train(replica):
    while replica.global_step < 20:
      outcome = replica.step(runs.compute(replica, 0)[0])
      waited.append(outcome.waited)
      if (replica.replica, replica.global_step) == (0, 5):
        raise runs.Killed
    # If it left, the last replica would wait for lost ones.
    replica.finish()

  with pytest.raises(runs.Killed):
    coordinator.run_embedded(
      train, replicas, runs.OPT, runs.PARAMS, lower_on_loss=True, **slow
    )
  assert max(waited) < slow["transfer_timeout"]
  assert len(waited) >= 5 + 20 * (replicas - 1)


@pytest.mark.parametrize(
  ("options", "total"),
  [
    ({"replicas_to_aggregate": 2}, (1 + 2) / 2 + (3 + 4) / 2),
    ({"strategy": coordinator.local_updates(communication_period=2)}, 10.0),
  ],
)
def test_a_program_may_write_into_its_numpy_gradient_after_the_call(
  options, total
):
  """Though it may be read later: in a sum, or by a step that JAX has yet to take."""

  def train(replica):
    gradient = np.zeros(300_000, np.float32)
    for number in range(4):
      gradient[:] = number + 1
      replica.step(gradient)
      gradient[:] = 1000.0
    return replica.params

  params = jnp.zeros(300_000)
  [after] = coordinator.run_embedded(
    train, 1, optax.sgd(1.0), params, **options
  )
  assert set(np.asarray(after).tolist()) == {-total}


def test_a_program_may_write_into_the_numpy_arrays_that_it_has_joined_with():
  opt = optax.trace(1.0)
  params = np.zeros(300_000, np.float32)
  state = jax.tree.map(np.array, opt.init(params))

  def train(replica):
    for array in (params, *jax.tree.leaves(state)):
      array[:] = 1000.0
    replica.step(jnp.ones(300_000))
    return replica.params

  [after] = coordinator.run_embedded(train, 1, opt, params, opt_state=state)
  assert set(np.asarray(after).tolist()) == {1.0}


def test_invalid_gradients_are_refused_at_the_call():
  def train(replica, result):
    good = runs.compute(replica, 0)[0]
    with pytest.raises(ValueError, match="structure"):
      replica.step(good["w"])
    with pytest.raises(ValueError, match=r"\['b'\] must be float32\[70\]"):
      replica.step(good | {"b": good["b"][:-1]})
    with pytest.raises(ValueError, match="int32"):
      replica.step(good | {"b": good["b"].astype(jnp.int32)})
    assert replica.step(good).accepted

  (result,) = runs.run(train, 1)
  assert result.error is None, result.error


@pytest.mark.parametrize(
  ("params", "error"),
  [
    ({"n": np.zeros(3, np.int32)}, TypeError),
    ({}, ValueError),
    ({"n": np.zeros((0, 3), np.float32)}, ValueError),
  ],
)
def test_bad_parameters_are_refused(params, error):
  with pytest.raises(error, match="params"):
    runs.make(endpoint.World(), 0, k=1, n=1, params=params)


def test_parameters_may_be_sharded_over_local_devices():
  mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  params = {
    "b": jax.device_put(jnp.ones(70), whole),
    "w": jax.device_put(jnp.ones((4, 30)), rows),
  }

  def train(replica, result):
    runs.to_step(5)(replica, result)
    for tree in (replica.params, replica.opt_state[0].trace):
      assert tree["w"].sharding.is_equivalent_to(rows, 2)
      assert tree["b"].sharding.is_equivalent_to(whole, 1)

  sharded = runs.run(train, 2, params=params, inline_bytes=0)
  assert [r.error for r in sharded] == [None] * 2
  plain = jax.tree.map(np.asarray, params)
  same = runs.run(
    runs.to_step(5), 2, params=jax.tree.map(jnp.asarray, plain), inline_bytes=0
  )
  for a, b in zip(sharded, same, strict=True):
    assert a.prints == b.prints


def test_the_threads_of_a_closed_replica_end():
  before = runs.coordinator_threads(timeout=0.0)
  with endpoint.World() as world:
    one = runs.make(world, 0, k=1, n=1).start()
    assert runs.coordinator_threads(before, timeout=0.0)
    one.close()
  assert not runs.coordinator_threads(before)
  one.close()


def test_wait_of_a_lone_replica_has_a_deadline():
  def train(replica, result):
    with pytest.raises(coordinator.CoordinatorError) as caught:
      replica.step(runs.compute(replica, 0)[0])
    match = re.search(r"made no progress for (\d+\.\d) s", str(caught.value))
    assert float(match[1]) >= 1.0
    assert "absent: replica 1, 2" in str(caught.value)

  one = runs.make(
    endpoint.World(), 0, k=3, n=3, timeout=1.0, transfer_timeout=0.5
  )
  result = runs.Result()
  runs.finish([runs.start(one, train, result)])
  # The run is over for it, which leaving tells again.
  assert isinstance(result.error, coordinator.CoordinatorError)


def test_replicas_of_a_number_that_is_not_positive_are_refused():
  with pytest.raises(ValueError, match="num_replicas"):
    coordinator.run_embedded(lambda r: r, 0, optax.sgd(0.1), jnp.zeros(3))
  assert strategies.Quorum(1, 1).max_staleness == 0


def test_parameters_are_final_once_the_run_is_seen_as_finished():
  """Others have taken the last steps since the last call of this replica."""
  slow_one_is_in = threading.Event()

  def train(replica):
    if replica.replica == 1:
      slow_one_is_in.set()
      waiting.until(lambda: replica.finished)
    else:
      assert slow_one_is_in.wait(60.0)
      while replica.global_step < 5:
        replica.step(np.ones(3, np.float32))
      replica.finish()
    return replica.global_step, replica.params.tolist()

  ends = coordinator.run_embedded(
    train,
    2,
    optax.sgd(1.0),
    np.zeros(3, np.float32),
    replicas_to_aggregate=1,
    timeout=60.0,
  )
  assert ends == [(5, [-5.0] * 3)] * 2


def _steps_with(config, journal=None):
  return coordinator.run_embedded(
    lambda replica: replica.step(jnp.ones(3)).committed,
    1,
    optax.sgd(0.1),
    jnp.zeros(3),
    config=config,
    journal=journal,
    timeout=60.0,
  )


def test_a_config_is_in_the_journal_or_is_refused_by_name(tmp_path):
  """A coordinator that can't read it would end, again and again, for all replicas."""
  journal = tmp_path / "journal.jsonl"
  config = {"path": os.fsdecode(b"caf\xe9")}
  assert _steps_with(config, journal) == [1]
  assert run_journals.whole(journal)[0]["config"] == config
  with pytest.raises(ValueError, match="`config` must have at most 1,048,576"):
    coordinator.Options(config={"text": "x" * (1 << 20)})
  with pytest.raises(ValueError, match="config must be a JSON value"):
    _steps_with({"rate": math.nan})


def test_a_config_that_can_not_be_written_does_not_end_the_coordinator(
  tmp_path, caplog
):
  deep = 1
  for _ in range(600):
    deep = [deep]
  assert _steps_with({"deep": deep}, tmp_path / "journal.jsonl") == [1]
  assert "journal.jsonl can't be written" in caplog.text


def test_a_batch_must_be_what_the_journal_can_write():
  zeros = np.zeros(3, np.float32)

  def train(replica):
    for batch in (float("nan"), {1, 2}):
      with pytest.raises(ValueError, match="batch must be a JSON value"):
        replica.step(zeros, batch=batch)
    with pytest.raises(ValueError, match=r"at most 524288 bytes .* got 600000"):
      replica.step(zeros, batch="x" * 599_998)
    assert replica.step(zeros, batch={"rows": np.arange(2)}).accepted

  coordinator.run_embedded(train, 1, optax.sgd(0.1), zeros, timeout=60.0)


def test_a_closed_replica_raises_at_once():
  kept = []

  def train(replica):
    kept.append(replica)
    raise runs.Killed

  with pytest.raises(runs.Killed):
    coordinator.run_embedded(train, 1, optax.sgd(0.1), jnp.zeros(2))
  (replica,) = kept
  begun = time.monotonic()
  for use in (lambda: replica.step(jnp.ones(2)), replica.finish, replica.leave):
    with pytest.raises(coordinator.CoordinatorError, match="closed"):
      use()
  assert time.monotonic() - begun < 60.0


def test_two_threads_can_not_use_a_replica_at_once():
  done = threading.Event()

  def train(replica):
    if replica.replica:
      assert done.wait(60.0)
      return replica.step(jnp.ones(2)).accepted
    accepted = []
    other = threading.Thread(
      target=lambda: accepted.append(replica.step(jnp.ones(2)).accepted)
    )
    other.start()
    # Then it waits for the other replica.
    waiting.until(lambda: replica._participant.submission.pending >= 0)
    with pytest.raises(RuntimeError, match="Two threads"):
      replica.step(jnp.ones(2))
    done.set()
    other.join()
    return accepted[0]

  result = coordinator.run_embedded(train, 2, optax.sgd(0.1), jnp.zeros(2))
  assert result == [True, True]


def test_donated_parameters_are_refused_with_the_remedy():
  def train(replica):
    replica.params.delete()
    replica.step(jnp.ones(2))

  with pytest.raises(ValueError, match=r"donate.*jax\.tree\.map\(jnp\.copy"):
    coordinator.run_embedded(train, 1, optax.sgd(0.1), jnp.zeros(2))
