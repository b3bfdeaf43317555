"""The flags of DiLoCo, from the command line to its numbers."""

import inspect

import numpy as np
import pytest
import small_trainings
import strategy_programs

import optax_dist
from optax_dist.cli import errors
from optax_dist.cli.train import strategies


@pytest.mark.parametrize(
  ("flags", "rate", "momentum"),
  [
    ([], 0.7, 0.9),
    (["--outer-learning-rate", "0.25", "--outer-momentum", "0"], 0.25, 0.0),
  ],
)
def test_the_outer_optimizer_applies_the_mean_change(flags, rate, momentum):
  center, own = small_trainings.train(
    "diloco", [*flags, "--communication-period", "1"], 2
  )
  expected = small_trainings.START
  trace = np.zeros(3)
  for batch in small_trainings.batches(2):
    params = np.tile(expected, (small_trainings.REPLICAS, 1))
    change = 0.1 * small_trainings.gradients(params, batch).mean(0)
    trace = momentum * trace + change
    expected = expected - rate * (momentum * trace + change)
  np.testing.assert_allclose(center, expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(
    own, np.tile(expected, (small_trainings.REPLICAS, 1)), rtol=1e-4, atol=1e-5
  )


def test_the_outer_optimizer_is_by_default_that_of_the_transform():
  args = strategy_programs.parse("diloco")
  usual = inspect.signature(optax_dist.diloco).parameters
  for name in ("outer_learning_rate", "outer_momentum"):
    assert getattr(args, name) == usual[name].default


@pytest.mark.parametrize(
  ("value", "fits"), [("0", True), ("0.999", True), ("1", False), ("2", False)]
)
def test_the_momentum_is_below_1(value, fits):
  args = strategy_programs.parse("diloco", "--outer-momentum", value)
  if fits:
    strategies.load("diloco").check(args)
    return
  with pytest.raises(errors.CommandError, match=f"below 1, got {value}"):
    strategies.load("diloco").check(args)


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (
      ["--outer-learning-rate", "0"],
      "must be a finite number above 0, got '0'",
    ),
    (["--outer-momentum", "-0.5"], "--outer-momentum"),
    (["--outer-momentum", "nan"], "got 'nan'"),
  ],
)
def test_wrong_flags_are_refused(flags, words, capsys):
  with pytest.raises(SystemExit, match="2"):
    strategy_programs.parse("diloco", *flags)
  assert words in capsys.readouterr().err
