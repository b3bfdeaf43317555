"""What the blocks of docs/coming_from_tensorflow1.md define, run as by a reader."""

import pathlib
import re

import jax

PATH = (
  pathlib.Path(__file__).resolve().parents[2]
  / "docs/coming_from_tensorflow1.md"
)
_BLOCKS = []


def blocks():
  """Returns each block, with all that is defined after it."""
  if not _BLOCKS:
    text = PATH.read_text("utf-8")
    space = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"):
      for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
        exec(compile(block, str(PATH), "exec"), space)
        _BLOCKS.append((block, dict(space)))
  return _BLOCKS


def row(start):
  """Returns the last cell of the row of a table that starts with these words."""
  lines = PATH.read_text("utf-8").splitlines()
  (line,) = (
    line for line in lines if line.replace("`", "").startswith(f"| {start}")
  )
  return line.rstrip(" |").split(" | ")[-1]


def code(start):
  """Returns the first code in that cell."""
  return re.search("`([^`]+)`", row(start))[1]
