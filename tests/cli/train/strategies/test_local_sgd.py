"""The flags of local SGD, from the command line to its numbers."""

import numpy as np
import optax
import pytest
import small_trainings
import strategy_programs


def _expected(averaged, steps, period):
  params = np.tile(small_trainings.START, (small_trainings.REPLICAS, 1))
  trace = np.zeros_like(params)
  for number, batch in enumerate(small_trainings.batches(steps), start=1):
    trace = 0.5 * trace + small_trainings.gradients(params, batch)
    params = params - 0.1 * trace
    if number % period == 0:
      params[:] = params.mean(0)
      if averaged:
        trace[:] = trace.mean(0)
  return params


@pytest.mark.parametrize("inner_state", ["local", "averaged"])
def test_the_state_of_the_optimizer_is_kept_or_averaged(inner_state):
  flags = ["--communication-period", "2", "--inner-state", inner_state]
  _, own = small_trainings.train(
    "local-sgd", flags, 5, optax.sgd(0.1, momentum=0.5)
  )
  expected = _expected(inner_state == "averaged", 5, 2)
  np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)
  # What the two are told apart by.
  other = _expected(inner_state == "local", 5, 2)
  assert np.abs(other - expected).max() > 1e-3


def test_by_default_the_state_is_local_and_the_period_ten():
  args = strategy_programs.parse("local-sgd")
  assert (args.inner_state, args.communication_period) == ("local", 10)


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (["--inner-state", "shared"], "'shared' (choose from"),
    (["--communication-period", "0"], "a whole number of at least 1"),
    (["--communication-period", "2.5"], "got '2.5'"),
  ],
)
def test_wrong_flags_are_refused(flags, words, capsys):
  with pytest.raises(SystemExit, match="2"):
    strategy_programs.parse("local-sgd", *flags)
  assert words in capsys.readouterr().err
