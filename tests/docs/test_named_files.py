"""The files, folders and commands that pages name exist."""

import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PAGES = [
  _ROOT / "README.md",
  _ROOT / "CONTRIBUTING.md",
  *sorted((_ROOT / "docs").glob("*.md")),
  *sorted((_ROOT / "benchmarks").glob("*.md")),
]
_FOLDERS = [
  "optax_dist",
  "tests",
  "benchmarks",
  "examples",
  "docs",
  "notebooks",
]
_ENTRIES = [
  "/" + path.relative_to(_ROOT).as_posix()
  for folder in _FOLDERS
  for path in (_ROOT / folder, *(_ROOT / folder).rglob("*"))
  if "__pycache__" not in path.parts and "_build" not in path.parts
]

#: Of a run's output, of readers, of other projects, or an example in an address.
_ELSEWHERE = {
  "checkpoints",
  "compiled",
  "train.py",
  "train_replica.py",
  "team",
  "slow.py",
  "step.py",
  "two.py",
  "survive.py",
  "returnn/tf/updater.py",
}


def _missing(text):
  named = set(re.findall(r"`([\w./]+\.py)`", text))
  named |= {x.rstrip("/") for x in re.findall(r"`([\w/]+/)`", text)}
  commands = re.findall(r"python(?: -m)? ((?:tests|benchmarks)[\w./]*)", text)
  for command in commands:
    is_file = command.endswith(".py")
    named.add(command if is_file else command.replace(".", "/").rstrip("/"))
  return sorted(
    name
    for name in named - _ELSEWHERE
    if not any(
      entry.endswith(f"/{name}") or entry.endswith(f"/{name}.py")
      for entry in _ENTRIES
    )
  )


@pytest.mark.parametrize(
  "page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT))
)
def test_files_named_on_a_page_exist(page):
  assert not _missing(page.read_text("utf-8"))


def test_missing_file_is_found():
  text = (
    "See `core/nowhere.py` and `nowhere/`: `python -m tests.nowhere --all`."
  )
  assert _missing(text) == ["core/nowhere.py", "nowhere", "tests/nowhere"]
