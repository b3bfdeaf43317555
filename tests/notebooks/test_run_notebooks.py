"""Each notebook, executed from a clean kernel, as by a reader.

Needs the extra ``[docs]``: skipped where nbclient is not installed.
"""

import pathlib
import resource

import pytest

nbclient = pytest.importorskip(
  "nbclient",
  reason="running notebooks needs the extra: pip install optax-dist[docs]",
)
import nbformat  # noqa: E402
import traitlets.config  # noqa: E402

_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "notebooks"
# Of a transform, and of processes; the others are of the same functions.
_EACH_TIME = ("1_cross_shard", "4_coordinator")
_NOTEBOOKS = [
  pytest.param(
    path,
    id=path.stem,
    marks=[] if path.stem in _EACH_TIME else pytest.mark.nightly,
  )
  for path in sorted(_FOLDER.glob("*.ipynb"))
]
# Of processor time: a busy machine takes longer.
_MOST_SECONDS = 180
# For hangs alone.
_TIMEOUT = 600
# Files in place of ports, which others may take before the kernel does.
_SOCKETS = traitlets.config.Config({"KernelManager": {"transport": "ipc"}})


@pytest.mark.timeout(3 * _TIMEOUT)
# Jupyter's own sockets and loops, which are no concern of the notebooks.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", _NOTEBOOKS)
def test_notebook_runs_without_errors(path, monkeypatch):
  monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
  notebook = nbformat.read(path, as_version=4)
  for cell in notebook.cells:
    if cell.cell_type == "code":
      cell.outputs = []
  start = _processor_seconds()
  nbclient.NotebookClient(
    notebook,
    timeout=_TIMEOUT,
    startup_timeout=_TIMEOUT,
    # Outputs that come later would be lost without a word.
    iopub_timeout=_TIMEOUT,
    raise_on_iopub_timeout=True,
    kernel_name="python3",
    config=_SOCKETS,
  ).execute()
  seconds = _processor_seconds() - start
  assert seconds < _MOST_SECONDS, f"took {seconds:.0f} s"
  committed = nbformat.read(path, as_version=4)
  assert _pictures(notebook) == _pictures(committed), "run it, and commit"


def _processor_seconds():
  """The processor time of all ended child processes."""
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def _pictures(notebook):
  return [
    sum("image/png" in output.get("data", {}) for output in cell.outputs)
    for cell in notebook.cells
    if cell.cell_type == "code"
  ]
