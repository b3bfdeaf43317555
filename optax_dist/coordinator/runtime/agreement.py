"""The properties on which replicas must agree to train one model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core

import optax_dist
from optax_dist import ledger
from optax_dist.coordinator import options, strategies
from optax_dist.coordinator._internal.fingerprints import fingerprint
from optax_dist.coordinator.runtime import trees


def agreement(
  strategy: strategies.Strategy,
  shared: Any,
  params: Any,
  settings: options.Options,
  data: ledger.Batches | None = None,
  inner: Any = None,
) -> tuple[tuple[str, str], ...]:
  """The properties on which replicas must agree, as pairs of a name and a text.

  Trees are compared by the paths, shapes and dtypes of their leaves, since the
  text of a tree's structure may contain addresses. The optimizer is compared by
  the program of its update, including its constants.
  """
  shapes = ", ".join(_leaves(params))
  state = "\n".join(_leaves(shared))
  mean = jax.eval_shape(lambda x: x, strategy.exchanged(params))
  update = jax.make_jaxpr(strategy.apply)(shared, mean)
  numbers = strategy.quorum._asdict().items()
  rules = ", ".join(f"{name}={value}" for name, value in numbers)
  if strategy.fragments is not None:
    rules += f", {strategy.fragments}"
  # Addresses of functions differ between processes.
  program = re.sub(r"0x[0-9a-f]+", "0x", str(update))
  return (
    ("version of optax_dist", optax_dist.__version__),
    ("parameters", shapes if len(shapes) < 2000 else _digest(shapes)),
    ("strategy's numbers", f"{strategy.name}: {rules}"),
    ("optimizer state", _digest(state)),
    ("inner optimizer's state", _digest("\n".join(_leaves(inner)))),
    ("wire", settings.wire),
    ("inline_bytes", str(settings.inline_bytes)),
    ("fingerprint_every", str(settings.fingerprint_every)),
    ("data", str(data)),
    ("max_skipped", str(settings.max_skipped)),
    ("version of JAX", jax.__version__),
    # A program's text contains scalars, but no arrays, so its constants are added.
    ("optimizer", _digest(program + fingerprint([*_constants(update)]))),
  )


def _leaves(tree: Any) -> list[str]:
  leaves = trees.described(tree)
  return [f"{path or 'params'}: {what}" for path, what in leaves.items()]


def _constants(tree: Any) -> Iterator[Any]:
  """The arrays that traced programs close over, in order.

  Args:
    tree: a tree of programs, as JAX keeps them in the parameters of an equation.
  """
  for leaf in jax.tree.leaves(tree):
    if isinstance(leaf, jax.extend.core.ClosedJaxpr):
      yield from leaf.consts
    if isinstance(leaf, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
      for equation in leaf.eqns:
        yield from _constants(equation.params)


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:16]
