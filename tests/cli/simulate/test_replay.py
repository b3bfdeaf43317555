"""``optax-dist replay``, as a user meets it."""

import argparse
import json

import numpy as np
import optax
import pytest

from optax_dist import coordinator
from optax_dist.cli import main
from optax_dist.cli.train import digits, model
from optax_dist.cli.train.processes import plan as process_plan

_SETUP = """
import jax, jax.numpy as jnp, numpy as np, optax

@jax.jit
def gradient(params, batch):
  return jnp.sin(params * batch)

def replay(config):
  return {
    "optimizer": optax.sgd(config["rate"]),
    "params": np.ones(64, np.float32),
    "gradient": gradient,
  }
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
  """A journal of a run of two replicas, and the program for it."""
  path = tmp_path_factory.mktemp("replay")
  setup = path / "setup.py"
  setup.write_text(_SETUP)
  scope = {}
  exec(_SETUP, scope)

  def train(replica):
    for step in range(8):
      batch = float(2 * step + replica.replica)
      replica.step(scope["gradient"](replica.params, batch), batch=batch)

  coordinator.run_embedded(
    train,
    2,
    optax.sgd(0.1),
    np.ones(64, np.float32),
    journal=str(path / "run.jsonl"),
    fingerprint_every=1,
    config={"rate": 0.1},
    timeout=60.0,
  )
  return path


def _main(*argv):
  return main.main(["replay", *map(str, argv)])


def test_a_recorded_run_is_identical(recorded, capsys):
  assert _main(recorded / "run.jsonl", "--setup", recorded / "setup.py") == 0
  assert capsys.readouterr().out.startswith("identical, 8 steps")


def test_another_rate_is_not(recorded, capsys, tmp_path):
  text = (recorded / "run.jsonl").read_text()
  assert '"rate": 0.1' in text
  other = tmp_path / "other.jsonl"
  other.write_text(text.replace('"rate": 0.1', '"rate": 0.2'))
  assert _main(other, "--setup", recorded / "setup.py") == 1
  assert capsys.readouterr().out.startswith("step 1: params of replica ")


def test_a_bad_line_is_told_and_its_step_is_missed(recorded, capsys, tmp_path):
  lines = (recorded / "run.jsonl").read_text().splitlines()
  at = next(i for i, x in enumerate(lines) if json.loads(x).get("step") == 3)
  while json.loads(lines[at])["kind"] != "commit":
    at += 1
  lines[at] = lines[at][:-1]
  cut = tmp_path / "cut.jsonl"
  cut.write_text("\n".join(lines) + "\n")
  assert _main(cut, "--setup", recorded / "setup.py") == 2
  first, *_, last = capsys.readouterr().err.splitlines()
  assert f"cut.jsonl: line {at + 1}: not JSON" in first
  assert "lacks the commit of step" in last


@pytest.mark.parametrize(
  ("program", "said"),
  [
    (None, "there is no such file"),
    ("x = 1", "it has no function replay(config)"),
    ("def replay(config): return 3", "must return a dictionary with optimizer"),
  ],
)
def test_a_program_that_does_not_fit_is_one_line(
  program, said, recorded, capsys, tmp_path
):
  setup = tmp_path / "setup.py"
  if program:
    setup.write_text(program)
  assert _main(recorded / "run.jsonl", "--setup", setup) == 2
  assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_run_of_another_program_needs_a_setup(recorded, capsys):
  assert _main(recorded / "run.jsonl") == 2
  assert "give --setup FILE.py" in capsys.readouterr().err


def test_a_launched_training_is_found_again(capsys, tmp_path):
  """Its journal says all: here written by threads that do what they do."""
  args = argparse.Namespace(
    strategy="sync-replicas",
    replicas=2,
    replicas_to_aggregate=None,
    epochs=1,
    batch_size=16,
    optimizer="momentum",
    learning_rate=0.1,
    seed=0,
  )
  train, _ = digits.load()
  config = process_plan.make(args, len(train.labels))
  params = model.init(0)
  gradient = process_plan.make_gradient(
    config, params, train.images, train.labels
  )

  def work(replica):
    for batch in range(2):
      key = [replica.replica, 0, batch]
      replica.step(gradient(replica.params, key)[1], batch=key)

  coordinator.run_embedded(
    work,
    2,
    process_plan.make_optimizer(config),
    params,
    journal=str(tmp_path / "run.jsonl"),
    fingerprint_every=1,
    config=config,
    timeout=60.0,
  )
  assert _main(tmp_path / "run.jsonl") == 0
  assert capsys.readouterr().out.startswith("identical, 2 steps")


def test_a_journal_that_is_not_there_is_one_line(capsys):
  assert _main("nowhere.jsonl", "--setup", "x.py") == 2
  assert "nowhere.jsonl: can't be read" in capsys.readouterr().err
