"""Elastic averaging: one exchange, and runs of several against the same by hand."""

import embedded_runs as runs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from local_rounds import INNER, PERIOD, close, local_steps, rounds

from optax_dist.coordinator import strategies

RATE = 0.3
OWN, CENTER = np.array([4.0, -1.0], np.float32), np.array([0.0, 1.0], "f4")


def away(strategy, params=OWN):
  """A center, and a replica's state away from it at the end of a period."""
  shared = strategy.shared(jnp.asarray(CENTER))
  local = strategy.local(shared)
  return shared, local._replace(params=jnp.asarray(params), steps=10)


@pytest.mark.parametrize("inline", [0, 64 << 10], ids=["moved", "inline"])
def test_replicas_exchange_on_their_own_clocks(inline, tmp_path):
  """In few steps, since a replica far behind on a busy machine gets a snapshot."""
  path = tmp_path / "run.jsonl"
  strategy = strategies.elastic_average(
    moving_rate=RATE, communication_period=PERIOD
  )
  results = runs.run(
    rounds(2),
    3,
    strategy=strategy,
    opt=INNER,
    inline_bytes=inline,
    journal=path,
  )
  assert [r.error for r in results] == [None] * 3
  # One exchange at a time, in the order of the commits.
  center, own, met = runs.PARAMS, [runs.PARAMS] * 3, [0] * 3
  for record in runs.records(path):
    if record["kind"] != "commit":
      continue
    (member,) = record["members"]
    i = member["replica"]
    own[i] = local_steps(own[i], i, PERIOD * met[i])
    met[i] += 1
    pull = jax.tree.map(lambda x, c: RATE * (x - c), own[i], center)
    own[i] = jax.tree.map(np.subtract, own[i], pull)
    center = jax.tree.map(np.add, center, pull)
  assert met == [2] * 3
  steps = [o.committed for r in results for o in r.outcomes if o.members]
  assert sorted(steps) == list(range(1, 7))
  for i, result in enumerate(results):
    close(result.value, own[i])
  last = max(results, key=lambda r: r.outcomes[-1].global_step)
  close(last.params, center)


@pytest.mark.parametrize("rate", [0.0, 1.0, 1.5, -0.1, True, np.nan])
def test_a_moving_rate_out_of_range_is_refused(rate):
  with pytest.raises(ValueError, match="moving_rate"):
    strategies.elastic_average(moving_rate=rate)
