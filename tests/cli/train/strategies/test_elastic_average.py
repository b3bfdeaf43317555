"""The flags of elastic averaging, from the command line to its numbers."""

import numpy as np
import pytest
import small_trainings
import strategy_programs


@pytest.mark.parametrize(
  ("flags", "rate", "rho"),
  [
    ([], 0.9 / small_trainings.REPLICAS, 0.0),
    (["--moving-rate", "0.125", "--rho", "0.5"], 0.125, 0.5),
  ],
)
def test_replicas_and_center_are_pulled_together(flags, rate, rho):
  center, own = small_trainings.train(
    "elastic-average", [*flags, "--communication-period", "1"], 2
  )
  expected = small_trainings.START
  params = np.tile(expected, (small_trainings.REPLICAS, 1))
  seen = params.copy()
  for batch in small_trainings.batches(2):
    gradients = small_trainings.gradients(params, batch)
    params = params - 0.1 * (gradients + rho * (params - seen))
    pulls = rate * (params - expected)
    seen[:] = expected
    params -= pulls
    expected = expected + pulls.sum(0)
  np.testing.assert_allclose(own, params, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(center, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (["--moving-rate", "0"], "--moving-rate: must be a finite number above 0"),
    (["--moving-rate", "nan"], "got 'nan'"),
    (["--rho", "-1"], "--rho: must be a finite number"),
    (["--communication-period", "0"], "a whole number of at least 1"),
  ],
)
def test_wrong_flags_are_refused(flags, words, capsys):
  with pytest.raises(SystemExit, match="2"):
    strategy_programs.parse("elastic-average", *flags)
  assert words in capsys.readouterr().err


def test_no_pull_between_exchanges_is_a_number_like_others():
  assert strategy_programs.parse("elastic-average", "--rho", "0.0").rho == 0.0
