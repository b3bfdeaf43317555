"""Whether two replicas compute the same bits: both compute one micro-batch.

Equal programs may give different bits: another processor or jaxlib, another number
of threads (NPROC) or devices, other flags. Deterministic data is worthless then,
and nobody would notice. So each replica computes the gradient of the first
micro-batch, on parameters that follow from shapes and dtypes alone, and the update
by it; a replica with other bits is refused when it joins. It computes the gradient
twice: a program that adds in another order each time suits no job. Equal bits here
are evidence that replicas are equal, not proof.
"""

from __future__ import annotations

import hashlib
import math
import os
import pathlib
import platform
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jaxlib
import numpy as np

from optax_dist.coordinator._internal.fingerprints import fingerprint
from optax_dist.coordinator.data.micro_batches import Slot
from optax_dist.coordinator.runtime import trees

# Computes the gradient of a micro-batch, with the training loop's own program.
Probe: TypeAlias = Callable[[Any, Slot], Any]


def params_like(params: Any) -> Any:
  """Pseudo-random numbers in place of parameters, with their shardings.

  They depend on shapes and dtypes alone, and are about as large as a layer's
  initial weights.

  Example:
    >>> [round(float(x), 3) for x in params_like(jax.numpy.ones(3))]
    [0.806, -0.865, 0.345]
  """
  bits = np.random.PCG64(31)  # Its bits stay the same over versions of NumPy.

  def like(leaf: jax.Array) -> jax.Array:
    fan_in = leaf.size // leaf.shape[-1] if leaf.ndim > 1 else 1
    raw = bits.random_raw(leaf.size) >> np.uint64(40)
    numbers = raw.astype(np.float32) / np.float32(2**23) - np.float32(1)
    numbers *= np.float32(math.sqrt(1 / max(1, fan_in)))
    array = numbers.reshape(leaf.shape).astype(leaf.dtype)
    return trees.placed_like(array, leaf)

  return jax.tree.map(like, params)


def result(
  probe: Probe, params: Any, slot: Slot, update: Callable[[Any, Any], Any]
) -> str:
  """A digest of a gradient and its update; then the hardware and software, as text.

  Only the first line is compared; the others are for people.

  Args:
    probe: computes a gradient.
    params: the parameters of the run, for their shapes and dtypes.
    slot: the micro-batch.
    update: the parameters and a gradient to the state after a step.

  Raises:
    ValueError: the gradient differs from call to call, or has other shapes or
      dtypes than the parameters.
  """
  start = params_like(params)
  # Digests, since memory may not hold a second gradient beside the first.
  first = _digests(probe(start, slot))
  grads = probe(start, slot)
  differ = sorted({name for name, _ in first ^ _digests(grads)})
  if differ:
    raise ValueError(
      "probe= returned two gradients for one micro-batch, which differ in"
      f" {', '.join(differ[:3])}{' and others' if len(differ) > 3 else ''}."
      " Deterministic data needs a gradient that depends on parameters and slot"
      " alone. On a GPU some kernels add in another order each time; start with"
      " --xla_gpu_deterministic_ops=true in XLA_FLAGS to go without those."
    )
  after = update(start, grads)
  words = [fingerprint(part) for part in (slot.key, grads, after, _denormal())]
  digest = hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]
  return f"{digest}\n{about(params)}"


def _digests(grads: Any) -> set[tuple[str, str]]:
  """The name and the digest of each leaf."""
  return {
    (f"grads{jax.tree_util.keystr(path)}", fingerprint(leaf))
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
  }


def _denormal() -> np.ndarray:
  """A sum in NumPy, 0.0 where a library has denormals flushed to zero."""
  least = np.full(16, 1e-45, np.float32)
  return least + least


def about(params: Any) -> str:
  """The hardware and software that compute gradients, human-readable."""
  meshes = {str(leaf.sharding) for leaf in jax.tree.leaves(params)}
  device = jax.local_devices()[0]
  return ", ".join(
    [
      f"jaxlib {jaxlib.__version__}",
      _processor(),
      f"{jax.local_device_count()} x {device.device_kind}",
      f"{cores()} cores",
      f"NPROC={os.environ.get('NPROC')}",
      f"XLA_FLAGS={os.environ.get('XLA_FLAGS')}",
      " and ".join(sorted(meshes)),
    ]
  )


def cores() -> int | None:
  """The number of cores this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count()


def _processor() -> str:
  try:
    text = pathlib.Path("/proc/cpuinfo").read_text()
  except OSError:
    return platform.processor() or platform.machine()
  names = [li.split(":")[1] for li in text.splitlines() if "model name" in li]
  return names[0].strip() if names else platform.machine()
