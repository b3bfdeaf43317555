"""What replicas must have in common to train one model."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import jax

from optax_dist.coordinator import policies


def spec(
  policy: policies.Policy, shared: Any, params: Any, wire: str
) -> dict[str, str]:
  """What replicas must have in common, by name, in texts to compare.

  The optimizer is compared by what its update computes, numbers included.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  shapes = ", ".join(
    f"{jax.tree_util.keystr(path) or 'params'}: {x.dtype}{list(x.shape)}"
    for path, x in leaves
  )
  mean = jax.eval_shape(lambda x: x, params)
  program = str(jax.make_jaxpr(policy.apply)(shared, mean))
  # Addresses of functions differ between processes.
  program = re.sub(r"0x[0-9a-f]+", "0x", program)
  state = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", shared)
  return {
    "parameters": shapes if len(shapes) < 2000 else _digest(shapes),
    "policy": f"{policy.name} {tuple(policy.quorum)}",
    "optimizer state": _digest(str(state)),
    "optimizer": _digest(program),
    "wire": wire,
  }


def difference(ours: dict[str, str], theirs: Any) -> str:
  """Names what differs between two specs; "" if nothing does."""
  for name, text in ours.items():
    other = theirs.get(name) if isinstance(theirs, dict) else None
    if other != text:
      return f"its {name} differ: it has {other!r:.300}, the job {text!r:.300}"
  return ""


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:16]
