"""What is committed of each notebook: outputs, and a way to run it elsewhere."""

import json
import pathlib

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


def test_there_are_notebooks_in_order():
  numbers = [path.name[0] for path in sorted(_FOLDER.glob("*.ipynb"))]
  assert numbers == sorted(set(numbers))
  assert numbers[:3] == ["1", "2", "3"]


@each_notebook
def test_it_opens_in_colab_and_installs_what_is_missing(path):
  address = f"colab.research.google.com/github/{_REPOSITORY}/blob/main"
  assert f"{address}/notebooks/{path.name}" in _source(
    _cells(path, "markdown")[0]
  )
  first = _source(_cells(path, "code")[0])
  assert "except ImportError" in first
  assert f"github.com/{_REPOSITORY}" in first


@each_notebook
def test_it_was_run_from_top_to_bottom_without_complaints(path):
  cells = _cells(path, "code")
  counts = [cell["execution_count"] for cell in cells]
  assert counts == list(range(1, len(cells) + 1))
  outputs = [output for cell in cells for output in cell["outputs"]]
  assert not [o for o in outputs if o["output_type"] == "error"]
  assert not [o for o in outputs if o.get("name") == "stderr"]
  assert sum("image/png" in o.get("data", {}) for o in outputs) >= 3


@each_notebook
def test_axes_are_labelled(path):
  for cell in _cells(path, "code"):
    pictures = [o for o in cell["outputs"] if "image/png" in o.get("data", {})]
    if pictures:
      assert "xlabel" in _source(cell), _source(cell)
      assert "ylabel" in _source(cell), _source(cell)


@each_notebook
def test_nothing_of_the_machine_is_left_in_it(path):
  text = path.read_text("utf-8")
  for trace in ("/home/", "/root/", "/opt/", "/tmp/", "Traceback"):
    assert trace not in text
  assert len(text) < 1_000_000
