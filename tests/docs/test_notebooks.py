"""Tests of the committed notebooks: outputs, and how to run them elsewhere."""

import importlib.util
import json
import pathlib
import re

import pytest

_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "notebooks"
_REPOSITORY = "optax-dist/optax-dist"

each_notebook = pytest.mark.parametrize(
  "path", sorted(_FOLDER.glob("*.ipynb")), ids=lambda path: path.stem
)


def _cells(path, kind):
  cells = json.loads(path.read_text("utf-8"))["cells"]
  return [cell for cell in cells if cell["cell_type"] == kind]


def _source(cell):
  return "".join(cell["source"])


def test_notebooks_are_numbered_in_order():
  numbers = [path.name[0] for path in sorted(_FOLDER.glob("*.ipynb"))]
  assert numbers == sorted(set(numbers))
  assert numbers[:3] == ["1", "2", "3"]


@each_notebook
def test_each_notebook_opens_in_colab(path):
  address = f"colab.research.google.com/github/{_REPOSITORY}/blob/main"
  assert f"{address}/notebooks/{path.name}" in _source(
    _cells(path, "markdown")[0]
  )


def _install(path, monkeypatch, has):
  """Runs a notebook's first cell on a machine that has these modules."""
  source = _source(_cells(path, "code")[0])
  lines = [x for x in source.splitlines() if x and not x.startswith("#")]
  assert len(lines) == 6
  source, count = re.subn(r"%pip (.+)", r"pip(f'''\1''')", source)
  assert count == 1
  commands = []
  find = lambda name: object() if name in has else None
  monkeypatch.setattr(importlib.util, "find_spec", find)
  exec(compile(source, path.name, "exec"), {"pip": commands.append})
  return commands


@each_notebook
def test_notebook_installs_nothing_if_nothing_is_missing(path, monkeypatch):
  assert not _install(path, monkeypatch, {"optax_dist"})


@each_notebook
@pytest.mark.parametrize(
  ("has", "extra"),
  [
    (set(), "cpu"),
    ({"jax_cuda12_plugin"}, "cuda12"),
    ({"jax_cuda13_plugin"}, "cuda13"),
    ({"libtpu"}, "tpu"),
  ],
  ids=str,
)
def test_notebook_keeps_the_accelerator_of_the_machine(
  path, has, extra, monkeypatch
):
  """JAX without the plugin of its accelerator would use the CPU."""
  (command,) = _install(path, monkeypatch, has)
  assert f'"jax[{extra}]"' in command
  assert f"git+https://github.com/{_REPOSITORY}" in command


@each_notebook
def test_no_line_of_code_has_to_be_scrolled(path):
  sources = [_source(cell) for cell in _cells(path, "code")]
  lines = [line for source in sources for line in source.splitlines()]
  assert not [line for line in lines if len(line) > 80]


@each_notebook
def test_notebook_ends_with_the_next_steps(path):
  last = json.loads(path.read_text("utf-8"))["cells"][-1]
  assert last["cell_type"] == "markdown"
  source = _source(last)
  assert source.startswith("## Where to go next")
  pages = re.findall(r"readthedocs\.io/en/latest/(\S+)\.html", source)
  assert pages
  for page in pages:
    folder, suffix = _FOLDER.parent / "docs", "md"
    if page.startswith("notebooks/"):
      folder, suffix = _FOLDER.parent, "ipynb"
    assert (folder / f"{page}.{suffix}").exists(), page


@each_notebook
def test_notebook_was_run_in_order_without_errors(path):
  cells = _cells(path, "code")
  counts = [cell["execution_count"] for cell in cells]
  assert counts == list(range(1, len(cells) + 1))
  outputs = [output for cell in cells for output in cell["outputs"]]
  assert not [o for o in outputs if o["output_type"] == "error"]
  assert not [o for o in outputs if o.get("name") == "stderr"]
  assert sum("image/png" in o.get("data", {}) for o in outputs) >= 3


@each_notebook
def test_plots_have_labelled_axes(path):
  for cell in _cells(path, "code"):
    pictures = [o for o in cell["outputs"] if "image/png" in o.get("data", {})]
    if pictures:
      assert "xlabel" in _source(cell), _source(cell)
      assert "ylabel" in _source(cell), _source(cell)


@each_notebook
def test_notebook_contains_no_machine_paths(path):
  text = path.read_text("utf-8")
  for trace in ("/home/", "/root/", "/opt/", "/tmp/", "Traceback"):
    assert trace not in text
  assert len(text) < 1_000_000
