"""The sync-replicas strategy's step against NumPy, and its flags and report."""

import json

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import pytest
import strategy_programs
from sync_replicas_oracle import Oracle

from optax_dist.cli import main
from optax_dist.cli.train import digits

_REPLICAS, _PER_REPLICA, _TICKS = 8, 2, 24


def _loss(params, batch):
  return jnp.mean((batch.images @ params - batch.labels) ** 2)


def _program(**flags):
  args = {
    "replicas_to_aggregate": None,
    "straggler": [],
    "max_staleness": 0,
    "staleness_weight": "one",
    "variable_averages": None,
    "seed": 0,
  }
  return strategy_programs.build(
    "sync-replicas",
    args | flags,
    replicas=_REPLICAS,
    loss_fn=_loss,
    steps=_TICKS,
  )


def _batches(seed=0):
  rng = np.random.default_rng(seed)
  for _ in range(_TICKS):
    size = _REPLICAS * _PER_REPLICA
    yield digits.Batch(
      images=rng.normal(size=(size, 3)).astype(np.float32),
      labels=rng.normal(size=size).astype(np.float32),
    )


def _clipped_gradient(params, batch, replica):
  own = slice(replica * _PER_REPLICA, (replica + 1) * _PER_REPLICA)
  images = batch.images[own].astype(np.float64)
  gradient = 2 * (images @ params - batch.labels[own]) @ images / _PER_REPLICA
  return gradient / max(np.linalg.norm(gradient), 1.0)


def _column(metrics, kind):
  return np.array([int(metrics[f"{kind}_{i}"]) for i in range(_REPLICAS)])


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("needed", [6, 11])
def test_a_straggler_hands_in_the_gradient_of_its_old_parameters(
  needed, staleness
):
  decay = 0.75
  program, sharding = _program(
    replicas_to_aggregate=needed,
    straggler=[(2, 0.5), (5, 0.25)],
    max_staleness=staleness,
    staleness_weight="inverse" if staleness else "one",
    variable_averages=decay,
  )
  weight = (lambda late: 1 / max(1, late)) if staleness else (lambda late: 1.0)
  oracle = Oracle(_REPLICAS, needed, staleness, weight)
  params = np.array([1.0, -2.0, 0.5])
  average = params
  taken = [params] * _REPLICAS
  state = program.init(jnp.asarray(params, jnp.float32))
  absent = np.zeros(_REPLICAS, int)
  for batch in _batches():
    state, metrics = program.step(state, jax.device_put(batch, sharding))
    arrived = _column(metrics, "absent") == absent
    absent = _column(metrics, "absent")
    gradients = np.stack(
      [_clipped_gradient(taken[i], batch, i) for i in range(_REPLICAS)]
    )
    step = oracle.global_step
    params = params + 0.1 * oracle.tick(gradients, arrived)
    if oracle.global_step > step:
      average = average - (1 - decay) * (average - params)
    taken = [
      params if here else old for here, old in zip(arrived, taken, strict=True)
    ]
    for kind in ("accepted", "stale", "nonfinite", "absent"):
      np.testing.assert_array_equal(_column(metrics, kind), oracle.ledger[kind])
    assert metrics["global_step"] == oracle.global_step
    np.testing.assert_allclose(state[0], params, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
      program.eval_params(state), average, rtol=1e-4, atol=1e-5
    )
  assert program.step._cache_size() == 1
  assert set(np.flatnonzero(absent)) == {2, 5}
  assert sum(oracle.ledger["stale"]) > 0
  if staleness:  # Otherwise lateness would be as before.
    late = [oracle.ledger["accepted"][i] for i in (2, 5)]
    assert min(late) > 0


def test_the_seed_draws_who_arrives():
  def drawn(seed):
    program, sharding = _program(straggler=[(1, 0.5)], seed=seed)
    state = program.init(jnp.zeros(3))
    absent = []
    for batch in _batches():
      state, metrics = program.step(state, jax.device_put(batch, sharding))
      absent.append(int(metrics["absent_1"]))
    return absent

  assert drawn(1) == drawn(1) != drawn(2)


def _train(directory, flags):
  argv = ["train", "--strategy", "sync-replicas", "--output", str(directory)]
  return main.main([*argv, *flags.split()])


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    ("--replicas-to-aggregate 0", "must be a whole number of at least 1"),
    ("--straggler 2", "such as 2:0.5, got '2'"),
    ("--straggler=-1:0.5", "such as 2:0.5, got '-1:0.5'"),
    ("--straggler 2:1.5", "such as 2:0.5, got '2:1.5'"),
    ("--straggler 2:nan", "such as 2:0.5, got '2:nan'"),
    ("--straggler 2:0.5 --straggler 2:0.1", "--straggler 2 is given twice"),
    ("--replicas 4 --straggler 4:0.5", "there are 4 replicas, numbered 0 to 3"),
    ("--straggler 8:0.5", "there are 8 replicas, numbered 0 to 7"),
    ("--replicas 1 --straggler 0:0", "no replica would ever arrive"),
    ("--max-staleness -1", "must be a whole number of at least 0"),
    ("--staleness-weight linear", "'linear' (choose from"),
    ("--staleness-weight inverse", "inverse needs --max-staleness"),
    ("--variable-averages 1.5", "must be a decay from 0 to 1, got '1.5'"),
    ("--variable-averages nan", "must be a decay from 0 to 1, got 'nan'"),
  ],
)
def test_wrong_flags_are_one_line(tmp_path, capsys, flags, said):
  assert _train(tmp_path, flags) == 2
  err = capsys.readouterr().err
  assert err.count("\n") == 1
  assert said in err
  assert not list(tmp_path.glob("*.png"))


def test_the_report_shows_what_became_of_the_gradients(tmp_path, capsys):
  flags = "--epochs 1 --replicas-to-aggregate 6 --straggler 2:0.5"
  assert _train(tmp_path, flags) == 0
  out = capsys.readouterr().out.splitlines()
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  last = json.loads(lines[-1])
  counts = [last[f"{kind}_2"] for kind in ("accepted", "stale", "absent")]
  assert sum(counts) == last["step"] == len(lines)
  assert min(counts) > 0
  row = next(line for line in out if line.split()[:1] == ["2"])
  assert [int(n) for n in row.split()] == [2, *counts[:2], 0, counts[2]]

  program, _ = _program()
  axes = matplotlib.figure.Figure().subplots()
  program.panels[0](axes, [last])
  # A bar of each kind that occurs for each replica, end to end.
  assert [len(kind) for kind in axes.containers] == [_REPLICAS] * 3
  ends = [kind[2].get_x() + kind[2].get_width() for kind in axes.containers]
  np.testing.assert_array_equal(ends, np.cumsum(counts))
  assert axes.get_xlabel()
  assert axes.get_ylabel() == "replica"
