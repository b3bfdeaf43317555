"""Names that benchmarks, pictures, examples and pages use exist in the package."""

import ast
import importlib
import importlib.util
import inspect
import pathlib
import re
import textwrap

import pytest

from optax_dist import coordinator
from optax_dist.coordinator import options

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PROGRAMS = [
  path
  for folder in ("benchmarks", "docs", "examples")
  for path in sorted((_ROOT / folder).rglob("*.py"))
  if "_build" not in path.parts
]
#: Those whose blocks of `py` no test runs as they stand: they are parts of programs.
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
_MODULES = ("optax_dist", "optax_dist.coordinator")
_JOIN = {*inspect.signature(coordinator.join).parameters}
_JOIN |= set(options.Options.__dataclass_fields__)


def _is_module(name):
  try:
    return importlib.util.find_spec(name) is not None
  except ModuleNotFoundError:  # Its package is missing.
    return False


def _missing(tree):
  """The imported names and the keywords of `join` that there are not."""
  for node in ast.walk(tree):
    match node:
      case ast.ImportFrom(module=str(module), names=names):
        if module.partition(".")[0] != "optax_dist":
          continue
        if not _is_module(module):
          yield module
          continue
        imported = importlib.import_module(module)
        for name in names:
          full = f"{module}.{name.name}"
          if not hasattr(imported, name.name) and not _is_module(full):
            yield full
      case ast.Call(func=ast.Attribute(ast.Name("coordinator"), "join")):
        yield from (k.arg for k in node.keywords if k.arg not in {*_JOIN, None})


@pytest.mark.parametrize(
  "path", _PROGRAMS, ids=lambda path: str(path.relative_to(_ROOT))
)
def test_names_used_by_a_program_exist(path):
  assert not list(_missing(ast.parse(path.read_text("utf-8"))))


def test_unknown_name_in_a_program_is_found():
  text = """
from optax_dist.coordinator.nowhere.other import process
from optax_dist.coordinator import journal, nothing
coordinator.join(1, 2, replica=0, nothing=3, wire="float32", **rest)
"""
  assert list(_missing(ast.parse(text))) == [
    "optax_dist.coordinator.nowhere.other",
    "optax_dist.coordinator.nothing",
    "nothing",
  ]


def _parts(text):
  """The blocks of a page that are parts of programs, if they are whole lines."""
  pattern = r"^( *)```(?:py|text)\n(.*?)^\1```$"
  for _, block in re.findall(pattern, text, re.MULTILINE | re.DOTALL):
    try:
      yield ast.parse(textwrap.dedent(block))
    except SyntaxError:
      continue  # What is printed, or a call that goes on elsewhere.


def _unknown(tree):
  """What a part of a program reads from modules that have no such name."""
  for node in ast.walk(tree):
    match node:
      case ast.Attribute(ast.Name(name), attribute):
        for module in _MODULES:
          if name == module.rpartition(".")[2]:
            found = importlib.import_module(module)
            full = f"{module}.{attribute}"
            if not hasattr(found, attribute) and not _is_module(full):
              yield full


@pytest.mark.parametrize("page", _PAGES, ids=lambda path: path.name)
def test_names_used_by_a_snippet_exist(page):
  for tree in _parts(page.read_text("utf-8")):
    assert not [*_missing(tree), *_unknown(tree)]


def test_unknown_name_in_a_snippet_is_found():
  text = """
* See:

  ```py
  with coordinator.join(optax_dist.nowhere(), every=3) as replica:
    coordinator.leave(replica)
  ```
"""
  (tree,) = _parts(text)
  assert list(_missing(tree)) == ["every"]
  assert sorted(_unknown(tree)) == [
    "optax_dist.coordinator.leave",
    "optax_dist.nowhere",
  ]
