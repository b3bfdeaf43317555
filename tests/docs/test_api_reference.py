"""Every public name is documented, and has its place in the API reference."""

import importlib
import inspect
import pathlib
import pkgutil
import re

import pytest

import optax_dist

_PAGES = pathlib.Path(__file__).resolve().parents[2] / "docs" / "api"
_DIRECTIVE = re.compile(
  r"^\.\. (?:(currentmodule|automodule)|auto(?:function|class|exception)"
  r"|py:data):: (\S+)((?:\n +:.*)*)",
  re.MULTILINE,
)


def _referenced():
  """Returns the full names in the pages, those of whole modules with them."""
  pages = sorted(_PAGES.glob("*.rst"))
  return set().union(*(_named(page.read_text("utf-8")) for page in pages))


def _named(page):
  """Returns the full names in one page."""
  names, module = set(), ""
  for kind, name, options in _DIRECTIVE.findall(page):
    if kind:
      module = name
    if kind == "automodule" and ":members:" in options:
      names |= {f"{name}.{member}" for member in _defined(name)}
    elif not kind:
      names.add(f"{module}.{name}")
  return names


def _defined(module_name):
  module = importlib.import_module(module_name)
  if hasattr(module, "__all__"):
    return module.__all__
  return [
    name
    for name, value in vars(module).items()
    if not name.startswith("_")
    and getattr(value, "__module__", None) == module_name
  ]


def _packages():
  """Returns the modules that say in ``__all__`` what is public in them."""
  names = ["optax_dist"] + [
    module.name
    for module in pkgutil.walk_packages(optax_dist.__path__, "optax_dist.")
    if (module.ispkg or module.name.startswith("optax_dist.transforms."))
    and ".cli" not in module.name
  ]
  modules = map(importlib.import_module, names)
  return [module for module in modules if hasattr(module, "__all__")]


def _public():
  """Returns each public value by the full name that a user writes."""
  return {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in _packages()
    for name in package.__all__
    if not inspect.ismodule(getattr(package, name))
    # What is in the root too is told once, there.
    and (package is optax_dist or name not in optax_dist.__all__)
  }


def test_every_public_name_is_in_the_reference():
  missing = sorted(_public().keys() - _referenced())
  assert not missing, f"not in docs/api/*.rst: {', '.join(missing)}"


def test_reference_lists_only_existing_names():
  for name in _referenced():
    module, _, member = name.rpartition(".")
    assert hasattr(importlib.import_module(module), member), name


def test_a_module_without_members_is_shown_without_its_names():
  module = ".. automodule:: optax_dist.coordinator\n"
  assert _named(module) == set()
  assert "optax_dist.coordinator.join" in _named(module + "   :members:\n")
  assert _named(module + "\n.. autofunction:: join\n") == {
    "optax_dist.coordinator.join"
  }


def _functions():
  return {
    name: value
    for name, value in _public().items()
    if inspect.isfunction(value)
  }


def _sections(doc):
  """Returns the text of each section of a Google-style docstring."""
  parts = re.split(r"^(\w+):\n", inspect.cleandoc(doc), flags=re.MULTILINE)
  return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_public_names_have_docstrings():
  for name, value in sorted(_public().items()):
    if not (inspect.isclass(value) or inspect.isfunction(value)):
      continue  # An alias or a table: the reference says what it is.
    assert value.__doc__, f"{name} has no docstring"
    # A dataclass or NamedTuple without one shows its signature instead.
    assert not value.__doc__.startswith(f"{value.__name__}("), name


def test_docstrings_of_public_names_do_not_mention_private_names():
  for name, value in sorted(_public().items()):
    assert "_internal" not in (inspect.getdoc(value) or ""), name


def test_public_functions_describe_their_arguments():
  """Each of them under ``Args:``; up to three may be shown by an example."""
  for name, function in sorted(_functions().items()):
    _check_arguments(name, function)


def _check_arguments(name, function):
  doc = inspect.cleandoc(function.__doc__)
  parameters = list(inspect.signature(function).parameters)
  described = _sections(doc).get("Args")
  if described is None:
    plain = "\n" not in doc  # A sentence on what it takes and returns.
    assert len(parameters) <= 3, f"{name} has no `Args:`"
    assert plain or ">>>" in doc, f"{name} has no `Args:` and no example"
    return
  entry = r"^  \**(?:\w+, \**)*{}(?:, \**\w+)*(?: \(.*\))?:"
  missing = [
    parameter
    for parameter in parameters
    if not re.search(entry.format(parameter), described, re.MULTILINE)
  ]
  assert not missing, f"{name} does not tell {', '.join(missing)}"


def test_an_undocumented_name_is_found(monkeypatch):
  monkeypatch.setattr(optax_dist, "shy", lambda x: x, raising=False)
  monkeypatch.setattr(
    optax_dist, "__all__", [*optax_dist.__all__, "shy"], raising=True
  )
  with pytest.raises(AssertionError, match=r"optax_dist\.shy"):
    test_every_public_name_is_in_the_reference()
  with pytest.raises(AssertionError, match="no docstring"):
    test_public_names_have_docstrings()

  def bold(x, y):
    """Is bold.

    Args:
      y: how bold.
    """

  monkeypatch.setattr(optax_dist, "shy", bold)
  with pytest.raises(AssertionError, match="does not tell x"):
    test_public_functions_describe_their_arguments()
