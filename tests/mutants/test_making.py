"""Mutants are there that are named; and a fault that is written by hand is one."""

import ast
import pathlib

import pytest

from tests.mutants import __main__ as mutants
from tests.mutants import making

_SOURCE = """
def least(a, b):
  if a < b:
    return a
  forget()
  return b
"""


def test_mutants_listed_as_equivalent_exist():
  names = {}
  for known in mutants.equivalent():
    path, _, name = known.partition(": ")
    names.setdefault(path, set()).add(name)
  for path, known in names.items():
    source = pathlib.Path(path).read_text()
    assert known <= {mutant.name for mutant in making.mutants(source)}


def test_each_mutant_has_one_small_fault():
  made = list(making.mutants(_SOURCE))
  texts = {ast.unparse(mutant.tree) for mutant in made}
  assert len(texts) == len(made) > 4
  assert ast.unparse(ast.parse(_SOURCE)) not in texts
  assert any("a <= b" in text for text in texts)


@pytest.mark.parametrize(
  ("old", "new"), [("a<b", "b < a"), ("forget( )", "pass"), ("a", "b")]
)
def test_fault_is_found_in_any_formatting(old, new):
  if old == "a":
    with pytest.raises(ValueError, match="has 2 times"):
      making.changed(_SOURCE, "least", old, new)
    return
  mutant = making.changed(_SOURCE, "least", old, new)
  assert new in ast.unparse(mutant.tree)


def test_tests_of_a_module_are_the_nearest_ones():
  path = pathlib.Path("optax_dist/coordinator/protocol/client/applier.py")
  assert mutants.tests_of(path) == ["tests/coordinator/protocol"]
