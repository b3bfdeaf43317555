"""Replays what TensorFlow's CrossShardOptimizer was recorded to do."""

import re

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise
import pytest
import scenario_recordings

import optax_dist

RUNS = {
  id: r
  for id, r in scenario_recordings.RECORDINGS.items()
  if r["system"] == "cross_shard" and r["config"]
}
# Single checks have no configuration.
CHECKS = [
  event
  for r in scenario_recordings.RECORDINGS.values()
  if r["system"] == "cross_shard" and not r["config"]
  for event in r["events"]
]
REDUCTIONS = {"weighted_mean": "mean", "weighted_sum": "sum"}


@pytest.mark.skipif(
  scenario_recordings.PATH != scenario_recordings.BUNDLED, reason="another file"
)
def test_number_of_replayed_recordings_is_as_expected():
  assert len(RUNS) == 6
  assert len(CHECKS) == 57
  assert {e["op"] for e in CHECKS} >= NOT_REPLAYED.keys()


@pairwise.every_value(map_name=maps.NAMES, id=sorted(RUNS))
def test_recorded_trajectories_are_reproduced(id, map_name):
  config = RUNS[id]["config"]
  size = config["num_shards"]
  shard = optax_dist.cross_shard(
    maps.AXIS,
    reduction=REDUCTIONS[config["reduction"]],
    axis_index_groups=config["group_assignment"],
  )
  sgd = optax.sgd(config["lr"])
  # TensorFlow divides the loss, before its gradient is taken.
  divisor = 1
  if config["reduction"] == "weighted_mean":
    divisor = len((config["group_assignment"] or [range(size)])[0])

  def step(w, x):
    grad = jax.grad(lambda w: 0.5 * jnp.square(w - x))(w)
    summed, _ = shard.update(grad, shard.init(w), w)
    updates, _ = sgd.update(summed, sgd.init(w), w)
    return grad, summed, optax.apply_updates(w, updates)

  w = np.full(size, config["w0"], np.float32)
  x = np.array(config["x"], np.float32)
  run = maps.mapped(map_name, step, (w, x), size)
  for event in RUNS[id]["events"]:
    assert event["op"] == "step"
    grad, summed, w = map(np.asarray, run(w, x))
    seen = {"shard_grads": grad / divisor, "summed": summed, "weights": w}
    assert set(event["expect"]) <= set(seen)
    for name, expected in event["expect"].items():
      # TensorFlow scales before it sums, so the last bit may differ.
      np.testing.assert_allclose(seen[name], expected, rtol=3e-7)


# --- CS-ERR: single checks, each named by what was done ----------------------

_SCALED = re.compile(r"(MEAN|SUM) shards=(\d+)$")

NOT_REPLAYED = {
  "reductions": "lists TensorFlow's names of reductions",
  "ctor keras opt": "there is no inner optimizer: cross_shard is one of a chain",
  "ctor nested CrossShard": "likewise; two in a chain is a mean of means",
  "MEAN no ctx (d/dx x^2 at 3 = 6)": "assumes one shard outside of any context,"
  " with a warning; here an unbound axis is an error",
  "ga [[0]] no ctx": "likewise",
  "ga [[0,1]] no ctx": "likewise",
  "apply no ctx": "likewise",
  "apply outside ctx": "likewise",
  "nested ctx": "there is no shard context: the map binds the axis",
  "ctx reset after exception": "likewise",
  "shard_context(0)": "likewise",
  "ga dup but covering [[0,1],[1,0]] shards 2": "TensorFlow's check misses that"
  " it is no permutation; refused here",
  "ga dup within group [[0,0],[1,1]] shards 2": "likewise",
  "ga tuple of lists": "the words are replayed by test_collectives",
  "ga list of tuples": "likewise",
  "ga numpy": "likewise; TensorFlow's error is an accident",
  "ga flat list [0,0,1,1] (old 1-d format)": "likewise",
  "ga unequal with SUM (still verified)": "checked before the reduction is known",
  "apply default ga": "names of graph operations",
  "apply ga": "names of graph operations",
  "apply ga=[]": "names of graph operations",
  "apply None grad": "names of graph operations; None passes in test_cross_shard",
  "apply sparse": "names of graph operations; sparse is in test_cross_shard",
  "apply all None": "an empty tree of updates is nothing to do in optax",
  "dtype int32": "TensorFlow sums integers; here they are refused by name",
  "int loss * float scale": "the loss is not scaled, the gradient is",
  "callable loss": "the loss is not an argument",
  "callable loss shards=1": "likewise",
  "run on CPU": "CrossReplicaSum has no CPU kernel; here there is one",
  "slots": "tests/states/test_slots.py",
}


def _replayed(op):
  return op not in NOT_REPLAYED


def _gradient(size, reduction="mean", groups=None, dtype=np.float32):
  """The share of the gradient of x**2 at 3 that one of `size` shards has."""
  tx = optax_dist.cross_shard(
    maps.AXIS, reduction=reduction, axis_index_groups=groups
  )
  own = np.zeros(size, dtype)
  own[0] = 6  # Only shard 0 has a loss: the others' gradients are zero.
  step = lambda g: tx.update(g, tx.init(g))[0]
  return maps.run("shard_map_vma", step, own, size=size)[0]


@pytest.mark.parametrize(
  "event", [e for e in CHECKS if _replayed(e["op"])], ids=lambda e: e["op"]
)
def test_recorded_checks_are_reproduced(event):
  op, expect = event["op"], event["expect"]
  if op.startswith("ctor reduction="):
    name = op.removeprefix("ctor reduction=").strip('"')
    if expect["ok"]:
      optax_dist.cross_shard(maps.AXIS, reduction=REDUCTIONS[name])
    else:
      with pytest.raises(ValueError, match="`reduction` must be one of"):
        optax_dist.cross_shard(maps.AXIS, reduction=name)
  elif result := _SCALED.match(op):
    reduction = REDUCTIONS["weighted_" + result[1].lower()]
    got = _gradient(int(result[2]), reduction)
    assert got == float(expect["result"])
  elif op.startswith("dtype "):
    dtype = jnp.dtype(op.removeprefix("dtype "))
    with jax.enable_x64(dtype == np.float64):
      assert _gradient(2, dtype=dtype).dtype == dtype
  elif op == "fp16 loss scale 1/3":
    assert _gradient(3, dtype=np.float16) == float(expect["result"])
  else:
    assert op.startswith("ga "), f"unknown op {op!r}"
    _check_groups(op, expect)


def _check_groups(op, expect):
  if op == "ga [] (empty)":
    groups, size = [], 4
  elif op == "ga [[]] shards 1":
    groups, size = [[]], 1
  elif op == "ga shards=1 [[0]]":
    groups, size = [[0]], 1
  else:
    groups = jax.tree.map(int, _parse(re.search(r"\[\[.*\]\]", op)[0]))
    size = 2 if "shards 2" in op else 4
  reduction = "sum" if "SUM" in op else "mean"
  if expect["ok"]:
    assert _gradient(size, reduction, groups) == float(expect["result"])
  else:
    words = "equal in size" if "equal" in expect["message"] else "permutation"
    with pytest.raises(ValueError, match=words):
      _gradient(size, reduction, groups)


def _parse(text):
  return [
    [int(i) for i in group.split(",") if i]
    for group in re.findall(r"\[([\d,]*)\]", text)
  ]
