"""The network of ``simulate --train``."""

import jax
import numpy as np

from optax_dist import simulate
from optax_dist.cli.simulate import simulated_training


def test_the_seed_decides_and_batches_differ():
  params = simulated_training.init(0)
  same, other = simulated_training.init(0), simulated_training.init(1)
  equal = lambda a, b: np.array_equal(a["out"]["w"], b["out"]["w"])
  assert equal(params, same)
  assert not equal(params, other)
  gradient, evaluate = simulated_training.problem()
  first, again, second = (
    jax.jit(gradient)(params, jax.random.key(i)) for i in (0, 0, 1)
  )
  assert equal(first, again)
  assert not equal(first, second)
  assert 0 < float(evaluate(params)["accuracy"]) < 0.4


def test_accuracy_that_was_not_reached_is_a_dash(capsys):
  training = simulate.Training(
    simulate.asynchronous(),
    np.array([0.0, 10.0]),
    np.array([0, 5]),
    {"loss": np.array([2.0, np.inf]), "accuracy": np.array([0.1, 0.85])},
    None,
    simulate.simulate_timing(
      simulate.asynchronous(), simulate.parse_latency("constant:1"), 2, steps=5
    ),
  )
  simulated_training.show("title", [training])
  (line,) = [
    x for x in capsys.readouterr().out.splitlines() if "asynchronous" in x
  ]
  assert line.split()[-2:] == ["9.333", "-"]
  report = simulated_training.report(training)
  assert report["metrics"]["loss"] == [2.0, None]
