"""A replica that computes other bits is refused with the reason."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import coordinator, ledger
from optax_dist.coordinator.data import micro_batches, probe
from optax_dist.coordinator.protocol import entries
from optax_dist.coordinator.protocol.coordinator import comparison
from optax_dist.coordinator.server import process

PARAMS = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4)}
DATA = ledger.Batches(8, 4, micro_batch=2, deterministic=True)
_JOINS = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
from optax_dist import coordinator

batch, width = map(int, sys.argv[3:])
shapes = {"in": (width, width), "middle": (width, width), "out": (width, 10)}
params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
data = coordinator.Batches(
  4 * batch, 4 * batch, micro_batch=batch, deterministic=True
)
numbers = np.random.default_rng(0).normal(size=(4 * batch, width)).astype("f")

@jax.jit
@jax.grad
def gradient(params, x):
  x = jnp.tanh(jnp.tanh(x @ params["in"]) @ params["middle"])
  return jnp.mean((x @ params["out"]) ** 2)

probe = lambda params, slot: gradient(params, numbers[slot.indices])
try:
  replica = coordinator.join(
    optax.sgd(0.1), params, data=data, probe=probe, start_coordinator=False,
    coordinator_address=sys.argv[1], replica=int(sys.argv[2]),
    total_num_replicas=2, timeout=60.0,
  )
  print("joined", flush=True)
  sys.stdin.read()
  replica.close()
except coordinator.JoinRefused as error:
  print("refused:", error, flush=True)
"""


def joins(address, replica, size, threads):
  return subprocess.Popen(
    [sys.executable, "-c", _JOINS, address, str(replica), *map(str, size)],
    env={
      **os.environ,
      "NPROC": str(threads),
      "JAX_PLATFORMS": "cpu",
      "JAX_NUM_CPU_DEVICES": "1",
      "XLA_FLAGS": "",
    },
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )


@pytest.mark.parametrize(
  ("size", "words"),
  # By the size of a product XLA decides whether to cut it for its threads.
  [((256, 256), "refused"), ((8, 32), "joined")],
)
def test_another_number_of_threads_is_refused_where_it_changes_bits(
  size, words
):
  with process.start(b"", port=0) as place:
    both = [joins(place.address, 0, size, threads=2)]
    try:
      assert both[0].stdout.readline() == "joined\n"
      both.append(joins(place.address, 1, size, threads=4))
      said = both[1].stdout.readline()
      assert said.startswith(words)
      if words == "refused":
        assert "it differs in its gradient of a probe" in said
        assert "NPROC=4" in said
        assert "NPROC=2" in said
        assert "jaxlib" in said
    finally:
      for one in both:
        one.kill()
        one.communicate()


def test_description_of_the_hardware_does_not_refuse_a_replica():
  text = probe.result(
    lambda params, slot: params,
    PARAMS,
    micro_batches.Slots(DATA)(((0, 2),)),
    lambda params, grads: grads,
  )
  digest, about = text.split("\n")
  job = lambda text: entries.Job((("probe", text),), entries.Rules())
  ours = job(text)
  assert comparison.difference(ours, job(f"{digest}\nelsewhere")) == ""
  result = comparison.difference(ours, job("0\nelsewhere"))
  assert "it has '0' (elsewhere)" in result
  assert about[:100] in result


def result(probed, params=PARAMS, slot=((0, 2),)):
  made = micro_batches.Slots(DATA)(slot)
  return probe.result(probed, params, made, lambda p, grads: grads)


def test_a_digest_depends_on_every_bit_and_not_on_the_parameters():
  twice = lambda params, slot: jax.tree.map(lambda x: 2 * x, params)
  other = jax.tree.map(lambda x: x + 1, PARAMS)
  assert result(twice) == result(twice, other)

  def one_bit(params, slot):
    results = jax.tree.map(np.array, twice(params, slot))
    results["w"].view(np.uint32)[2, 3] ^= 1
    return results

  assert result(one_bit) != result(twice)
  # Another default generator gives other keys.
  assert result(twice, slot=((2, 4),)) != result(twice)


@pytest.mark.parametrize(
  ("names", "words"),
  [("b", r"in grads\['b'\]\. "), ("abcd", r"grads\['c'\] and others\. ")],
)
def test_a_gradient_that_differs_from_call_to_call_is_refused(names, words):
  numbers = np.random.default_rng(0)

  def probed(params, slot):
    drawn = {name: numbers.normal(size=3) for name in names}
    return {"same": np.ones(3), **drawn}

  with pytest.raises(ValueError, match=words) as error:
    result(probed)
  assert "same" not in str(error.value)
  assert "--xla_gpu_deterministic_ops=true" in str(error.value)


def test_parameters_of_a_probe_follow_from_shapes_and_dtypes():
  like = {"a": jnp.ones((64, 32), jnp.bfloat16), "b": jnp.zeros(16)}
  result = probe.params_like(like)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), result) == jax.tree.map(
    lambda x: (x.shape, x.dtype), like
  )
  again = probe.params_like(jax.tree.map(jnp.zeros_like, like))
  jax.tree.map(np.testing.assert_array_equal, result, again)
  assert 0.05 < float(jnp.std(result["a"].astype(jnp.float32))) < 0.1


@pytest.mark.parametrize(
  ("options", "error", "words"),
  [
    ({"data": DATA}, ValueError, "deterministic data needs probe="),
    ({"data": DATA, "probe": 3}, TypeError, "must be a function or None"),
    ({"probe": lambda params, slot: params}, ValueError, "is for data="),
  ],
)
def test_probe_requires_deterministic_data(options, error, words):
  with pytest.raises(error, match=words):
    coordinator.join(optax.sgd(0.1), PARAMS, **options)
