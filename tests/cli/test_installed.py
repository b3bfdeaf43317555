"""Tests of missing packages."""

import pytest

from optax_dist.cli import errors, installed


def test_what_is_not_installed_is_named(monkeypatch):
  monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(
    errors.CommandError, match="rich, matplotlib, scikit-learn not installed"
  ):
    installed.check("sklearn")


def test_what_is_installed_is_enough():
  installed.check("json")
