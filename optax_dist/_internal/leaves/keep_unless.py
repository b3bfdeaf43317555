"""A step that is taken or not, by a scalar, with its new state in place.

An optimizer's new state is written over the old one. If the update is computed
from the candidate state instead of the chosen one, both are read from the old
state, and the compiler copies it first, in each step. So this module reads the
program of the step, and chooses between new and old state as soon as there is a
new one: everything after that, including the update, is computed from the
chosen one.

Results do not change: if the step is taken the chosen state is the new one, and
otherwise nothing that was computed is used.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as _core

from optax_dist._internal.leaves.choose import choose
from optax_dist._internal.leaves.evaluate import evaluate


def keep_unless(
  predicate: jax.Array,
  step: Callable[[], tuple[Any, Any]],
  nothing: Any,
  old: Any,
) -> tuple[Any, Any]:
  """Returns ``step()`` if a scalar predicate is true, otherwise the old values.

  Args:
    predicate: a boolean scalar.
    step: a function without arguments that returns updates and a new state.
    nothing: the updates if no step is taken.
    old: the old state, with the structure and shapes of the new one.

  Returns:
    The updates and the state.

  Example:
    >>> old = jnp.ones(2)
    >>> step = lambda: (-2 * old, 3 * old)
    >>> keep_unless(jnp.asarray(False), step, jnp.zeros(2), old)
    (Array([0., 0.], dtype=float32), Array([1., 1.], dtype=float32))
  """
  program, shapes = jax.make_jaxpr(step, return_shape=True)()
  flat, treedef = jax.tree.flatten(shapes)
  states = jax.tree.leaves(old)
  first = len(flat) - len(states)
  early = _made_once(program.jaxpr, first, states)
  env: dict[Any, Any] = {}
  env.update(zip(program.jaxpr.constvars, program.consts, strict=True))
  read = lambda v: v.val if isinstance(v, _core.Literal) else env[v]
  for equation in program.jaxpr.eqns:
    results = evaluate(equation, [read(v) for v in equation.invars])
    if not equation.primitive.multiple_results:
      results = [results]
    for var, x in zip(equation.outvars, results, strict=True):
      env[var] = choose(predicate, x, early[var]) if var in early else x
  results = [read(v) for v in program.jaxpr.outvars]
  before = [*jax.tree.leaves(nothing), *states]
  for i, var in enumerate(program.jaxpr.outvars):
    if i < first or isinstance(var, _core.Literal) or var not in early:
      results[i] = choose(predicate, results[i], before[i])
  return jax.tree.unflatten(treedef, results)


def _made_once(jaxpr: Any, first: int, states: list[Any]) -> dict[Any, Any]:
  """Returns the old values of results that are computed and stored once.

  Args:
    jaxpr: the program.
    first: the index in its results at which the new state starts.
    states: the old state.
  """
  made = {var for equation in jaxpr.eqns for var in equation.outvars}
  stored = jaxpr.outvars[first:]
  times = collections.Counter(map(id, stored))
  return {
    var: x
    for var, x in zip(stored, states, strict=True)
    if not isinstance(var, _core.Literal)
    and var in made
    and times[id(var)] == 1
    and (var.aval.shape, var.aval.dtype) == (jnp.shape(x), jnp.result_type(x))
  }
