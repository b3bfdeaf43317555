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
  """The module of each name, as type checkers see it."""
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
def test_no_public_name_is_shadowed_by_a_module(package):
  modules = {result.name for result in pkgutil.iter_modules(package.__path__)}
  own = {n for n, m in _imports(package).items() if m == package.__name__}
  assert not (set(package.__all__) - own) & modules


def _prints(code):
  """The lines that a program prints, as words, in a process of its own."""
  done = subprocess.run(
    [sys.executable, "-c", code],
    check=True,
    timeout=300,
    capture_output=True,
    text=True,
  )
  return [line.split() for line in done.stdout.splitlines()]


def test_dir_shows_what_is_public_and_nothing_else():
  """Before its names are used, and afterwards; the package alone loads nothing."""
  first, *shown = _prints("""
import sys, optax_dist
print(*(m for m in sys.modules if m.startswith("optax_dist")))
print(*dir(optax_dist))
from optax_dist import coordinator, ledger, states
packages = optax_dist, coordinator, ledger, states
for package in packages:
  print(*dir(package))
for package in packages:
  for name in package.__all__:
    getattr(package, name)
  print(*dir(package))
""")
  assert sorted(first) == [
    "optax_dist",
    "optax_dist._internal",
    "optax_dist._internal.lazy",
  ]
  public = [
    sorted(p.__all__) for p in (optax_dist, coordinator, ledger, states)
  ]
  assert shown == [public[0], *public, *public]
  assert {"coordinator", "ledger", "simulate", "states"} <= {*public[0]}


_LOADS = """
import importlib, pkgutil, sys
def load(package, but=""):
  for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
    if found.name != but and not found.name.endswith("__main__"):
      module = importlib.import_module(found.name)
      if found.ispkg:
        load(module)
def show():
  print(*(m for m in sys.modules if m.startswith("optax_dist.")))
"""


def test_no_module_of_transforms_loads_the_coordinator():
  load = "from optax_dist import transforms\nload(transforms)\nshow()"
  (loaded,) = _prints(_LOADS + load)
  assert "optax_dist.transforms.cross_shard" in loaded
  assert not [m for m in loaded if m.startswith("optax_dist.coordinator")]


def test_the_coordinator_loads_no_transform_and_no_optional_part():
  without, whole = _prints(f"""{_LOADS}
from optax_dist import coordinator
load(coordinator, but="optax_dist.coordinator.extras")
show()
load(coordinator)
show()
""")
  assert "optax_dist.coordinator.joining" in without
  assert "optax_dist.coordinator.protocol.client.client" in without
  assert not [m for m in without if "coordinator.extras" in m]
  assert "optax_dist.coordinator.extras.groups.group" in whole
  assert not [m for m in whole if m.startswith("optax_dist.transforms")]


def test_submodules_need_no_separate_import():
  assert optax_dist.coordinator is coordinator
  assert optax_dist.simulate is importlib.import_module("optax_dist.simulate")


@pytest.mark.parametrize("name", ["cross_shards", "_hidden", "__wrapped__"])
def test_unknown_names_raise_an_attribute_error(name):
  with pytest.raises(AttributeError, match=rf"'optax_dist' .* '{name}'"):
    getattr(optax_dist, name)


def test_modules_that_do_not_need_jax_do_not_import_it():
  """No module before the named one imports JAX."""
  modules = [
    "optax_dist",
    "optax_dist.cli.main",
    "optax_dist.coordinator.launch.launcher",
    "optax_dist.coordinator.protocol.client.client",
    "optax_dist.coordinator.training.submission",
    "optax_dist.coordinator.extras.decoupled_diloco.rounds",
    "optax_dist.coordinator.extras.groups.worker_rank",
    "optax_dist.coordinator.extras.groups.rank_zero",
    "optax_dist.coordinator.server.__main__",
  ]
  result = _prints(f"""
import importlib, sys
for name in {modules}:
  importlib.import_module(name)
  print(name, *({{"jax", "optax"}} & {{*sys.modules}}))
""")
  assert result == [[name] for name in modules]
