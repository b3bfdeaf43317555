"""The layout in CONTRIBUTING.md: what there is, and imports that only go down."""

import ast
import functools
import pathlib
import re

import optax_dist

_ROOT = pathlib.Path(__file__).parents[2]
_PACKAGE = pathlib.Path(optax_dist.__file__).parent


def _files():
  """Each file by its module; a package by its folder."""
  result = {}
  for path in _PACKAGE.rglob("*.py"):
    module = path.relative_to(_PACKAGE).with_suffix("")
    if module.name == "__init__":
      module = module.parent
    if module.name not in ("", "__main__"):
      result[module] = path
  return result


_FILES = _files()


def _layout():
  """The files and folders of the list, from top to bottom."""
  text = (_ROOT / "CONTRIBUTING.md").read_text("utf-8")
  block = text.split("```\noptax_dist/\n")[1].split("```")[0]
  result, above = [], pathlib.Path()
  for indent, name in re.findall(r"^( {2}| {4})(\S+)", block, re.MULTILINE):
    entry = pathlib.Path(name)
    if len(indent) == 4:
      entry = above / entry
    else:
      above = entry
    result.append(entry.with_suffix(""))
  return result


@functools.cache
def _imports(path):
  """The modules of the package that a file imports."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text("utf-8"))):
    if isinstance(node, ast.Import):
      names |= {name.name for name in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      for name in node.names:
        full = f"{node.module}.{name.name}"
        names.add(full if _module(full) in _FILES else node.module)
  return {_module(name) for name in names} & _FILES.keys()


def _module(name):
  package, *rest = name.split(".")
  return pathlib.Path(*rest) if package == "optax_dist" else None


def _place(module, layout):
  """The place in the list of the closest entry; None outside of it."""
  entries = [e for e in layout if e == module or e in module.parents]
  closest = max(entries, key=lambda e: len(e.parts), default=None)
  return None if closest is None else layout.index(closest)


def test_the_layout_lists_all_modules():
  layout = _layout()
  assert not [entry for entry in layout if entry not in _FILES]
  listed = {pathlib.Path(), *(entry.parent for entry in layout)}
  beside = {m for m in _FILES if m.parent in listed}
  assert beside <= set(layout), beside - set(layout)


def test_imports_only_go_down():
  layout = _layout()
  up = []
  for module, path in _FILES.items():
    here = _place(module, layout)
    for other in _imports(path):
      there = _place(other, layout)
      if None not in (here, there) and there < here:
        up.append(f"{module} imports {other}")
  assert not up


def test_imports_have_no_cycles():
  below = {module: _imports(path) for module, path in _FILES.items()}
  while below:
    last = [m for m, others in below.items() if not others & below.keys()]
    assert last, f"a circle of imports within {sorted(map(str, below))}"
    for module in last:
      del below[module]


def test_names_in_the_walk_through_a_step_exist():
  text = (_ROOT / "CONTRIBUTING.md").read_text("utf-8")
  table = text.split("| in | name | does |\n|---|---|---|\n")[1]
  rows = table.split("\n\n")[0].splitlines()
  assert len(rows) >= 8
  for row in rows:
    path, names, _ = (cell.strip() for cell in row.strip("|").split("|", 2))
    tree = ast.parse((_PACKAGE / "coordinator" / path.strip("`")).read_text())
    result = set()
    for node in tree.body:
      if isinstance(node, ast.ClassDef):
        result.add(node.name)
        result |= {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
    wanted = {
      part for name in names.split(", ") for part in name.strip("`").split(".")
    }
    assert wanted <= result, (path, wanted - result)
