"""Tests of what replicas must agree on, independent of how trees print."""

import time

import embedded_runs as runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist import coordinator, ledger
from optax_dist.coordinator import journal, options, strategies
from optax_dist.coordinator.protocol import codec, messages
from optax_dist.coordinator.runtime import agreement, endpoint
from optax_dist.coordinator.server import driver

_SGD = optax.sgd(0.1)


def agreed(
  opt=_SGD, params=runs.PARAMS, k=2, inner=None, data=None, **settings
):
  strategy = strategies.SyncReplicas(opt, strategies.Quorum(k, 2))
  chosen = options.Options(**settings)
  return dict(
    agreement.agreement(
      strategy, strategy.shared(params), params, chosen, data, inner=inner
    )
  )


def test_differing_values_have_different_digests():
  ours = agreed(wire="bfloat16")
  assert agreed(wire="bfloat16") == ours
  for name, other in {
    "parameters": agreed(params={"b": jnp.zeros(3), "w": jnp.ones((5, 30))}),
    "strategy's numbers": agreed(k=1),
    "optimizer state": agreed(opt=optax.sgd(0.1, momentum=0.9)),
    "inner optimizer's state": agreed(inner=optax.adam(0.1).init(runs.PARAMS)),
    "optimizer": agreed(opt=optax.sgd(0.2)),
    "wire": agreed(wire="int8"),
    "inline_bytes": agreed(inline_bytes=0),
    "fingerprint_every": agreed(fingerprint_every=3),
    "data": agreed(data=ledger.Batches(num_samples=12, global_batch=4)),
  }.items():
    assert name in [n for n in ours if ours[n] != other[n]]


def times(x, constant):
  if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
    return x * jax.random.uniform(constant)
  return x * jnp.sum(constant).astype(x.dtype)


# How an update may use an array that it closes over.
USES = {
  "plain": times,
  "jit": lambda x, constant: jax.jit(lambda x: times(x, constant))(x),
  "cond": lambda x, constant: jax.lax.cond(
    x.sum() > 0, jax.jit(lambda x: times(x, constant)), jnp.sin, x
  ),
  "scan": lambda x, constant: jax.lax.scan(
    lambda x, _: (jax.jit(lambda x: times(x, constant))(x), None), x, length=2
  )[0],
  "checkpoint": lambda x, constant: jax.checkpoint(
    jax.jit(lambda x: times(x, constant))
  )(x),
}


def updated_by(use, constant):
  return optax.stateless_with_tree_map(lambda x, _: USES[use](x, constant))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
  "make",
  [
    lambda number: jnp.full(3, number),
    lambda number: jnp.float32(number),
    lambda number: np.full(3, number, np.float32),
    lambda number: jnp.full(3, number, jnp.bfloat16),
    lambda number: jnp.full((2, 3), number, jnp.int32),
    lambda number: jax.random.key(number),
  ],
  ids=["float32", "scalar", "NumPy", "bfloat16", "int32", "key"],
)
def test_comparison_of_optimizers_includes_arrays_in_closures(use, make):
  ours, same, other = (
    agreed(opt=updated_by(use, make(number))) for number in (2, 2, 3)
  )
  assert ours == same
  assert ours.pop("optimizer") != other.pop("optimizer")
  assert ours == other


@jax.tree_util.register_pytree_with_keys_class
class Module:
  """Like a flax nnx Module: its structure prints an address."""

  def __init__(self, w, meta=None):
    self.w, self.meta = w, meta or object()

  def tree_flatten_with_keys(self):
    return [(jax.tree_util.GetAttrKey("w"), self.w)], (Metadata(self.meta),)

  def tree_flatten(self):
    return [self.w], (Metadata(self.meta),)

  @classmethod
  def tree_unflatten(cls, aux, children):
    return cls(*children, aux[0].meta)


class Metadata:
  def __init__(self, meta):
    self.meta = meta

  def __eq__(self, other):
    return isinstance(other, Metadata)

  def __hash__(self):
    return 0

  def __repr__(self):
    return f"<Metadata at {id(self.meta):#x}>"


def test_structures_that_print_addresses_agree():
  one, two = (Module(jnp.ones(3)) for _ in range(2))
  assert str(jax.tree.structure(one)) != str(jax.tree.structure(two))
  assert agreed(params=one) == agreed(params=two)


def test_a_replica_with_other_settings_is_refused_by_name(caplog):
  before = runs.coordinator_threads(timeout=0.0)
  with (
    endpoint.World() as world,
    runs.make(world, 0, k=1, n=2).start() as first,
  ):
    other = runs.make(world, 1, k=1, n=2, opt=optax.sgd(0.2))
    with pytest.raises(coordinator.JoinRefused, match="its optimizer"):
      other.start()
    assert first.step(runs.PARAMS).accepted
  # The job's side says it, too.
  assert "replica 1 may not join: it differs in its optimizer" in caplog.text
  assert not runs.coordinator_threads(before)


def _end(results, *some):
  """Starts these, and waits until all have ended."""
  threads = []
  for one, result in zip(some, results, strict=True):
    threads.append(runs.start(one, runs.to_step(3), result))
    time.sleep(0.3)  # So that the first replica calls first.
  runs.finish(threads)
  return [type(result.error) for result in results]


def test_replica_that_differs_from_the_majority_is_refused(caplog, tmp_path):
  """The first replica differs: it is named, and ends at once."""
  options = {"k": 3, "n": 3}
  results = [runs.Result() for _ in range(4)]
  with endpoint.World() as world:
    wrong, *right = (
      runs.make(
        world,
        i,
        opt=None if i else optax.sgd(0.2),
        journal=str(tmp_path / ("right" if i else "wrong")),
        **options,
      )
      for i in range(3)
    )
    threads = []
    for one, result in zip([wrong, *right], results, strict=False):
      threads.append(runs.start(one, runs.to_step(3), result))
      time.sleep(0.3)
    threads[0].join(60.0)
    assert isinstance(results[0].error, coordinator.JoinRefused)
    assert "it differs in its optimizer" in str(results[0].error)
    # The others wait for a third.
    assert [one.error for one in results[1:]] == [None] * 3
    again = runs.make(world, 0, **options)
    threads.append(runs.start(again, runs.to_step(3), results[3]))
    runs.finish(threads)
  assert [one.error for one in results[1:]] == [None] * 3
  assert len({one.prints[3] for one in results[1:]}) == 1
  said = "replica 0 may not join: it differs in its optimizer"
  assert said in caplog.text
  records = journal.read(tmp_path / "right").records
  assert records[-1]["kind"] != "run"
  assert [r["step"] for r in records if r["kind"] == "commit"] == [0, 1, 2]


def test_coordinator_of_another_version_refuses_the_call(
  monkeypatch,
):
  other = codec.Codec(messages.Rejected | messages.SubmitGradient)
  monkeypatch.setattr(driver, "MESSAGES", other)
  result = runs.Result()
  with endpoint.World() as world:
    assert _end([result], runs.make(world, 0, k=1, n=1)) == [
      coordinator.JoinRefused
    ]
  assert "has another version of optax_dist" in str(result.error)


def test_unreadable_answer_means_another_version(
  monkeypatch,
):
  class Welcome(messages.Welcome, tag="Welcome"):
    more: int = 3

  class Codec:
    decode = messages.MESSAGES.decode

    def encode(self, message):
      if isinstance(message, messages.Welcome):
        message = Welcome(
          *(getattr(message, x) for x in Welcome.__struct_fields__[:-1])
        )
      return messages.MESSAGES.encode(message)

  monkeypatch.setattr(driver, "MESSAGES", Codec())
  result = runs.Result()
  with endpoint.World() as world:
    assert _end([result], runs.make(world, 0, k=1, n=1)) == [
      coordinator.JoinRefused
    ]
  assert "its answer can't be read" in str(result.error)


@pytest.mark.parametrize(
  ("module", "name"), [(optax_dist, "optax_dist"), (agreement.jax, "JAX")]
)
def test_another_version_of_a_package_is_refused_by_name(
  monkeypatch, module, name
):
  world = endpoint.World()
  first = runs.make(world, 0, k=1, n=2)
  with first.start():
    monkeypatch.setattr(module, "__version__", "9.9.9")
    other = runs.make(world, 1, k=1, n=2)
    words = rf"its version of {name}: it has '9\.9\.9', the job '0\."
    with pytest.raises(coordinator.JoinRefused, match=words):
      other.start()
    # The members continue.
    assert first.step(runs.PARAMS).accepted


def test_another_version_of_optax_may_join(monkeypatch):
  """The comparison is of what the optimizer computes, not of its name."""
  world = endpoint.World()
  with runs.make(world, 0, k=1, n=2).start() as first:
    monkeypatch.setattr(optax, "__version__", "9.9.9")
    with runs.make(world, 1, k=1, n=2).start():
      assert first.step(runs.PARAMS).accepted
