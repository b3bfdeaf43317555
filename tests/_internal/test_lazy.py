"""Names that are imported when they are asked for."""

import ast
import importlib
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import optax_dist
from optax_dist import coordinator, ledger, states

_PACKAGES = pytest.mark.parametrize(
  "package", [optax_dist, coordinator, ledger, states], ids=lambda p: p.__name__
)


def _imports(package):
  """What type checkers are told: by each name, the module that has it."""
  tree = ast.parse(pathlib.Path(package.__file__).read_text("utf-8"))
  (block,) = (node for node in tree.body if isinstance(node, ast.If))
  return {name.name: node.module for node in block.body for name in node.names}


@_PACKAGES
def test_each_lazy_name_is_the_one_that_type_checkers_see(package):
  imports = _imports(package)
  assert sorted(imports) == sorted(package.__all__)
  for name, module in imports.items():
    if module == package.__name__:
      expected = importlib.import_module(f"{module}.{name}")
    else:
      expected = getattr(importlib.import_module(module), name)
    assert getattr(package, name) is expected
    assert name in dir(package)


@_PACKAGES
def test_no_name_is_hidden_by_a_module(package):
  modules = {result.name for result in pkgutil.iter_modules(package.__path__)}
  own = {n for n, m in _imports(package).items() if m == package.__name__}
  assert not (set(package.__all__) - own) & modules


def test_dir_lists_public_names_before_their_first_use():
  code = (
    "import optax_dist as o; assert {*o.__all__} <= {*dir(o)};"
    "assert {'coordinator', 'ledger', 'simulate', 'states'} <= {*o.__all__}"
  )
  subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def _prints(code):
  """What a program prints, in a process of its own."""
  done = subprocess.run(
    [sys.executable, "-c", code],
    check=True,
    timeout=300,
    capture_output=True,
    text=True,
  )
  return done.stdout.split()


@_PACKAGES
def test_dir_shows_what_is_public_and_nothing_else(package):
  """Before its names are used, and afterwards."""
  code = f"""
import {package.__name__} as package
print(*dir(package))
for name in package.__all__:
  getattr(package, name)
print(*dir(package))
"""
  assert _prints(code) == 2 * sorted(package.__all__)


@pytest.mark.parametrize(
  ("package", "other"),
  [("transforms", "coordinator"), ("coordinator", "transforms")],
)
def test_no_module_of_transforms_or_coordinator_loads_the_other(package, other):
  code = f"""
import importlib, pkgutil, sys
import optax_dist
from optax_dist import {package} as package
for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
  if not found.name.endswith("__main__"):
    importlib.import_module(found.name)
print(*(m for m in sys.modules if m.startswith("optax_dist.")))
"""
  loaded = _prints(code)
  assert f"optax_dist.{package}" in loaded
  assert len(loaded) > 10
  prefix = f"optax_dist.{other}"
  assert not [m for m in loaded if m == prefix or m.startswith(f"{prefix}.")]


def test_the_coordinator_loads_no_optional_part():
  code = """
import importlib, pkgutil, sys
from optax_dist import coordinator as package
extras = package.__name__ + ".extras"
for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
  if found.name != extras and found.ispkg:
    for inner in pkgutil.walk_packages(
      importlib.import_module(found.name).__path__, found.name + "."
    ):
      if not inner.name.endswith("__main__"):
        importlib.import_module(inner.name)
  elif found.name != extras:
    importlib.import_module(found.name)
print(*(m for m in sys.modules if m.startswith("optax_dist.")))
"""
  loaded = _prints(code)
  assert "optax_dist.coordinator.joining" in loaded
  assert "optax_dist.coordinator.protocol.client.client" in loaded
  assert not [m for m in loaded if "coordinator.extras" in m]


def test_the_package_alone_loads_no_module_of_its_rooms():
  code = "import sys, optax_dist; print(*sys.modules)"
  result = [m for m in _prints(code) if m.startswith("optax_dist")]
  assert sorted(result) == [
    "optax_dist",
    "optax_dist._internal",
    "optax_dist._internal.lazy",
  ]


def test_a_module_needs_no_import_of_its_own():
  assert optax_dist.coordinator is coordinator
  assert optax_dist.simulate is importlib.import_module("optax_dist.simulate")


@pytest.mark.parametrize("name", ["cross_shards", "_hidden", "__wrapped__"])
def test_unknown_names_raise_an_attribute_error(name):
  with pytest.raises(AttributeError, match=rf"'optax_dist' .* '{name}'"):
    getattr(optax_dist, name)


@pytest.mark.parametrize(
  "module",
  [
    "optax_dist",
    "optax_dist.cli.main",
    "optax_dist.coordinator.launch.launcher",
    "optax_dist.coordinator.protocol.client.client",
    "optax_dist.coordinator.training.submission",
    "optax_dist.coordinator.extras.decoupled_diloco.rounds",
    "optax_dist.coordinator.extras.groups.worker_rank",
    "optax_dist.coordinator.extras.groups.rank_zero",
    "optax_dist.coordinator.server.__main__",
  ],
)
def test_modules_that_do_not_need_jax_do_not_import_it(module):
  code = (
    f"import sys, {module}; assert not {{'jax', 'optax'}} & {{*sys.modules}}"
  )
  subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
