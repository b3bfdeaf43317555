"""Rates that follow the samples in a step, and what is no rate."""

import math

import numpy as np
import pytest

from optax_dist import ledger


@pytest.mark.parametrize("rule", ["linear", "square_root"])
@pytest.mark.parametrize("rate", [0, 0.5, lambda count: 0.5 + count])
@pytest.mark.parametrize("batch", [1, 96.0, lambda count: 32 * (count + 1)])
@pytest.mark.parametrize("reference", [1, 64])
def test_the_rate_is_that_of_the_reference_times_its_rule(
  rate, batch, reference, rule
):
  found = ledger.scaled_by_batch(rate, batch, reference, rule)
  for count in range(3):
    base = rate(count) if callable(rate) else rate
    times = (batch(count) if callable(batch) else batch) / reference
    factor = times if rule == "linear" else math.sqrt(times)
    assert found(count) == pytest.approx(base * factor)


def test_the_rule_is_linear_unless_told_otherwise():
  assert ledger.scaled_by_batch(0.1, 4, 1)(0) == pytest.approx(0.4)


def test_arrays_pass_as_they_are():
  rate = ledger.scaled_by_batch(np.float32(0.5), np.array([2.0, 4.0]), 2)
  assert rate(0).tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
  "value", ["0.1", None, True, -1e-9, math.inf, math.nan]
)
def test_what_is_no_finite_number_is_refused(value):
  with pytest.raises(
    ValueError, match=r"learning_rate must be .* not negative"
  ):
    ledger.scaled_by_batch(value, 1, 1)
  with pytest.raises(ValueError, match=r"global_batch must be .* positive"):
    ledger.scaled_by_batch(0.1, value, 1)


def test_mistakes_are_named():
  with pytest.raises(ValueError, match=r"global_batch must be .* positive"):
    ledger.scaled_by_batch(0.1, 0, 1)
  with pytest.raises(ValueError, match="reference must be"):
    ledger.scaled_by_batch(0.1, 1, 0)
  with pytest.raises(ValueError, match="rule must be 'linear'"):
    ledger.scaled_by_batch(0.1, 1, 1, rule="cubic")
