"""Replays TensorFlow's drop_stale_gradient through the rule for stale gradients."""

import pytest
import scenario_recordings as recorded

from optax_dist import quorum

_IDS = recorded.ids(*recorded.STALE_GRADIENTS)


@pytest.mark.parametrize("id", _IDS)
def test_recorded_stale_gradients_are_dropped(id):
  config = recorded.RECORDINGS[id]["config"]
  (event,) = recorded.RECORDINGS[id]["events"]
  assert event["op"] == "all workers once"
  step, stale, variables = 0, 0.0, list(config["init"])
  for _ in range(config["num_workers"]):
    # Everyone has computed at step 0; the gradient is -1, the rate 1.
    if quorum.accepts(0, step, config["staleness"]):
      step += 1
      variables = [value + 1.0 for value in variables]
    else:
      stale += 1.0
  assert event["expect"] == {
    "global_step": step,
    "stale_counter": stale,
    "vars": variables,
  }


@pytest.mark.skipif(recorded.PATH != recorded.BUNDLED, reason="another file")
def test_number_of_replayed_recordings_is_as_expected():
  assert len(_IDS) == 2
