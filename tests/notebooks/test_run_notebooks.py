"""Each notebook, executed from a clean kernel, as one who opens it would.

Needs the extra ``[docs]``: skipped where nbclient is not installed.
"""

import pathlib
import time

import pytest

nbclient = pytest.importorskip(
  "nbclient",
  reason="running notebooks needs the extra: pip install optax-dist[docs]",
)
import nbformat  # noqa: E402

_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "notebooks"
_NOTEBOOKS = sorted(_FOLDER.glob("*.ipynb"))
_MOST_SECONDS = 180


@pytest.mark.timeout(3 * _MOST_SECONDS)
# Jupyter's own sockets and loops, which are no concern of the notebooks.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch):
  monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
  notebook = nbformat.read(path, as_version=4)
  for cell in notebook.cells:
    if cell.cell_type == "code":
      cell.outputs = []
  start = time.monotonic()
  nbclient.NotebookClient(
    notebook, timeout=_MOST_SECONDS, kernel_name="python3"
  ).execute()
  seconds = time.monotonic() - start
  assert seconds < _MOST_SECONDS, f"took {seconds:.0f} s"
  committed = nbformat.read(path, as_version=4)
  assert _pictures(notebook) == _pictures(committed), "run it, and commit"


def _pictures(notebook):
  return [
    sum("image/png" in output.get("data", {}) for output in cell.outputs)
    for cell in notebook.cells
    if cell.cell_type == "code"
  ]
