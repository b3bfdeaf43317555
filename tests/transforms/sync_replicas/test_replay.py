"""Replays TensorFlow's SyncReplicasOptimizer through the public transform."""

import jax
import pytest
import scenario_recordings as recorded
import sync_replicas_recordings as sync
import transform_recordings

CANDIDATES = recorded.ids(*recorded.SYNC_REPLICAS)
REPLAYED = [
  id
  for id in CANDIDATES
  if transform_recordings.not_replayed(recorded.RECORDINGS[id]) is None
]


@pytest.mark.parametrize("id", REPLAYED)
def test_recordings_are_reproduced(id):
  recording = recorded.RECORDINGS[id]
  config = sync.config_of(recording)
  with jax.enable_x64(config.get("dtype") == "float64"):
    system = transform_recordings.TransformSystem(config)
    assert sync.Runner(recording, system).run()


@pytest.mark.skipif(recorded.PATH != recorded.BUNDLED, reason="another file")
def test_number_of_replayed_recordings_is_as_expected():
  assert (len(REPLAYED), len(CANDIDATES)) == (31, 44)
