"""Differences between versions of a job, and its move from one to another."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist import coordinator
from optax_dist.coordinator import checkpoint

_OPT = optax.sgd(0.1, momentum=0.9)


def test_a_job_moves_to_another_version_by_its_checkpoint(
  tmp_path, monkeypatch
):
  params = jnp.zeros(2)

  def run(steps, replicas, folder=None, **state):
    def train(replica):
      while replica.global_step < steps:
        replica.step(jnp.ones(2))
      if folder is not None and replica.replica == 0:
        checkpoint.save(folder / f"step-{steps:08}", replica)
      return np.asarray(replica.params)

    state = {"params": params} | state
    return coordinator.run_embedded(train, replicas, _OPT, **state)[0]

  whole = run(6, 1)
  with monkeypatch.context() as earlier:
    earlier.setattr(optax_dist, "__version__", "0.0.1")
    run(3, 2, tmp_path)
  result = checkpoint.resume(tmp_path, params, _OPT.init(params))
  assert result["global_step"] == 3
  np.testing.assert_array_equal(run(6, 1, **result), whole)
  # Another optimizer's state is refused, whatever the version.
  other = optax.adam(0.1)
  with pytest.raises(ValueError, match="opt_state"):
    checkpoint.resume(tmp_path, params, other.init(params))
