"""Elastic averaging, local updates and wires, against the same by hand."""

import threading

import embedded_runs as runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist import compression, coordinator
from optax_dist.coordinator import strategies
from optax_dist.coordinator.runtime import endpoint
from optax_dist.transforms.elastic_exchange import elastic_exchange

PERIOD, RATE = 3, 0.3
INNER = optax.sgd(0.1)


def local_steps(params, replica, first):
  """A replica's local steps between two exchanges."""
  for number in range(first, first + PERIOD):
    batch = jnp.asarray(runs.batch_of(replica, number))
    grads = runs.gradient(params, batch)
    params = jax.tree.map(lambda x, g: x - np.float32(0.1) * g, params, grads)
  return params


def close(got, expected):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
    got,
    expected,
  )


def rounds(number):
  def train(replica, result):
    for _ in range(PERIOD * number):
      grads, batch = runs.compute(replica, result.computed)
      result.computed += 1
      outcome = replica.step(grads, batch=batch)
      assert outcome.accepted
      result.outcomes.append(outcome)
    return jax.tree.map(np.asarray, replica.params)

  return train


@pytest.mark.parametrize("inline", [0, 64 << 10], ids=["moved", "inline"])
def test_asynchronous_elastic_averaging(inline, tmp_path):
  path = tmp_path / "run.jsonl"
  strategy = strategies.elastic_average(
    moving_rate=RATE, communication_period=PERIOD
  )
  results = runs.run(
    rounds(4),
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
    own[i], center, *_ = elastic_exchange(own[i], center, RATE)
  assert met == [4] * 3
  for i, result in enumerate(results):
    close(result.value, own[i])
  last = max(results, key=lambda r: r.outcomes[-1].global_step)
  close(last.params, center)


def test_synchronous_elastic_averaging():
  strategy = strategies.elastic_average(
    moving_rate=RATE, communication_period=PERIOD, synchronous=True
  )
  results = runs.run(rounds(3), 3, strategy=strategy, opt=INNER)
  assert [r.error for r in results] == [None] * 3
  center, own = runs.PARAMS, [runs.PARAMS] * 3
  for turn in range(3):
    own = [local_steps(x, i, PERIOD * turn) for i, x in enumerate(own)]
    pulls = [elastic_exchange(x, center, RATE).pull for x in own]
    own = [
      jax.tree.map(lambda a, b: a - b, x, p)
      for x, p in zip(own, pulls, strict=True)
    ]
    center = jax.tree.map(lambda c, *p: c + sum(p), center, *pulls)
  for i, result in enumerate(results):
    close(result.value, own[i])
    close(result.params, center)


def test_a_synchronous_center_is_pulled_by_those_who_are_there():
  strategy = strategies.elastic_average(
    moving_rate=RATE, communication_period=PERIOD, synchronous=True
  )

  def train(replica, result):
    return rounds(1 if replica.replica else 2)(replica, result)

  results = runs.run(train, 2, strategy=strategy, opt=INNER)
  assert [r.error for r in results] == [None] * 2
  one = [local_steps(runs.PARAMS, i, 0) for i in range(2)]
  met = [elastic_exchange(x, runs.PARAMS, RATE) for x in one]
  center = jax.tree.map(
    lambda c, a, b: c + a + b, runs.PARAMS, met[0].pull, met[1].pull
  )
  alone = local_steps(met[0].params, 0, PERIOD)
  close(results[0].params, elastic_exchange(alone, center, RATE).center)


def test_local_updates_are_diloco_by_hand():
  outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
  strategy = strategies.local_updates(outer, communication_period=PERIOD)
  results = runs.run(rounds(3), 2, strategy=strategy, opt=INNER, inline_bytes=0)
  assert [r.error for r in results] == [None] * 2
  center = runs.PARAMS
  velocity = jax.tree.map(jnp.zeros_like, center)
  for turn in range(3):
    changes = [
      jax.tree.map(
        lambda a, b: a - b, center, local_steps(center, i, PERIOD * turn)
      )
      for i in range(2)
    ]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *changes)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, mean)
    center = jax.tree.map(
      lambda c, v, g: c - 0.7 * (0.9 * v + g), center, velocity, mean
    )
  for result in results:
    close(result.params, center)
    close(result.value, center)


def test_local_updates_that_come_too_late_begin_again():
  strategy = strategies.local_updates(communication_period=2)

  def train(replica, result):
    if replica.replica < 2:
      for number in range(4):
        assert replica.step(runs.compute(replica, number)[0]).accepted
      replica.finish()
      return None
    replica.step(runs.compute(replica, 0)[0])
    assert replica.wait_until_stale(60.0)
    outcome = replica.step(runs.compute(replica, 1)[0])
    assert outcome.reason in ("stale", "finished")
    assert coordinator.fingerprint(replica.params) == coordinator.fingerprint(
      replica.center
    )
    return None

  results = runs.run(train, 3, k=2, strategy=strategy, opt=INNER)
  assert [r.error for r in results] == [None] * 3


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_narrow_wires_lose_little_and_nothing_for_ever(wire):
  """The mean of many steps' means is that of the gradients."""
  steps = 40
  gradients = np.random.default_rng(0).normal(size=(2, 5000)).astype("f4")
  opt = optax.sgd(1.0)

  def train(replica, result):
    for _ in range(steps):
      assert replica.step({"x": jnp.asarray(gradients[replica.replica])})
    return np.asarray(replica.params["x"])

  results = runs.run(
    train, 2, opt=opt, params={"x": jnp.zeros(5000)}, wire=wire, inline_bytes=0
  )
  assert [r.error for r in results] == [None] * 2
  assert np.array_equal(results[0].value, results[1].value)
  mean = -results[0].value / steps
  exact = gradients.mean(0)
  largest = np.abs(gradients).max()
  # bfloat16 has 8 bits. Without feedback int8 would be off by half of 1/127.
  bound = largest / (128 if wire == "bfloat16" else 127 * 2 * 4)
  bound += np.abs(exact).max() / 256
  assert np.abs(mean - exact).max() <= bound
  assert np.abs(mean - exact).max() > 0


@pytest.mark.parametrize(
  ("wire", "fewer"),
  [("int4", 7.9), ("int2", 15.7), ("sign", 31.4), ("top_k", 112)],
)
@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
@pytest.mark.parametrize("both", [False, True], ids=["up", "both"])
def test_wires_of_few_bits_train_to_the_same_end(
  wire, fewer, inline_bytes, both
):
  """Towards a target for each replica; both end near the mean of the targets."""
  size, steps = 2 * 4032, 60
  targets = np.random.default_rng(1).normal(size=(2, size)).astype("f4")

  def train(replica, result):
    for _ in range(steps):
      own = {"x": replica.params["x"] - targets[replica.replica]}
      assert replica.step(own)
    return np.asarray(replica.params["x"]), replica.stats()["bytes_out"]

  results = runs.run(
    train,
    2,
    opt=optax.sgd(0.03),
    params={"x": jnp.zeros(size)},
    wire=wire,
    mean_wire=wire if both else "bfloat16",
    inline_bytes=inline_bytes,
    fingerprint_every=10,
  )
  assert [r.error for r in results] == [None] * 2
  (first, sent), (second, _) = (r.value for r in results)
  np.testing.assert_array_equal(first, second)
  goal = targets.mean(0)
  assert np.linalg.norm(first - goal) < 0.7 * np.linalg.norm(goal)
  if not inline_bytes:
    # Half of the gradient, in few bits, and half of the mean in bfloat16 or alike.
    mean = 2 / fewer if both else 1
    assert sent == pytest.approx(steps * size * (2 / fewer + mean), rel=0.02)


def test_parameters_do_not_travel_in_few_bits():
  """Elastic averaging sends them: of 3 % the center would be nearly nothing."""
  strategy = strategies.elastic_average(moving_rate=0.5)
  with pytest.raises(ValueError, match=r"wire='top_k' is for what .* learned"):
    runs.make(
      endpoint.World(), 0, k=1, n=2, strategy=strategy, opt=INNER, wire="top_k"
    )


def test_means_that_are_not_added_up_do_not_travel_in_few_bits():
  """Of parameters, or directions, what is left out can't be made up for."""
  radial = strategies.decoupled_diloco(fragments=1, period=4)
  for strategy in (strategies.elastic_average(moving_rate=0.5), radial):
    with pytest.raises(ValueError, match=r"mean_wire='int8' is for .* sum"):
      runs.make(
        endpoint.World(),
        0,
        k=1,
        n=2,
        strategy=strategy,
        opt=INNER,
        wire="int8",
        mean_wire="int8",
      )


def test_local_updates_feed_back_as_the_transform_does():
  """SparseLoCo: a period of local steps, 3 % in 2 bits, and a decay."""
  size, period, rounds_ = 4032, 2, 4
  targets = np.random.default_rng(2).normal(size=(2, size)).astype("f4")

  def train(replica, result):
    target = targets[replica.replica]
    for _ in range(period * rounds_):
      assert replica.step({"x": replica.params["x"] - target}).accepted
    return np.asarray(replica.center["x"])

  results = runs.run(
    train,
    2,
    strategy=strategies.local_updates(
      optax.sgd(0.5), communication_period=period
    ),
    opt=optax.sgd(0.1),
    params={"x": jnp.zeros(size)},
    wire="top_k",
    mean_wire="bfloat16",
    error_feedback=0.9,
  )
  assert [r.error for r in results] == [None] * 2
  tx = optax_dist.local_updates(
    optax.sgd(0.1),
    optax.sgd(0.5),
    "data",
    communication_period=period,
    compression=compression.top_k(0.03, chunk=size, bits=2, error_feedback=0.9),
    num_replicas=2,
  )
  state = tx.init(jnp.zeros(size))
  axes = optax_dist.state_axes(state)

  def step(params, state, target):
    updates, state = tx.update(params - target, state, params)
    return optax.apply_updates(params, updates), state

  step = jax.jit(
    jax.vmap(step, axis_name="data", in_axes=(0, axes, 0), out_axes=(0, axes))
  )
  params = jnp.zeros((2, size))
  for _ in range(period * rounds_):
    params, state = step(params, state, jnp.asarray(targets))
  expected = np.asarray(params[0])
  assert np.count_nonzero(expected) > 300
  # The mean is a bfloat16, so that now and then another number is the largest.
  close = np.isclose(results[0].value, expected, rtol=0.02, atol=1e-3)
  assert close.mean() > 0.99


def test_bytes_are_counted_and_are_the_fewest_there_can_be():
  elements, steps = 3 * 64 * 40, 4
  size = 4 * elements

  def train(replica, result):
    before = replica.stats()["bytes_in"]
    for _ in range(steps):
      if replica.replica == 3:
        assert replica.wait_until_stale(60.0)
        assert replica.abandon().reason == "stale"
      else:
        assert replica.step({"x": jnp.ones(elements)}).accepted
      # The fourth must see each step become stale: the others wait for it.
      together.wait()
    return replica.stats()["bytes_in"] - before

  together = threading.Barrier(4, timeout=60)
  results = runs.run(
    train, 4, k=3, params={"x": jnp.ones(elements)}, inline_bytes=0
  )
  assert [r.error for r in results] == [None] * 4
  for result in results[:3]:
    assert result.value == steps * 2 * size * 2 // 3
  assert results[3].value <= steps * size
  assert results[3].value % size == 0


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (strategies.elastic_average(moving_rate=1.5), "moving_rate"),
    (
      strategies.elastic_average(moving_rate=0.5, communication_period=0),
      "communication_period",
    ),
    (
      strategies.local_updates(communication_period=True),
      "communication_period",
    ),
  ],
)
def test_arguments_out_of_range_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make(INNER, strategies.Quorum(2, 2))


def test_one_replica_has_but_one_change_to_give():
  with pytest.raises(ValueError, match="replicas_to_aggregate"):
    strategies.local_updates()(INNER, strategies.Quorum(4, 2))
