"""Replays TensorFlow's recordings through the model of TensorFlow."""

import re

import pytest
import scenario_recordings as recorded
import sync_replicas_recordings as sync

from optax_dist import quorum
from tests.tensorflow1.events import tokens


@pytest.mark.parametrize("id", recorded.ids(*recorded.ACCUMULATORS))
def test_accumulators_and_queue(id):
  recorded.AccumulatorReplay(recorded.RECORDINGS[id]).run()


@pytest.mark.parametrize("id", recorded.ids(*recorded.SPARSE_ACCUMULATORS))
def test_sparse_accumulators(id):
  recorded.SparseReplay(recorded.RECORDINGS[id]).run()


@pytest.mark.parametrize("id", recorded.ids(*recorded.STALE_GRADIENTS))
def test_drop_stale_gradient(id):
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


def test_every_recording_is_replayed_or_has_a_reason():
  known = set(recorded.ids(*recorded.SYSTEMS))
  for id, recording in recorded.RECORDINGS.items():
    assert (id in known) == (recorded.not_replayed(recording) is None)


@pytest.mark.skipif(recorded.PATH != recorded.BUNDLED, reason="another file")
def test_how_many_recordings_are_replayed():
  count = lambda systems: len(recorded.ids(*systems))
  assert count(recorded.ACCUMULATORS) == 36
  assert count(recorded.SPARSE_ACCUMULATORS) == 23
  assert count(recorded.SYNC_REPLICAS) == 44  # Not MP-D and SR-33.
  assert count(recorded.STALE_GRADIENTS) == 2
  assert count(recorded.SYSTEMS) == len(recorded.RECORDINGS) - 2 == 134


def _numbers(op):
  """The numbers of tokens, replicas to aggregate, and replicas in an op."""
  tokens = re.search(r"tokens (-?\d+)", op)
  aggregate = re.search(r"R=?(\d+)", op)
  total = re.search(r"T(=?\d+| None)", op)
  k = int(aggregate[1])
  n = k if total is None or total[1] == " None" else int(total[1].strip("="))
  return int(tokens[1]) if tokens else -1, k, n


# Checks of TensorFlow's constructor with numbers alone.
_RULES = re.compile(r"tokens|R\d+ T|T=\d+ R=")
# The others: graphs, devices, names and slots of TensorFlow.
_OF_GRAPHS = {
  "R0 run sync_op",
  "adam variables",
  "all None grads",
  "apply_gradients twice",
  "apply_gradients([])",
  "apply_gradients(global_step=None)",
  "dtype mismatch grad f64 var f32",
  "duplicate var in list",
  "get_chief_queue_runner before",
  "get_init_tokens_op before",
  "graph names",
  "gs dtype float32",
  "gs dtype int32",
  "gs dtype int64",
  "hook.begin before apply",
  "minimize without global_step",
  "nonchief hook.begin before apply",
  "numpy grad",
  "slots",
  "some None grads",
  "static shape mismatch",
  "unknown grad type",
  "unknown grad type float",
}
_CONSTRUCTION = [
  event
  for id in recorded.ids(*recorded.SYNC_REPLICAS)
  if sync.is_construction(recorded.RECORDINGS[id])
  for event in recorded.RECORDINGS[id]["events"]
]


def test_every_check_of_construction_is_known():
  for event in _CONSTRUCTION:
    assert _RULES.match(event["op"]) or event["op"] in _OF_GRAPHS, event


@pytest.mark.parametrize(
  "event",
  [e for e in _CONSTRUCTION if _RULES.match(e["op"])],
  ids=lambda e: e["op"],
)
def test_construction_as_recorded(event):
  op, expect = event["op"], event["expect"]
  num_tokens, k, n = _numbers(op)
  if not op.startswith("tokens ") or op.startswith("tokens_per_step"):
    assert expect["text"] == str((k, n, tokens.tokens_per_step(n, k)))
  elif expect["outcome"] == "ok":
    enqueued = re.search(r"\[\((\d+),\)\]", expect["text"])
    expected = int(enqueued[1]) if enqueued else 0
    assert tokens.initial_tokens(num_tokens, k, n) == expected
  else:
    with pytest.raises(ValueError, match=re.escape(expect["text"])):
      tokens.initial_tokens(num_tokens, k, n)
