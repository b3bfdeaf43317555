"""Recordings of TensorFlow 2.21 (tests/scenarios), and how to compare them.

`pytest --scenarios PATH`, or the environment variable OPTAX_DIST_SCENARIOS,
replays another file of the same format.
"""

import json
import os
import pathlib

import numpy as np

BUNDLED = pathlib.Path(__file__).parents[2] / "scenarios" / "scenarios.json"
PATH = pathlib.Path(os.environ.get("OPTAX_DIST_SCENARIOS") or BUNDLED)
FORMAT = "h3-scenarios/1"

ACCUMULATORS = (
  "conditional_accumulator",
  "conditional_accumulator+fifo_queue",
  "sparse_conditional_accumulator",
)
SYNC_REPLICAS = ("sync_replicas",)
STALE_GRADIENTS = ("drop_stale_gradient",)
CROSS_SHARD = ("cross_shard",)
ELASTIC = ("elastic_average",)
AGN = ("agn",)
SYSTEMS = (
  *ACCUMULATORS,
  *SYNC_REPLICAS,
  *STALE_GRADIENTS,
  *CROSS_SHARD,
  *ELASTIC,
  *AGN,
)


def recordings(path=PATH):
  """All recordings of a file, by id."""
  with path.open() as file:
    content = json.load(file)
  if content["format"] != FORMAT:
    raise ValueError(
      f"{path} must have the format {FORMAT!r}, got {content['format']!r}"
    )
  result = [*content.get("scenarios", ()), *content.get("traces", ())]
  by_id = {r["id"]: r for r in result}
  if len(by_id) != len(result):
    raise ValueError(f"{path} has several recordings of one id")
  unknown = {r["system"] for r in result} - set(SYSTEMS)
  if unknown:
    raise ValueError(f"{path} has recordings of unknown systems: {unknown}")
  return by_id


RECORDINGS = recordings()


def not_replayed(recording):
  """Why no test replays the recording, or None."""
  if recording["system"] in ACCUMULATORS:
    return (
      "kernels of TensorFlow that have no counterpart; what they do to a step is"
      " in the recordings of SyncReplicasOptimizer"
    )
  if recording["config"].get("nondeterministic"):
    return "TensorFlow itself is not deterministic here"
  if any(
    (event.get("expect") or {}).get("ready") == "ps"
    for event in recording["events"]
    if isinstance(event.get("expect"), dict)
  ):
    return (
      "the parameter server's process is killed, what was pushed before is not"
      " recorded, and TensorFlow's retries depend on time"
    )
  return None


def ids(*systems):
  """The ids of the recordings of some systems that are replayed."""
  return [
    id
    for id, recording in RECORDINGS.items()
    if recording["system"] in systems and not_replayed(recording) is None
  ]


def array(value, dtype):
  """A recorded value; non-finite numbers are recorded as strings."""
  return np.asarray(np.asarray(value, np.float64), dtype)
