"""Replays TensorFlow's SyncReplicasOptimizer through the model of it.

The rules say which gradient counts where, and when a mean is taken; the sums and the
update are written out in NumPy, and everything agrees to the bit.
"""

import pytest
import scenario_recordings as recorded
import sync_replicas_recordings as sync

from tests.tensorflow1 import events as tf

TWO_OPTIMIZERS = [
  id
  for id in recorded.ids(*recorded.SYNC_REPLICAS)
  if sync.two_optimizers(recorded.RECORDINGS[id])
]


@pytest.mark.parametrize("id", sync.steps())
def test_sync_replicas(id):
  recording = recorded.RECORDINGS[id]
  config = sync.config_of(recording)
  assert sync.Runner(recording, sync.StrictSystem(config)).run()


@pytest.mark.parametrize("id", TWO_OPTIMIZERS)
def test_two_optimizers_that_share_a_queue_block_each_other(id):
  # TensorFlow names both queues "sync_token_q", so they are one.
  config = recorded.RECORDINGS[id]["config"]
  systems, queue = {}, None
  for event in recorded.RECORDINGS[id]["events"]:
    worker, name = sync.TWO_OPTIMIZERS.fullmatch(event["op"]).groups()
    system = systems.get(name) or tf.sync_replicas(
      config["R"], config["total"], num_tokens=config["num_tokens"]
    )
    if queue is not None:
      system = system.with_queue(queue)
    systems[name], _ = system.worker_step(int(worker))
    queue = systems[name].queue
    seen = [s.with_queue(queue).observe() for s in systems.values()]
    expect = dict(event["expect"])
    assert [r for o in seen for r in o.blocked] == expect.pop("blocked")
    for step in (o.global_step for o in seen):
      assert step == expect.get("global_step", step)
    expect.pop("global_step", None)
    assert not expect


def test_unknown_ops_and_expectations_are_errors():
  recording = {
    "id": "new",
    "config": {
      "num_workers": 1,
      "R": 1,
      "num_tokens": 1,
      "lr": 1.0,
      "init": [0],
    },
    "events": [{"op": "chief dances", "expect": {}}],
  }

  def run(**event):
    recording["events"] = [event]
    system = sync.StrictSystem(sync.config_of(recording))
    sync.Runner(recording, system).run()

  with pytest.raises(AssertionError, match="unknown op 'chief dances'"):
    run(op="chief dances", expect={})
  with pytest.raises(AssertionError, match="unknown expectation 'mood'"):
    run(op="observe_initial", expect={"mood": 1})
  with pytest.raises(AssertionError, match=r"unknown fields .*when"):
    run(op="observe_initial", expect={}, when=3)
  with pytest.raises(AssertionError, match="vars"):
    run(op="observe_initial", expect={"vars": [0.0, 0.0]})
  with pytest.raises(AssertionError, match="new"):
    run(op="observe_initial", expect={"global_step": 1})
  run(op="observe_initial", expect={"vars": [0.0], "global_step": 0})
