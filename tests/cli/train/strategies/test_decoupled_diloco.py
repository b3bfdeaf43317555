"""The flags of Decoupled DiLoCo, and where their bounds are."""

import inspect

import pytest
import strategy_programs

from optax_dist import coordinator
from optax_dist.cli import errors
from optax_dist.cli.train import strategies

LEARNERS = strategies.load("decoupled-diloco")


def _check(*flags, launch="processes"):
  LEARNERS.check(
    strategy_programs.parse("decoupled-diloco", *flags, launch=launch)
  )


@pytest.mark.parametrize(
  "flags",
  [
    (),
    ("--alpha", "0"),
    ("--alpha", "0.999", "--outer-momentum", "0.999"),
    ("--communication-period", "30", "--fragments", "30"),
  ],
)
def test_what_is_within_bounds_is_taken(flags):
  _check(*flags)


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (("--alpha", "1"), "--alpha must be below 1, got 1"),
    (("--outer-momentum", "1"), "--outer-momentum must be below 1, got 1"),
    (
      ("--communication-period", "29", "--fragments", "30"),
      "--communication-period must be at least --fragments 30, got 29",
    ),
  ],
)
def test_what_is_beyond_is_refused(flags, words):
  with pytest.raises(errors.CommandError) as caught:
    _check(*flags)
  assert str(caught.value) == words


def test_learners_are_no_one_program():
  with pytest.raises(errors.CommandError, match="; --strategy diloco is"):
    _check(launch=None)
  with pytest.raises(errors.CommandError, match="needs --launch processes"):
    LEARNERS.build(None)


def test_the_mixing_is_by_default_that_of_the_coordinator():
  usual = inspect.signature(coordinator.decoupled_diloco).parameters["alpha"]
  assert strategy_programs.parse("decoupled-diloco").alpha == usual.default
