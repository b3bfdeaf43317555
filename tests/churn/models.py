"""The two models of churn runs: what they train on, and their gradients."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist import ledger
from tests.runs import models

MODELS = ("digits", "transformer")
MICRO_BATCH = 4  # Samples.
_SAMPLES = 300
# Of the transformer.
_LENGTH, WIDTH, _HEAD = 12, 16, 8
_DROPOUT = 0.2


@functools.cache
def model(setting: Any) -> models.Model:
  """The model of a `plans.Setting`, traced but not compiled.

  Its gradient is that of a slot, which must have the samples that are due.
  """
  digits = setting.model == "digits"
  params, samples, loss = _digits() if digits else _transformer(setting.width)
  params = jax.tree.map(lambda x: x.astype(jnp.dtype(setting.dtype)), params)
  gradient = jax.jit(jax.grad(loss))
  few = jax.tree.map(lambda x: x[:MICRO_BATCH], samples)
  # Processes that are forked from this one have it then.
  gradient.trace(params, few, jax.eval_shape(jax.random.key, 0))
  data = setting.data

  def of_slot(params: Any, number: int, slot: Any) -> Any:
    first = slot.step * data.global_batch + slot.number * MICRO_BATCH
    due = data.indices(((first, first + MICRO_BATCH),))
    if not np.array_equal(slot.indices, due):
      raise AssertionError(f"slot {slot} has other samples")
    return gradient(params, ledger.read(samples, slot.indices), slot.key)

  # Clipping depends on all of the mean, Adam on all means before.
  opt = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))
  return models.Model(opt, params, of_slot)


def _normal(key: int, *shape: int) -> np.ndarray:
  numbers = np.random.default_rng(key).normal(size=shape) / np.sqrt(shape[0])
  return numbers.astype(np.float32)


def _digits() -> tuple[Any, Any, Any]:
  # Without the import of scikit-learn, which takes seconds in each process.
  spec = importlib.util.find_spec("sklearn")
  assert spec is not None
  assert spec.submodule_search_locations is not None
  folder = pathlib.Path(spec.submodule_search_locations[0])
  digits = folder / "datasets/data/digits.csv.gz"
  table = np.loadtxt(digits, delimiter=",", max_rows=_SAMPLES)
  samples = {
    "images": (table[:, :-1] / 16).astype(np.float32),
    "labels": table[:, -1].astype(np.int32),
  }
  params = {
    "in": _normal(1, 64, 48),
    "middle": np.zeros(48, np.float32),
    "out": _normal(2, 48, 10),
  }

  def loss(params: Any, samples: Any, key: jax.Array) -> jax.Array:
    noise = 0.1 * jax.random.normal(key, samples["images"].shape)
    hidden = (samples["images"] + noise).astype(params["in"].dtype)
    hidden = jax.nn.gelu(hidden @ params["in"] + params["middle"])
    return _cross_entropy(hidden @ params["out"], samples["labels"])

  return params, samples, loss


def _transformer(width: int) -> tuple[Any, Any, Any]:
  """Sums of two numbers modulo 10, with dropout in two places."""
  rng = np.random.default_rng(0)
  texts = rng.integers(0, 10, (_SAMPLES, _LENGTH), np.int32)
  labels = texts.sum(1, dtype=np.int32) % 10
  params = {
    "embedding": _normal(1, 10, width),
    "position": _normal(2, _LENGTH, width),
    "qkv": _normal(3, width, 3 * width),
    "project": _normal(4, width, width),
    "up": _normal(5, width, 2 * width),
    "down": _normal(6, 2 * width, width),
    "out": _normal(7, width, 10),
  }

  def loss(params: Any, samples: Any, key: jax.Array) -> jax.Array:
    first, second = jax.random.split(key)
    x = params["embedding"][samples["texts"]] + params["position"]
    split = (*x.shape[:2], 3, width // _HEAD, _HEAD)
    q, k, v = jnp.moveaxis((_norm(x) @ params["qkv"]).reshape(split), 2, 0)
    seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x += _drop(first, seen.reshape(x.shape)) @ params["project"]
    x += _drop(second, jax.nn.gelu(_norm(x) @ params["up"])) @ params["down"]
    return _cross_entropy(_norm(x[:, -1]) @ params["out"], samples["labels"])

  return params, {"texts": texts, "labels": labels}, loss


def _norm(x: jax.Array) -> jax.Array:
  return jax.nn.standardize(x, axis=-1)


def _drop(key: jax.Array, x: jax.Array) -> jax.Array:
  kept = jax.random.bernoulli(key, 1 - _DROPOUT, x.shape)
  return jnp.where(kept, x / (1 - _DROPOUT), 0).astype(x.dtype)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits.astype(jnp.float32), labels
  )
  return losses.mean()
