"""The origin of a value: whether it was summed over an axis, and by what.

Under ``shard_map(check_vma=True)`` a type says that a value is equal along an
axis, but not why. ``jax.grad`` sums the gradient of a replicated parameter, a
mean over the replicas is also equal on all of them, and the two have the same
type. They differ in the traced program, so this module reads it, backwards from
the value. It needs a program, as under ``jax.jit`` or ``jax.pmap``; values
computed eagerly have no origin.
"""

import contextlib
import contextvars
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.extend.core
import optax

from optax_dist._internal import axes

_given: contextvars.ContextVar[frozenset[axes.AxisName]] = (
  contextvars.ContextVar("given", default=frozenset())
)

Origin = Literal["gradient", "caller"]

# Elementwise operations, and changes of shape or dtype.
_SHAPE_AND_SCALE = frozenset(
  [
    "add",
    "add_any",
    "broadcast_in_dim",
    "clamp",
    "convert_element_type",
    "copy",
    "div",
    "max",
    "min",
    "mul",
    "name",
    "neg",
    "pvary",
    "reduce_precision",
    "reshape",
    "select_n",
    "squeeze",
    "sub",
    "transpose",
  ]
)


def reduced_over(names: tuple[axes.AxisName, ...]) -> contextlib.ExitStack:
  """Returns a context whose results are final over the axes ``names``."""
  stack = contextlib.ExitStack()
  for name in names:
    stack.enter_context(jax.named_scope(_scope(name)))
  return stack


def _scope(name: axes.AxisName) -> str:
  return f"reduced_over[{name}]"


def given_equal(
  inner: optax.GradientTransformationExtraArgs,
  names: tuple[axes.AxisName, ...],
) -> optax.GradientTransformationExtraArgs:
  """Returns ``inner``, for updates that were reduced over the axes ``names``.

  The reduction is not visible if ``inner`` looks at them inside a branch or a
  loop, as ``optax.MultiSteps`` does.
  """

  def update_fn(updates, state, params=None, **extra_args):
    token = _given.set(_given.get() | set(names))
    try:
      return inner.update(updates, state, params, **extra_args)
    finally:
      _given.reset(token)

  return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def of_invariant(x: Any, name: axes.AxisName) -> Origin | None:
  """Returns what reduced a value that does not vary over a tracked axis.

  Args:
    x: an array that does not vary over the axis, by its type.
    name: name of the bound and tracked axis.

  Returns:
    ``"gradient"`` if ``jax.grad`` summed any part of it; ``"caller"`` if every
    reduction in its origin is explicit, such as ``jax.lax.pmean`` or one of
    this library; None if none is found, as for an argument of the mapped
    function.
  """
  origin: Origin | None = None
  for value, equation, todo in _backwards(x):
    if not equation.transposed and _scope(name) in equation.stack:
      origin = "caller"
    elif insides := equation.insides(value):
      todo += insides
    elif not any(v.varies(name) for v in equation.inputs()):
      todo += equation.inputs()
    elif equation.transposed:
      return "gradient"
    else:
      origin = "caller"
      # A mean of equal values changes nothing: find the values' origin.
      casts = [
        v.outside().equation() for v in equation.inputs() if v.varies(name)
      ]
      if all(cast and cast.primitive == "pvary" for cast in casts):
        todo += [v for cast in casts if cast for v in cast.inputs()]
  if origin is None and name in _given.get():
    return "caller"
  return origin


def is_scattered(x: Any, name: axes.AxisName) -> bool:
  """Whether a value is a replica's part of a sum, except for shape and scale.

  The gradient of a parameter that is sharded over the axis, and gathered where
  it is used, is of that kind.

  Args:
    x: an array.
    name: name of a bound axis.
  """
  for value, equation, todo in _backwards(x):
    if "reduce_scatter" in equation.primitive:
      if name in equation.over():
        return True
    elif insides := equation.insides(value):
      todo += insides
    elif equation.primitive in _SHAPE_AND_SCALE:
      todo += [v for v in equation.inputs() if v.size == value.size]
  return False


def was_reduced(x: Any, name: axes.AxisName) -> bool:
  """Whether a value is already final over an axis, except for shape and scale.

  For a shard, which varies over the axis, types don't show it.

  Args:
    x: an array.
    name: name of a bound axis.
  """
  for value, equation, todo in _backwards(x):
    if not equation.transposed and _scope(name) in equation.stack:
      return True
    if insides := equation.insides(value):
      todo += insides
    elif equation.primitive in _SHAPE_AND_SCALE:
      todo += [v for v in equation.inputs() if v.size == value.size]
  return False


class _Equation:
  """An operation of a program, either being traced or finished."""

  def __init__(self, raw: Any, makers: "_Makers", transposed: bool):
    self._raw = raw
    self._makers = makers
    self.primitive: str = raw.primitive.name
    self.stack = str(raw.source_info.name_stack)
    self.transposed = transposed or "transpose(" in self.stack

  def over(self) -> tuple[axes.AxisName, ...]:
    """The axes of its communication."""
    names = self._raw.params.get("axis_name", ())
    return tuple(names) if isinstance(names, list | tuple) else (names,)

  def inputs(self) -> list["_Value"]:
    return list(itertools.chain.from_iterable(self._inputs()))

  def _inputs(self) -> list[list["_Value"]]:
    """For each argument, one value or none."""
    if self._makers is None:
      return [_traced(v, self.transposed) for v in self._raw.invars]
    return [
      []
      if isinstance(v, jax.extend.core.Literal)
      else [_Value(v, self._makers, self.transposed)]
      for v in self._raw.invars
    ]

  def insides(self, value: "_Value") -> list["_Value"]:
    """The definitions of its result ``value`` in inner programs (branches)."""
    at = [i for i, v in enumerate(self._raw.outvars) if v is value.variable]
    if not at:
      return []
    values = []
    for program in jax.extend.core.jaxprs_in_params(self._raw.params):
      if len(program.outvars) != len(self._raw.outvars):
        continue
      # A branch's arguments follow the predicate; a loop's body also gets its
      # results.
      given = zip(
        reversed(program.invars), reversed(self._inputs()), strict=False
      )
      makers: dict = {v: outer[0] for v, outer in given if outer}
      makers |= {v: eqn for eqn in program.eqns for v in eqn.outvars}
      result = program.outvars[at[0]]
      if not isinstance(result, jax.extend.core.Literal):
        values.append(_Value(result, makers, self.transposed))
    return values


class _Value:
  """A value of a program, either being traced or finished."""

  def __init__(self, raw: Any, makers: "_Makers", transposed: bool):
    self._raw = raw
    self._makers = makers
    self._transposed = transposed
    self.key = id(raw), transposed
    self.size = getattr(raw.aval, "size", None)

  @property
  def variable(self) -> Any:
    return self._raw.val if self._makers is None else self._raw

  def varies(self, name: axes.AxisName) -> bool:
    return name in axes.varying_axes(self._raw.aval)

  def outside(self) -> "_Value":
    """Returns the operand in the outer program that it is an argument for."""
    outer = self._makers and self._makers.get(self._raw)
    return outer.outside() if isinstance(outer, _Value) else self

  def equation(self) -> _Equation | None:
    """Returns the equation that computed it; None if there is none."""
    if self._makers is None:
      raw = self._raw.parent
    else:
      raw = self._makers.get(self._raw)
    if raw is None or isinstance(raw, _Value):
      return None
    return _Equation(raw, self._makers, self._transposed)


# The definitions of a finished program's variables: an equation, or the operand
# for an argument. None during tracing, where each value knows its own.
_Makers = dict[Any, Any] | None


def _traced(x: Any, transposed: bool = False) -> list[_Value]:
  """Returns ``x`` if it belongs to a program being traced."""
  while isinstance(x, jax.core.Tracer):
    if not hasattr(x, "parent"):
      # vmap and grad wrap the values that they trace.
      x = getattr(x, "primal", getattr(x, "val", None))
    elif x.parent is None and (outer := _closed_over(x)) is not None:
      x = outer
    else:
      return [_Value(x, None, transposed)]
  return []


def _closed_over(x: Any) -> Any:
  """Returns the outer value of ``x``, which a branch or a loop closes over."""
  if isinstance(x.val, jax.extend.core.Literal):
    return None
  frame = getattr(getattr(x, "_trace", None), "frame", None)
  return getattr(frame, "constvar_to_val", {}).get(x.val)


def _backwards(x: Any) -> Iterator[tuple[_Value, _Equation, list[_Value]]]:
  """Yields values and equations, each once, and a list to add the next to."""
  todo, seen = _traced(x), set()
  while todo:
    value = todo.pop().outside()
    equation = value.equation()
    if equation is None or value.key in seen:
      continue
    seen.add(value.key)
    yield value, equation, todo
