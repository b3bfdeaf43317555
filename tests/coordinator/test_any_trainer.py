"""The coordinator as an optax transformation, as trainers call it."""

import functools
import inspect
import itertools
import os
import pathlib
import re
import secrets
import subprocess
import sys
import threading

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import run_journals
import waiting

import optax_dist
from optax_dist import coordinator
from optax_dist.coordinator import any_trainer
from optax_dist.coordinator.replica import Replica
from optax_dist.coordinator.runtime import processes
from optax_dist.coordinator.server import process

_SECRET = "a secret of enough bytes"
_TARGET = {"b": np.float32(0.5), "w": np.linspace(-1, 1, 12, dtype=np.float32)}


@pytest.fixture(scope="module")
def address():
  with process.start(_SECRET.encode(), port=0) as started:
    yield started.address


@pytest.fixture(autouse=True)
def as_users_have_it():
  """Adam can't be traced with strict promotion, in no thread."""
  jax.config.update("jax_numpy_dtype_promotion", "standard")
  yield
  jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def run(address, monkeypatch):
  """Makes the replicas of one run."""
  # Each program of these tests is of one of the devices.
  monkeypatch.setattr(any_trainer, "_check_devices", lambda: None)
  name, made = secrets.token_hex(4), []

  def make(optimizer, replica=0, n=1, **options):
    made.append(
      coordinator.as_optimizer(
        optimizer,
        **{
          "total_steps": 20,
          "replica": replica,
          "total_num_replicas": n,
          "coordinator_address": address,
          "run": name,
          "secret": _SECRET,
          "start_coordinator": False,
          "timeout": 60.0,
        }
        | options,
      )
    )
    return made[-1]

  yield make
  for one in made:
    if one.replica is not None:
      one.replica.close()


def initial(dtype="float32"):
  return {"b": jnp.zeros((), dtype), "w": jnp.ones(12, dtype)}


def gradient(params, batch):
  """The gradient of a quadratic, with noise that depends on the batch."""
  count = lambda p: jnp.arange(p.size, dtype=jnp.float32).reshape(p.shape)
  noise = lambda p: 0.1 * jnp.sin(batch + count(p))
  return jax.tree.map(
    lambda p, t: (p.astype(jnp.float32) - t + noise(p)).astype(p.dtype),
    params,
    jax.tree.map(jnp.asarray, _TARGET),
  )


class Trainer:
  """Somebody's trainer: it knows an optax transformation, and nothing else."""

  def __init__(self, tx, jit=True, dtype="float32", params=None):
    self.params = initial(dtype) if params is None else params
    self.opt_state = tx.init(self.params)
    self.calls = 0

    def update(params, opt_state, grads):
      updates, opt_state = tx.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    if jit:
      self._step = jax.jit(
        lambda p, s, batch: update(p, s, gradient(p, batch)),
        donate_argnums=(0, 1),
      )
    else:
      self._step = lambda p, s, batch: update(p, s, gradient(p, batch))

  def train(self, batches):
    for batch in batches:
      self.step(batch)

  def step(self, batch):
    self.calls += 1
    result = self._step(self.params, self.opt_state, jnp.float32(batch))
    self.params, self.opt_state = jax.block_until_ready(result)


def numbers(n):
  return iter(range(n))


def bits(tree):
  return coordinator.fingerprint(tree)


jit = pytest.mark.parametrize("jit", [True, False], ids=["jit", "outside"])
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@jit
@dtypes
def test_one_replica_trains_like_the_optimizer_alone(run, jit, dtype):
  optimizer = optax.adamw(optax.linear_schedule(0.1, 0.0, 20))
  k_of_n = run(optimizer)
  trainer = Trainer(k_of_n.tx, jit, dtype)
  trainer.train(k_of_n.until_finished(numbers(100)))
  alone = Trainer(optimizer, jit, dtype)
  alone.train(numbers(20))
  close = {"float32": 1e-6, "bfloat16": 2e-2}[dtype]
  for got, wanted in zip(
    *map(jax.tree.leaves, (trainer.params, alone.params)), strict=True
  ):
    np.testing.assert_allclose(
      np.asarray(got, np.float32), np.asarray(wanted, np.float32), atol=close
    )
  state = trainer.opt_state
  assert (state.step, state.dropped, state.finished) == (20, 0, True)
  # One more call, which verifies that the parameters are the last ones.
  assert state.calls == trainer.calls == 21
  assert k_of_n.finished
  assert bits(trainer.params) == bits(k_of_n.replica.params)
  assert bits(state.inner) == bits(k_of_n.replica.opt_state)


@pytest.mark.parametrize(
  ("jit", "dtype"), [(True, "bfloat16"), (False, "float32")]
)
def test_all_replicas_end_with_equal_bits(run, jit, dtype):
  ended = {}

  def replica(index):
    k_of_n = run(optax.adam(0.1), index, 2)
    trainer = Trainer(k_of_n.tx, jit, dtype)
    trainer.train(k_of_n.until_finished(range(index * 1000, 10**6)))
    ended[index] = bits(trainer.params), bits(k_of_n.replica.params)

  together(replica, 2)
  assert len({result for pair in ended.values() for result in pair}) == 1


def together(target, n):
  failures = []

  def guarded(index):
    try:
      target(index)
    except BaseException as error:
      failures.append(error)

  made = [threading.Thread(target=guarded, args=(i,)) for i in range(n)]
  for one in made:
    one.start()
  for one in made:
    one.join()
  if failures:
    raise failures[0]


@jit
def test_gradients_on_differing_parameters_are_not_sent(run, jit, monkeypatch):
  sent, step = [], Replica.step

  def spied(self, grads):
    sent.append((self.replica, bits(grads)))
    return step(self, grads)

  monkeypatch.setattr(Replica, "step", spied)
  first = run(optax.adam(0.1), 0, 2, replicas_to_aggregate=1)
  trainer = Trainer(first.tx, jit)
  for batch in range(5):
    trainer.step(batch)
  late = run(optax.adam(0.1), 1, 2, replicas_to_aggregate=1)
  other = Trainer(late.tx, jit, params=jax.tree.map(lambda p: p + 7, initial()))
  fresh = bits(gradient(other.params, jnp.float32(3)))
  other.step(3)
  # It has what the run has, and has given nothing to it.
  assert bits(late.replica.params) == bits(trainer.params)
  assert (other.opt_state.step, other.opt_state.dropped) == (5, 1)
  assert bits(other.opt_state.inner) == bits(trainer.opt_state.inner)
  assert fresh not in [result for _, result in sent]
  # Within rounding at first, and then exactly.
  other.step(4)
  other.step(5)
  assert 1 in [replica for replica, _ in sent]
  assert bits(other.params) == bits(late.replica.params)


def test_a_replica_that_missed_steps_is_exact_after_its_next_call(run):
  rng = np.random.default_rng(0)
  # Many parameters change their sign, where no addition is exact.
  params = {"w": jnp.asarray(rng.normal(size=100_000) * 1e-2, jnp.float32)}

  def trainer(k_of_n):
    made = Trainer(k_of_n.tx, params=dict(params))
    gradient = lambda p, batch: {"w": jnp.sin(1e4 * p["w"] + batch)}

    def step(p, s, batch):
      updates, s = k_of_n.tx.update(gradient(p, batch), s, p)
      return optax.apply_updates(p, updates), s

    made._step = jax.jit(step)
    return made

  first = run(optax.adam(1e-2), 0, 2, replicas_to_aggregate=1)
  fast = trainer(first)
  fast.step(0)
  late = run(optax.adam(1e-2), 1, 2, replicas_to_aggregate=1)
  slow = trainer(late)
  slow.step(0)
  for batch in range(3):
    fast.step(batch)
  slow.step(1)
  assert slow.opt_state.step == 4
  assert bits(slow.params) != bits(fast.params) == bits(late.replica.params)
  slow.step(2)
  assert bits(slow.params) == bits(fast.params)
  # Neither of its three gradients was in a step.
  assert slow.opt_state.dropped == 3
  slow.step(3)
  assert (slow.opt_state.step, slow.opt_state.dropped) == (5, 3)


@jit
def test_restored_trainer_sends_nothing_before_it_has_caught_up(run, jit):
  k_of_n = run(optax.adam(0.1))
  trainer = Trainer(k_of_n.tx, jit)
  for batch in range(4):
    trainer.step(batch)
  kept = jax.tree.map(np.array, (trainer.params, trainer.opt_state))
  for batch in range(4, 8):
    trainer.step(batch)
  now = bits(trainer.params)
  trainer.params, trainer.opt_state = jax.tree.map(jnp.asarray, kept)
  trainer.step(9)
  assert (k_of_n.replica.global_step, trainer.opt_state.dropped) == (8, 1)
  assert bits(k_of_n.replica.params) == now
  trainer.train(k_of_n.until_finished(numbers(100)))
  assert bits(trainer.params) == bits(k_of_n.replica.params)


def test_a_trainers_checkpoint_is_enough_to_resume(run):
  schedule = optax.adam(optax.linear_schedule(0.1, 0.0, 20))
  whole = run(schedule)
  trainer = Trainer(whole.tx)
  trainer.train(whole.until_finished(numbers(100)))
  begun = run(schedule, run=secrets.token_hex(4))
  half = Trainer(begun.tx)
  for batch in range(10):
    half.step(batch)
  kept = jax.tree.map(np.array, (half.params, half.opt_state))
  begun.close()
  # Another run, of two replicas; both see the data of the one before.
  name, ended = secrets.token_hex(4), []

  def replica(index):
    resumed = run(schedule, index, 2, run=name)
    again = Trainer(resumed.tx)
    again.params, again.opt_state = jax.tree.map(jnp.array, kept)
    again.train(resumed.until_finished(range(10, 100)))
    ended.append((bits(again.params), again.opt_state.step, again.params))

  together(replica, 2)
  assert ended[0][:2] == ended[1][:2] == (ended[0][0], 20)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
    ended[0][2],
    trainer.params,
  )


@jit
def test_wrapper_that_discards_updates_is_refused(run, jit):
  k_of_n = run(optax.sgd(0.1))
  trainer = Trainer(optax.MultiSteps(k_of_n.tx, 4), jit)
  with pytest.raises(
    ValueError, match=r"discarded.*replicas_to_aggregate=k"
  ) as raised:
    trainer.train(k_of_n.until_finished(numbers(100)))
  assert type(raised.value) is ValueError
  assert k_of_n.replica.global_step <= 1


@jit
def test_more_gradients_than_replicas_are_summed_and_counted(run, jit):
  k_of_n = run(optax.sgd(0.1), replicas_to_aggregate=3, total_steps=2)
  trainer = Trainer(k_of_n.tx, jit)
  trainer.train(k_of_n.until_finished(numbers(100)))
  wanted = initial()
  for first in (0, 3):
    result = [gradient(wanted, jnp.float32(first + i)) for i in range(3)]
    mean = jax.tree.map(lambda *g: sum(g) / 3, *result)
    wanted = jax.tree.map(lambda p, g: p - 0.1 * g, wanted, mean)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
    trainer.params,
    wanted,
  )
  assert k_of_n.replica.stats()["gradients"] == {"applied": 6}
  assert (trainer.calls, trainer.opt_state.dropped) == (7, 0)


@jit
def test_an_optimizer_may_treat_parameters_differently_by_name(run, jit):
  labels = {"b": "fixed", "w": "trained"}
  rules = {"fixed": optax.set_to_zero(), "trained": optax.adam(0.1)}
  k_of_n = run(optax.partition(rules, labels), total_steps=2)
  trainer = Trainer(k_of_n.tx, jit)
  trainer.train(k_of_n.until_finished(numbers(100)))
  assert trainer.params["b"] == 0.0
  assert (trainer.params["w"] != 1.0).all()
  assert bits(trainer.opt_state.inner) == bits(k_of_n.replica.opt_state)


@pytest.mark.parametrize("around", ["partition", "masked", "named_chain"])
def test_wrapper_of_some_parameters_is_refused(run, around):
  """The others would differ between replicas, without a word."""
  tx = run(optax.sgd(0.1)).tx
  if around == "partition":
    labels = {"b": "own", "w": "shared"}
    whole = optax.partition({"own": optax.sgd(0.1), "shared": tx}, labels)
  else:
    whole = optax.masked(tx, {"b": False, "w": True})
  if around == "named_chain":
    whole = optax.named_chain(("some", whole), ("all", optax.identity()))
  with pytest.raises(ValueError, match=r"optax\.partition"):
    whole.init(initial())


@jit
def test_an_edit_of_the_trainers_optimizer_state_is_refused(run, jit):
  opt = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
  k_of_n = run(opt, total_steps=20)
  trainer = Trainer(k_of_n.tx, jit)

  def batches():
    for number, batch in enumerate(numbers(100)):
      if number == 2:
        inner = trainer.opt_state.inner
        inner.hyperparams["learning_rate"] = jnp.asarray(0.25)
      yield batch

  with pytest.raises(ValueError, match="set_hyperparams"):
    trainer.train(k_of_n.until_finished(batches()))


@jit
def test_a_trainers_rate_is_set_by_the_replica(run, jit):
  opt = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
  k_of_n = run(opt, total_steps=3)
  trainer = Trainer(k_of_n.tx, jit)

  def batches():
    for number, batch in enumerate(numbers(100)):
      if number == 2:
        k_of_n.replica.set_hyperparams(learning_rate=0.25)
      yield batch

  trainer.train(k_of_n.until_finished(batches()))
  wanted = initial()
  for batch, rate in enumerate([0.5, 0.5, 0.25]):
    grads = gradient(wanted, jnp.float32(batch))
    wanted = jax.tree.map(lambda p, g, r=rate: p - r * g, wanted, grads)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5)
  jax.tree.map(close, trainer.params, wanted)
  assert trainer.opt_state.inner.hyperparams["learning_rate"] == 0.25


@jit
def test_averages_of_parameters_are_in_the_trainers_state(run, jit):
  opt = optax.chain(optax.sgd(0.5), optax_dist.params_ema(0.5))
  k_of_n = run(opt, total_steps=2)
  trainer = Trainer(k_of_n.tx, jit)
  trainer.train(k_of_n.until_finished(numbers(100)))
  wanted = average = initial()
  for batch in range(2):
    grads = gradient(wanted, jnp.float32(batch))
    wanted = jax.tree.map(lambda p, g: p - 0.5 * g, wanted, grads)
    average = jax.tree.map(lambda a, p: (a + p) / 2, average, wanted)
  result = optax_dist.averaged_params(trainer.opt_state, trainer.params)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5)
  jax.tree.map(close, result, average)
  with pytest.raises(TypeError, match=r"as_optimizer has no .*params_ema"):
    run(optax.sgd(0.1), variable_averages=True)


def test_scaling_after_the_coordinated_optimizer_is_refused(run):
  k_of_n = run(optax.sgd(0.1))
  trainer = Trainer(optax.chain(k_of_n.tx, optax.scale(0.5)))
  with pytest.raises(ValueError, match="Make it the last one of the chain"):
    trainer.train(k_of_n.until_finished(numbers(100)))


def test_transforms_before_it_in_a_chain_change_the_gradient(run):
  k_of_n = run(optax.sgd(1.0), total_steps=1)
  clip = optax.clip_by_global_norm(1e-3)
  trainer = Trainer(optax.chain(clip, k_of_n.tx))
  before = trainer.params["w"] + 0
  trainer.train(k_of_n.until_finished(numbers(100)))
  assert 0 < np.abs(before - trainer.params["w"]).max() < 1.1e-3


def test_errors_under_jit_keep_their_type_and_cause(run, monkeypatch):
  error = ZeroDivisionError("the original")

  def fails(self, grads):
    raise error from KeyError("its cause")

  k_of_n = run(optax.sgd(0.1))
  trainer = Trainer(k_of_n.tx)
  trainer.step(0)
  kept = bits(trainer.params)
  monkeypatch.setattr(Replica, "step", fails)
  with pytest.raises(ZeroDivisionError) as raised:
    trainer.train(k_of_n.until_finished(numbers(100)))
  assert raised.value is error
  assert isinstance(raised.value.__cause__, KeyError)
  # The trainer has what it had before.
  assert bits(trainer.params) == kept
  assert trainer.opt_state.step == 1


def test_gradients_that_are_never_finite_end_the_run_and_say_so(run):
  k_of_n = run(optax.sgd(0.1), timeout=2.0)
  trainer = Trainer(k_of_n.tx)
  with pytest.raises(coordinator.CoordinatorError) as raised:
    trainer.train(k_of_n.until_finished(itertools.repeat(np.float32("nan"))))
  assert re.match(
    r"Step 0 made no progress for .* s: replica 0 delivered \d+ gradients that are"
    r" not finite",
    str(raised.value),
  )


def test_errors_of_joining_leave_the_trainers_state_alone(run):
  k_of_n = run(optax.adam(0.1), secret="not the secret of it", timeout=3.0)
  trainer = Trainer(k_of_n.tx)
  kept = bits((trainer.params, trainer.opt_state.inner))
  with pytest.raises(coordinator.CoordinatorError):
    trainer.train(k_of_n.until_finished(numbers(100)))
  assert bits((trainer.params, trainer.opt_state.inner)) == kept


def test_a_replica_whose_update_fails_without_until_finished_is_lost_at_once(
  run, monkeypatch, tmp_path
):
  """Its program may catch the error and go on, and takes no step any more."""
  path = tmp_path / "journal.jsonl"
  k_of_n = run(optax.sgd(0.1), journal=path)
  trainer = Trainer(k_of_n.tx)
  trainer.step(0)
  monkeypatch.setattr(Replica, "step", lambda self, grads: 1 / 0)
  with pytest.raises(Exception, match="ZeroDivisionError"):
    trainer.step(1)
  lost = lambda: [r for r in run_journals.whole(path) if r["kind"] == "lost"]
  (record,) = waiting.until(lost)
  assert "it has raised ZeroDivisionError" in record["reason"]


def test_replica_leaves_once_it_has_no_more_batches(run, caplog):
  k_of_n = run(optax.sgd(0.1))
  trainer = Trainer(k_of_n.tx)
  trainer.train(k_of_n.until_finished(numbers(3)))
  assert k_of_n.replica.has_left
  assert trainer.opt_state.step == 3
  assert re.search(r"no more batches at step 3 of \d+, so this", caplog.text)


def test_numbers_of_the_state_share_no_buffer(run):
  state = run(optax.sgd(0.1)).tx.init(initial())
  pointers = [x.unsafe_buffer_pointer() for x in state[:4]]
  assert len(set(pointers)) == 4


@pytest.mark.parametrize(
  ("options", "named"),
  [
    ({"strategy": coordinator.elastic_average(moving_rate=0.1)}, "strategy="),
    ({"strategy": coordinator.local_updates()}, "strategy="),
    ({"strategy": coordinator.decoupled_diloco(fragments=2)}, "strategy="),
    ({"data": coordinator.Batches(8, 4)}, "data="),
    ({"max_staleness": 2}, "max_staleness="),
    ({"global_step": 2}, "global_step="),
    ({"on_sigterm": "save"}, "on_sigterm='save'.*no Outcome to save at"),
  ],
  ids=["elastic", "local", "diloco", "data", "stale", "step", "sigterm"],
)
def test_calls_that_a_trainer_cannot_make_are_refused_by_name(options, named):
  with pytest.raises(ValueError, match=named) as raised:
    coordinator.as_optimizer(optax.sgd(0.1), total_steps=1, **options)
  assert "coordinator.join and Replica.step" in str(raised.value)


def test_the_page_names_each_option_that_is_refused():
  page = pathlib.Path(__file__).parents[2] / "docs" / "any_trainer.md"
  table = page.read_text("utf-8").split("## What is refused")[1]
  named = set(re.findall(r"`(\w+)=`", table.split("\n\n")[1]))
  known = {*inspect.signature(coordinator.join).parameters, "max_skipped"}
  refused = set()
  for name in known:
    try:
      coordinator.as_optimizer(optax.sgd(0.1), total_steps=1, **{name: "x"})
    except (TypeError, ValueError) as error:
      if "can't use" in str(error):
        refused.add(name)
  assert named == refused


def test_a_replica_of_several_processes_is_refused(monkeypatch):
  monkeypatch.setattr(processes.Processes, "count", 2)
  with pytest.raises(ValueError, match="replicas of one process"):
    coordinator.as_optimizer(optax.sgd(0.1), total_steps=1)


def test_the_update_needs_parameters(run):
  tx = run(optax.sgd(0.1)).tx
  with pytest.raises(ValueError, match="needs the parameters"):
    tx.update(initial(), tx.init(initial()))


@dtypes
def test_every_step_can_be_expressed_as_an_addition(dtype):
  rng = np.random.default_rng(0)
  # Parameters of all sizes, many of which change their sign.
  size = 10.0 ** rng.uniform(-6, 0, 100_000)
  p = [jnp.asarray(rng.normal(size=size.size) * size, dtype)]
  g = [jnp.asarray(rng.normal(size=size.size), dtype)]

  def unreachable(optimizer):
    # Only optimized kernels fuse the multiplication and the addition.
    @functools.partial(jax.jit, compiler_options=compiling.OPTIMIZED)
    def step(p, g):
      updates, _ = optimizer.update(g, optimizer.init(p), p)
      return optax.apply_updates(p, updates)

    q = step(p, g)
    move = jax.jit(any_trainer._move)(p[0], q[0])
    return int(jnp.sum(p[0] + move != q[0]))

  adam = optax.adam(1e-2)
  structure = jax.tree.structure(p)
  assert unreachable(any_trainer._reachable(adam, structure)) == 0
  if dtype == "float32":
    assert unreachable(adam) > 0


def program(text, **variables):
  """Runs a program of this page; returns what it prints, and its errors."""
  done = subprocess.run(
    [sys.executable, "-c", _PROGRAM + text],
    env=os.environ | {"JAX_PLATFORMS": "cpu"} | variables,
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
    timeout=120,
  )
  return done.returncode, done.stdout, done.stderr


_PROGRAM = """
import os, signal, sys
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec as P
from optax_dist import coordinator
from optax_dist.coordinator.transport import addresses

k_of_n = coordinator.as_optimizer(
  optax.adam(0.1), total_steps=10, replica=0, total_num_replicas=1,
  coordinator_address=f"127.0.0.1:{addresses.free_ports()[0]}")
tx = k_of_n.tx
mesh = jax.make_mesh((jax.device_count(),), ("d",))
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
params = {"v": put(np.ones(1 << 18, np.float32)),
          "w": put(np.ones((4, 6), np.float32), "d")}
x = put(np.arange(32, dtype=np.float32).reshape(8, 4) / 32, "d")
state = tx.init(params)
loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2) + jnp.mean(p["v"] ** 2)
gradient = jax.jit(jax.grad(loss))

def update(params, state, grads):
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state

whole = jax.jit(lambda p, s, x: update(p, s, jax.grad(loss)(p, x)))
parts = lambda p, s, x: update(p, s, gradient(p, x))

def train(step, batches):
  global params, state
  for batch in batches:
    params, state = step(params, state, x)
  same = coordinator.fingerprint(params) == (
    coordinator.fingerprint(k_of_n.replica.params))
  print("step", state.step, "equal", same, params["w"].sharding.spec)
"""


def test_two_devices_under_jit_are_refused_with_the_way_that_works():
  text = "train(whole, k_of_n.until_finished([1] * 20))"
  code, printed, errors = program(text, JAX_NUM_CPU_DEVICES="2")
  assert code == 1
  assert not printed
  assert "This process has 2 cpu devices" in errors
  assert "Compute the gradient under jit, and call update() outside" in errors
  # It is true, and sharded parameters stay so.
  outside = "train(parts, k_of_n.until_finished([1] * 20))"
  code, printed, errors = program(outside, JAX_NUM_CPU_DEVICES="2")
  assert printed.startswith("step 10 equal True P"), errors
  assert "'d'" in printed


def test_a_program_that_fails_in_its_loop_ends_at_once():
  text = """
for batch in k_of_n.until_finished(range(20)):
  params, state = whole(params, state, x)
  if batch == 3: raise ZeroDivisionError
"""
  code, _, errors = program(text, JAX_NUM_CPU_DEVICES="1")
  assert code == 1
  assert errors.rstrip().endswith("ZeroDivisionError")


@pytest.mark.parametrize("where", ["loop", "batches"])
def test_replica_whose_program_fails_counts_as_lost(where, tmp_path):
  """If it left, the run would end well without the others, or take fewer gradients."""
  text = f"""
def batches():
  yield from range(3)
  if {where!r} == "batches": raise ZeroDivisionError("its loader")
  yield 3
k_of_n._options["journal"] = {str(tmp_path / "journal.jsonl")!r}
for batch in k_of_n.until_finished(batches()):
  params, state = whole(params, state, x)
  if batch == 3: raise ZeroDivisionError("its loop")
"""
  code, _, errors = program(text, JAX_NUM_CPU_DEVICES="1")
  assert code == 1
  path = tmp_path / "journal.jsonl"
  ends = lambda: [
    record
    for record in run_journals.whole(path)
    if record["kind"] in ("lost", "leave", "finish")
  ]
  waiting.until(ends)
  assert ends()[0]["kind"] == "lost", errors
  assert "it has raised ZeroDivisionError('its " in ends()[0]["reason"]


def test_on_sigterm_the_replica_leaves_after_its_step():
  text = """
def batches():
  for i in range(20):
    if i == 5: os.kill(os.getpid(), signal.SIGTERM)
    yield i
train(whole, k_of_n.until_finished(batches()))
print("left", k_of_n.replica.has_left)
"""
  code, printed, errors = program(text, JAX_NUM_CPU_DEVICES="1")
  assert code == 0, errors
  assert printed.startswith("step 6 equal True")
  assert printed.endswith("left True\n")


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_replica_that_waits_for_others(number):
  """The others would wait for them until the timeout."""
  text = f"""
import threading, time

k_of_n = coordinator.as_optimizer(
  optax.sgd(0.1), total_steps=10, replica=0, total_num_replicas=2,
  coordinator_address=f"127.0.0.1:{{addresses.free_ports()[0]}}")
tx = k_of_n.tx
state = tx.init(params)

def interrupt():
  while k_of_n.replica is None or k_of_n.replica._participant.submission.pending < 0:
    time.sleep(0.01)
  os.kill(os.getpid(), signal.{number})

threading.Thread(target=interrupt).start()
train(parts, k_of_n.until_finished(range(20)))
print("left", k_of_n.replica.has_left)
"""
  variables = {"JAX_NUM_CPU_DEVICES": "1", "OPTAX_DIST_GRACE": "1"}
  code, printed, errors = program(text, **variables)
  if number == "SIGTERM":
    assert (code, printed.splitlines()[-1:]) == (0, ["left True"]), errors
  else:
    assert code != 0
    assert errors.rstrip().endswith("KeyboardInterrupt")
