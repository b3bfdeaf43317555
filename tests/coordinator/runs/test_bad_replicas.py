"""A faulty replica costs the others no sample and no step.

And a run whose gradients are never finite ends, with an error that says so.
"""

import itertools
import re
import threading
import time

import jax
import jax.numpy as jnp
import optax
import pytest

from optax_dist import coordinator
from optax_dist.coordinator import journal as journals
from optax_dist.coordinator.training import calls

PARAMS = jnp.zeros(4)
GOOD, BAD = jnp.ones(4), jnp.full(4, jnp.nan)
# Finite, but the sum of two is not.
TOO_LARGE = jnp.full(4, 3e38)
SLOTS = {"micro_batch": 3, "deterministic": True}
_KINDS = {
  "leased": ({}, {"replicas_to_aggregate": 2}),
  "streaming": ({"mode": "streaming"}, {"replicas_to_aggregate": 2}),
  "one is enough": ({}, {"replicas_to_aggregate": 1}),
  "sums": ({}, {"replicas_to_aggregate": 6}),
  "local steps": (
    {},
    {
      "replicas_to_aggregate": 2,
      "strategy": coordinator.local_updates(communication_period=2),
    },
  ),
  "elastic": (
    {},
    {
      "replicas_to_aggregate": 1,
      "strategy": coordinator.elastic_average(
        moving_rate=0.5, communication_period=2
      ),
    },
  ),
  "slots": (SLOTS, {"probe": None}),
}


def train(replica, is_finite, pause=0.002, seen=None, bad=BAD):
  """Steps until the data is used; a replica may be wrong."""
  wrong = 0
  slots = replica._participant.samples.slots is not None
  for item in replica.micro_batches() if slots else replica.batches():
    samples = item.indices if slots else item
    if seen is not None:
      seen.append(set(samples.tolist()))
    good = is_finite(replica, samples)
    if good:
      time.sleep(pause)
    wrong += replica.step(GOOD if good else bad).reason == "non_finite"
  return replica.global_step, replica.report_data(), wrong


def run(data, is_finite, replicas=3, bad=BAD, **options):
  return coordinator.run_embedded(
    lambda replica: train(replica, is_finite, bad=bad),
    replicas,
    optax.sgd(0.1),
    PARAMS,
    data=data,
    **options,
  )


@pytest.mark.parametrize("kind", _KINDS)
def test_replica_that_yields_nan_costs_the_others_no_sample_or_step(
  kind, tmp_path
):
  """The bad replica is faster than the others."""
  more, options = _KINDS[kind]
  data = coordinator.Batches(240, 12, epochs=2, **more)
  journal = tmp_path / "journal.jsonl"
  result = run(
    data,
    lambda replica, samples: replica.replica != 1,
    journal=journal,
    **options,
  )
  for step, reports, _ in result:
    assert step == 40
    assert [r.committed for r in reports] == [240, 240]
    assert all(r.skipped == r.open == () for r in reports)
  records = journals.read(journal).records
  named = [r for r in records if r["kind"] == "not_finite"]
  _, _, wrong = result[1]
  assert {r["replica"] for r in named} == ({1} if wrong else set()), wrong


@pytest.mark.parametrize("kind", ["leased", "sums", "slots"])
def test_replica_that_yields_nan_at_times_contributes_in_between(kind):
  more, options = _KINDS[kind]
  data = coordinator.Batches(240, 12, epochs=2, **more)
  count = itertools.count()
  at_times = lambda replica, samples: (
    replica.replica != 1 or next(count) % 4 != 0
  )
  for step, reports, _ in run(data, at_times, **options):
    assert step == 40
    assert all(r.skipped == r.open == () for r in reports)


@pytest.mark.parametrize("kind", ["leased", "one is enough", "slots"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_sample_that_is_bad_for_all_is_skipped_and_reported(kind, replicas):
  more, options = _KINDS[kind]
  if "replicas_to_aggregate" in options:
    k = min(replicas, options["replicas_to_aggregate"])
    options = {**options, "replicas_to_aggregate": k}
  data = coordinator.Batches(48, 12, **more)
  is_finite = lambda replica, samples: 7 not in samples
  for _, (report,), _ in run(data, is_finite, replicas, **options):
    assert 7 in report.skipped + report.open
    assert len(report.skipped + report.open) <= 12
  with pytest.raises(coordinator.CoordinatorError, match="max_skipped is 0"):
    run(data, is_finite, replicas, max_skipped=0, **options)


@pytest.mark.parametrize(
  ("kind", "bad"),
  [
    *[(kind, BAD) for kind in _KINDS],
    *[(kind, TOO_LARGE) for kind in ("leased", "streaming", "sums", "slots")],
  ],
)
def test_run_without_any_finite_gradient_ends_with_an_error(kind, bad):
  more, options = _KINDS[kind]
  data = coordinator.Batches(48, 12, seed=1, **more)
  with pytest.raises(coordinator.CoordinatorError) as raised:
    run(
      data, lambda replica, samples: False, max_skipped=48, bad=bad, **options
    )
  text = str(raised.value)
  assert "no sample is in a step" in text
  assert re.search(r"samples \d+, \d+, .* of epoch 0", text)
  assert re.search(r"by replica: .*replica \d \(\d+\)", text)


def test_error_names_the_required_replica_whose_gradients_are_nonfinite():
  data = coordinator.Batches(240, 12)
  with pytest.raises(coordinator.CoordinatorError) as raised:
    run(data, lambda replica, samples: replica.replica != 1, timeout=1.5)
  assert re.match(
    r"Step 0 made no progress for \d+\.\d s: replica 1 delivered \d+ gradients that"
    r" are not finite",
    str(raised.value),
  )


@pytest.mark.parametrize("strategy", [None, coordinator.local_updates()])
def test_steps_go_on_without_a_replica_that_is_never_finite(strategy, tmp_path):
  """Where losses lower the quorum: it is worth no more than a lost one."""
  steps, journal = {}, tmp_path / "journal.jsonl"

  def train(replica):
    while replica.global_step < 20 and not replica.finished:
      time.sleep(0.001)
      replica.step(BAD if replica.replica == 1 else GOOD)
    steps[replica.replica] = replica.global_step

  with pytest.raises(coordinator.CoordinatorError) as raised:
    coordinator.run_embedded(
      train,
      3,
      optax.sgd(0.1),
      PARAMS,
      strategy=strategy,
      lower_on_loss=True,
      timeout=8.0,
      journal=journal,
    )
  assert steps == {0: 20, 2: 20}
  (why,) = re.findall(
    r"refuses replica 1: (its last \d+ gradients are not finite; look at its data"
    r" and at its devices)\.",
    str(raised.value),
  )
  lost = [r for r in journals.read(journal).records if r["kind"] == "lost"]
  assert lost[0]["reason"] == why


@pytest.mark.parametrize("bad", [{0, 1}, {1}])
@pytest.mark.parametrize(
  "strategy",
  [
    None,
    coordinator.elastic_average(moving_rate=0.5, communication_period=2),
    coordinator.local_updates(communication_period=2),
    coordinator.decoupled_diloco(period=4, fragments=1),
  ],
)
def test_nonfinite_gradients_do_not_defer_the_timeout(strategy, bad):
  """Without leased data: nothing else would ever end it."""
  if strategy is not None and len(bad) == 1:
    pytest.skip("One replica is enough for an exchange.")

  def endless(replica):
    while not replica.finished:
      time.sleep(0.001)
      replica.step(BAD if replica.replica in bad else GOOD)

  with pytest.raises(coordinator.CoordinatorError) as raised:
    coordinator.run_embedded(
      endless, 2, optax.sgd(0.1), PARAMS, strategy=strategy, timeout=1.5
    )
  text = str(raised.value)
  for replica in bad:
    assert re.search(
      rf"replica {replica} delivered \d+ gradients? that (are|is) not finite",
      text,
    )
  assert "computing: replica 1" not in text


def test_replica_whose_contribution_is_refused_is_removed_and_rejoins(
  monkeypatch, caplog
):
  """Otherwise it would wait for an answer, and the others for it, to `timeout`."""
  monkeypatch.setattr(calls, "_MOST_TOKENS", 1 << 63)

  def train(replica):
    tokens = 1 << 62 if replica.replica == 1 else 1
    while replica.global_step < 3 and not replica.finished:
      replica.step(GOOD, tokens=tokens)  # The sum of two is more than 64 bits.
      time.sleep(0.005)
    replica.finish()
    return replica.global_step

  strategy = coordinator.decoupled_diloco(period=2, fragments=1)
  steps = coordinator.run_embedded(
    train, 3, optax.sgd(0.1), PARAMS, strategy=strategy, timeout=20.0
  )
  assert steps == [3, 3, 3]
  assert "replica 1 was removed (it sent a contribution without" in caplog.text


@pytest.mark.parametrize("kind", [*_KINDS, "inline", "exchanged"])
def test_donated_gradient_is_not_part_of_the_next_sum(kind):
  """Its replica may catch the error: each later step would raise it again."""
  more, options = _KINDS.get(kind, (None, {"replicas_to_aggregate": 2}))
  options = {"timeout": 60.0} | options
  if more is not None:
    options["data"] = coordinator.Batches(48, 12, **more)
  if kind == "exchanged":
    options["inline_bytes"] = 0

  def train(replica):
    errors, numbers = 0, itertools.count()
    items = itertools.repeat(None)
    if kind == "slots":
      items = replica.micro_batches()
    elif more is not None:
      items = replica.batches()
    for _ in items:
      grads = GOOD + 0
      if replica.replica == 1 and next(numbers) == 1:
        grads.delete()
      try:
        outcome = replica.step(grads)
      except RuntimeError as error:
        assert "deleted" in str(error)  # noqa: PT017
        errors += 1
        continue
      if outcome.global_step == 4 or outcome.finished:
        break
    return replica.global_step, errors

  (step, none), (_, errors) = coordinator.run_embedded(
    train, 2, optax.sgd(0.1), PARAMS, **options
  )
  assert step == 4
  assert (none, errors <= 1) == (0, True)


@pytest.mark.parametrize("call", ["leave", "close", "finish"])
def test_another_thread_ends_a_replica_that_waits_in_a_step(call):
  def ends(replica):
    if replica.replica == 0:
      assert ended.wait(60.0)
      return None
    end = threading.Thread(target=lambda: getattr(replica, call)())
    end.start()
    try:
      return replica.step(GOOD).finished
    except coordinator.CoordinatorError as error:
      return str(error)
    finally:
      ended.set()
      end.join()

  ended = threading.Event()
  results = coordinator.run_embedded(ends, 2, optax.sgd(0.1), PARAMS)
  assert results[1] is True or "is closed" in results[1]


@pytest.mark.parametrize("is_stuck", [False, True])
def test_run_ends_at_once_if_an_embedded_replica_fails_that_it_needs(
  is_stuck, tmp_path
):
  """No other process takes its place: the others would wait for `timeout`."""
  ended, errors = threading.Event(), []

  def train(replica):
    while True:
      if (replica.replica, replica.global_step) == (1, 2):
        if not is_stuck:
          raise KeyError("a bug")
        assert ended.wait(60.0)
      try:
        replica.step(GOOD)
      except coordinator.CoordinatorError as error:
        if replica.replica == 0:
          errors.append(str(error))
          ended.set()
        raise

  with pytest.raises(coordinator.CoordinatorError if is_stuck else KeyError):
    coordinator.run_embedded(
      train,
      2,
      optax.sgd(0.1),
      PARAMS,
      journal=tmp_path / "journal.jsonl",
      step_timeout=5.0,
    )
  why = "stuck: its step has taken" if is_stuck else "it has raised KeyError"
  assert f"Step 2 needs replica 1, which is lost: {why}" in errors[0]
  *_, last = journals.read(tmp_path / "journal.jsonl").records
  assert (last["kind"], last["reason"]) == ("finish", errors[0])


def test_replica_whose_update_hangs_ends_with_the_run():
  """No thread of it notices, and the others wait for it."""
  ended, hung = threading.Event(), []

  def hang(step):
    if threading.current_thread().name == "optax-dist-1-work":
      hung.append(not ended.wait(60.0))
    return step

  def update(grads, step, params=None):
    step = jax.pure_callback(hang, jax.ShapeDtypeStruct((), jnp.int32), step)
    return grads, step + 1

  def train(replica):
    try:
      while True:
        replica.step(jnp.ones(100_000))
    finally:
      if replica.replica == 1:
        ended.set()

  optimizer = optax.GradientTransformation(lambda params: jnp.int32(0), update)
  with pytest.raises(
    coordinator.CoordinatorError, match="computing: replica 1"
  ):
    coordinator.run_embedded(
      train, 2, optimizer, jnp.zeros(100_000), timeout=2.0
    )
  assert hung
  assert not any(hung)


def test_parameters_that_are_nan_are_refused():
  """All others would get them from the first replica that joins."""
  params = {"good": PARAMS, "bad": PARAMS.at[1].set(jnp.nan)}
  with pytest.raises(ValueError, match=r"params\['bad'\] must have no NaN"):
    coordinator.run_embedded(lambda replica: None, 1, optax.sgd(0.1), params)
