"""A run whose journal can't be written for a while."""

import resource

import jax.numpy as jnp
import optax

from optax_dist import coordinator
from optax_dist.coordinator import journal


def test_the_journal_has_all_steps_once_there_is_room(tmp_path, caplog):
  path = tmp_path / "run.jsonl"
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  sizes = []

  def train(replica):
    while replica.global_step < 9:
      replica.step(jnp.ones(3))
      if replica.global_step == 3:
        sizes.append(path.stat().st_size)
        resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[0], limits[1]))
      if replica.global_step == 6:
        sizes.append(path.stat().st_size)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

  try:
    coordinator.run_embedded(
      train, 1, optax.sgd(1.0), jnp.zeros(3), journal=path
    )
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert "training goes on without it" in caplog.text
  result = journal.read(path)
  commits = [r["step"] for r in result.records if r["kind"] == "commit"]
  assert commits == list(range(9))
  assert not result.problems
  assert result.records[-1]["kind"] == "finish"
