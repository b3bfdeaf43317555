"""The Python in README.md and docs/, run as it stands."""

import pathlib
import re
import textwrap
import warnings

import jax
import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_FILES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

#: What a file's blocks take from the text around them.
_GIVEN = {
  "optimizers.md": """
import jax, jax.numpy as jnp
params = {"table": jnp.ones((9, 2)), "w": jnp.ones(2)}
grads = jax.tree.map(jnp.ones_like, params)
ids, target, learning_rate = jnp.array([3, 3]), 2.0, 0.1
""",
  "quorum.md": """
from optax_dist import quorum
state, event = quorum.init(2), quorum.Join("a")
""",
}


def _blocks(text):
  """Returns the blocks of Python, padded so that line numbers are the file's."""
  return [
    "\n" * text[: match.start(2)].count("\n") + textwrap.dedent(match[2])
    for match in _BLOCK.finditer(text)
  ]


def _with_python():
  return [file for file in _FILES if _blocks(file.read_text("utf-8"))]


def test_blocks_are_found_at_their_lines():
  text = "a\n\n```python\nx = 1\n```\n\n```sh\nls\n```\n```python\ny = 2\n```\n"
  assert _blocks(text) == ["\n\n\nx = 1\n", "\n" * 10 + "y = 2\n"]
  in_a_list = "* See:\n\n  ```python\n  if x:\n    y = 2\n  ```\n"
  assert _blocks(in_a_list) == ["\n\n\nif x:\n  y = 2\n"]
  assert {file.name for file in _with_python()} >= {
    "README.md",
    "sync_replicas.md",
  }


@jax.numpy_dtype_promotion("standard")  # As where they are read.
@pytest.mark.parametrize("file", _with_python(), ids=lambda file: file.name)
def test_the_blocks_of_a_file_run_in_order(file):
  namespace = {"__name__": "__main__"}
  exec(_GIVEN.get(file.name, ""), namespace)
  with warnings.catch_warnings():
    for block in _blocks(file.read_text("utf-8")):
      exec(compile(block, file, "exec"), namespace)
