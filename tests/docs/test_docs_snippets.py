"""The Python in README.md and docs/, run as it stands."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap
import warnings

import hosts
import jax
import pytest

from optax_dist.coordinator import options
from optax_dist.coordinator.protocol import deadlines

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


def test_the_readmes_program_with_the_coordinator_is_complete(tmp_path):
  """It starts a step while the callback of the last one waits for others."""
  text = (_ROOT / "README.md").read_text("utf-8")
  program, command = re.search(
    r"as `survive\.py`:\n\n```py\n(.*?)^```\n\n```sh\n(.*?)\n```$",
    text,
    re.MULTILINE | re.DOTALL,
  ).groups()
  (tmp_path / "survive.py").write_text(program)
  words = shlex.split(command)
  assert words[:2] == [".venv/bin/optax-dist", "launch"]
  ran = subprocess.run(
    [sys.executable, "-m", "optax_dist", *words[1:]],
    cwd=tmp_path,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert ran.returncode == 0, ran.stdout + ran.stderr
  losses = re.findall(r"loss (\d\.\d{4})", ran.stdout)
  assert len(losses) == 3
  assert all(float(loss) < 0.5 for loss in losses)


@pytest.mark.nightly  # tests/examples has the example's replica killed, too.
def test_the_readmes_run_with_a_kill_is_drawn(tmp_path):
  text = (_ROOT / "README.md").read_text("utf-8")
  (commands,) = re.findall(
    r"^```sh\n([^`]*--chaos.*?)\n```$", text, re.M | re.S
  )
  (tmp_path / "examples").symlink_to(_ROOT / "examples")
  starts = {
    ".venv/bin/optax-dist": [sys.executable, "-m", "optax_dist"],
    ".venv/bin/python": [sys.executable],
  }
  printed = []
  for command in commands.splitlines():
    program, *words = shlex.split(command)
    ran = subprocess.run(
      [*starts[program], *words],
      cwd=tmp_path,
      env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)},
      capture_output=True,
      text=True,
      timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    printed.append(ran.stdout)
  launched, watched, _ = printed
  assert len(re.findall(r"\[replica 1\] process \d+ starts", launched)) == 2
  assert len(set(re.findall(r"ends at step 200, (\w+)", launched))) == 1
  assert watched.startswith("step 200, ")
  assert (tmp_path / "runs/killed/timeline.png").stat().st_size > 10_000


@pytest.mark.skipif(bool(hosts.not_permitted()), reason=hosts.not_permitted())
def test_the_program_on_a_slow_network_is_complete(tmp_path):
  text = (_ROOT / "docs" / "how_to.md").read_text("utf-8")
  program, command = re.search(
    r"as `slow\.py`,\n\n```py\n(.*?)^```\n\n```sh\n.*?^python (.*?)\n```$",
    text,
    re.MULTILINE | re.DOTALL,
  ).groups()
  (tmp_path / "slow.py").write_text(program.replace("range(40)", "range(2)"))
  words = shlex.split(command)
  words[0] = str(_ROOT / words[0])
  ran = subprocess.run(
    [sys.executable, *words],
    cwd=tmp_path,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert ran.returncode == 0, ran.stdout + ran.stderr
  assert ran.stdout.count("s a step") == 2


def test_deadlines_on_the_page_are_those_of_a_run():
  text = (_ROOT / "docs" / "coordinator.md").read_text("utf-8")
  table = text.split("| who waits | default | and then |")[1].split("\n\n")[0]
  seconds = list(map(int, re.findall(r"\| (\d+) s \|", table)))
  used = deadlines.of(options.Options().timeout)
  assert seconds == [used.transfer, used.mean, used.timeout, used.replica]
  assert seconds == sorted(seconds)
