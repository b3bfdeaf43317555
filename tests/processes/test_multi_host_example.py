"""docs/multi_host/train_one_program.py over two processes, as its page says."""

import importlib.util
import pathlib

import jax
import launch
import numpy as np
import pytest

_PROGRAM = pathlib.Path(__file__).resolve().parents[2] / (
  "docs/multi_host/train_one_program.py"
)


def _train():
  """Runs in each process; returns its parameters and the last loss."""
  spec = importlib.util.spec_from_file_location("program", _PROGRAM)
  program = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(program)
  # As where it is run; the processes here are started with strict promotion.
  with jax.numpy_dtype_promotion("standard"):
    params, loss = program.train(steps=60)
  own = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), params)
  return own, loss, (jax.process_count(), jax.device_count())


@pytest.mark.nightly  # test_cross_shard_processes.py has such processes.
def test_the_program_learns_the_same_on_every_process():
  results = launch.run(_train, processes=2, devices=2)
  for own, loss, counts in results:
    assert counts == (2, 4)
    assert loss < 1.0  # From 2.3.
    jax.tree.map(np.testing.assert_array_equal, own, results[0][0])
