"""Checks whether a transformation can be applied to flat parts of the leaves.

It can if each element of its results depends only on the same element of the
leaves, and if it does not use their shapes. Its programs for whole leaves and for
parts show both, and nothing is computed: in the one for parts, every value computed
from a leaf must remain elementwise, and the two must be equal except for shapes.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as _core

#: Operations whose result depends, element by element, on the operands.
_ELEMENTWISE = frozenset(
  """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e
  bessel_i1e bitcast_convert_type cbrt ceil clamp clz complex conj
  convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp
  exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le
  lgamma log log1p log2 logistic lt max min mul ne neg nextafter not
  one_minus_square optimization_barrier or pcast polygamma population_count pow
  pvary real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
  shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
  stop_gradient sub tan tanh xor zeta""".split()  # noqa: SIM905
)
_SHAPES_ONLY = frozenset(["broadcast_in_dim", "reshape", "squeeze"])
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
#: The folder of JAX: its functions in a traceback aren't the transformation's own.
_JAX = os.path.dirname(jax.__file__) + os.sep


class NotElementwise(Exception):
  """An operation that mixes elements: its name and its effect."""


# The kind of a program's value: a single number, or an array filled with it; another
# array that depends on no leaf; a part of a leaf, or computed from its elements one by
# one; or a NotElementwise with the reason why it is none of these.
_Kind = str | NotElementwise
_NUMBER, _OWN, _PART = "number", "own", "part"


def is_elementwise(equation: Any) -> bool:
  """Whether each element of the result depends only on that element of the operands.

  The bits of a number as several narrower ones are not: they have an axis more.
  """
  if equation.primitive.name not in _ELEMENTWISE:
    return False
  if equation.primitive.name != "bitcast_convert_type":
    return True
  return equation.invars[0].aval.shape == equation.outvars[0].aval.shape


def check(
  fun: Callable[..., Any],
  wholes: tuple,
  parts: tuple,
  is_part: Sequence[bool],
  out_is_part: Sequence[bool],
) -> None:
  """Checks that a function of leaves also works on parts of them.

  Args:
    fun: the function, of pytrees of arrays.
    wholes: the types of its arguments, with the whole leaves.
    parts: the same, with flat parts of the leaves.
    is_part: which of the arrays in the arguments are leaves or mirror them.
    out_is_part: which of the arrays in the results should mirror leaves.

  Raises:
    NotElementwise: if the function does not, or if that can't be determined.
  """
  whole = jax.make_jaxpr(fun)(*wholes)
  try:
    part = jax.make_jaxpr(fun)(*parts)
  except Exception as error:
    raise NotElementwise(f"it fails with parts ({error})") from error
  kinds: list[_Kind] = [
    _PART if split else _kind_alone(v.aval.shape)
    for v, split in zip(part.jaxpr.invars, is_part, strict=True)
  ]
  for kind, split in zip(_kinds(part, kinds), out_is_part, strict=True):
    if isinstance(kind, NotElementwise):
      raise kind
    if kind == _PART and not split:
      raise NotElementwise(
        "a number in its state is computed from the elements of a leaf"
      )
    if kind == _OWN and split:
      raise NotElementwise("an array of its own is taken for a leaf")
  nothing = None, None
  for (a, made_a), (b, made_b) in itertools.zip_longest(
    _operations(whole), _operations(part), fillvalue=nothing
  ):
    if a != b:
      name = _name([x for x in (made_a, made_b) if x])
      raise NotElementwise(
        f"{name} treats a leaf by its shape, and parts have others"
      )


def _kind_alone(shape: tuple[int, ...]) -> _Kind:
  return _OWN if shape else _NUMBER


def _kinds(
  program: Any, kinds: Sequence[_Kind], within: tuple = ()
) -> list[_Kind]:
  """Returns what the results of a program are.

  Args:
    program: a jaxpr, with its constants or without.
    kinds: what its arguments are.
    within: the calls that it is in, for equations without a name of their own.
  """
  jaxpr = getattr(program, "jaxpr", program)
  consts = [_kind_alone(v.aval.shape) for v in jaxpr.constvars]
  known = dict(
    zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *kinds], strict=True)
  )

  def kind_of(v: Any) -> _Kind:
    is_literal = isinstance(v, _core.Literal)
    return _kind_alone(np.shape(v.val)) if is_literal else known[v]

  for eqn in jaxpr.eqns:
    results = _results(eqn, [kind_of(v) for v in eqn.invars], within)
    known.update(zip(eqn.outvars, results, strict=True))
  return [kind_of(v) for v in jaxpr.outvars]


def _results(eqn: Any, kinds: list[_Kind], within: tuple) -> list[_Kind]:
  """Returns what the results of an equation are."""
  outs = [v.aval.shape for v in eqn.outvars]
  for kind in kinds:
    if isinstance(kind, NotElementwise):
      return [kind] * len(outs)
  within = (eqn, *within)
  if "branches" in eqn.params and kinds[0] == _NUMBER:
    branches = [_kinds(x, kinds[1:], within) for x in eqn.params["branches"]]
    return [_either(results) for results in zip(*branches, strict=True)]
  if eqn.primitive.name not in ("while", "scan"):
    for key in _CALLS:
      if key in eqn.params:
        return _kinds(eqn.params[key], kinds, within)
  elementwise = is_elementwise(eqn)
  shapes_only = eqn.primitive.name in _SHAPES_ONLY
  if _PART not in kinds:
    filled = (elementwise or shapes_only) and _OWN not in kinds
    return [_NUMBER if filled else _kind_alone(shape) for shape in outs]
  unchanged = shapes_only and eqn.invars[0].aval.shape == outs[0]
  if _OWN not in kinds and (elementwise or unchanged):
    return [_PART] * len(outs)
  mixes = f"mixes the elements of a leaf ({eqn.primitive.name})"
  return [NotElementwise(f"{_name(within)} {mixes}")] * len(outs)


def _either(kinds: Sequence[_Kind]) -> _Kind:
  """Returns what one of several values is, chosen by a number."""
  for kind in kinds:
    if isinstance(kind, NotElementwise):
      return kind
  if _OWN in kinds and _PART in kinds:
    return NotElementwise("a choice between unlike values")
  return next((kind for kind in (_OWN, _PART) if kind in kinds), _NUMBER)


def _constant(value: Any) -> tuple:
  """Returns what tells a number or an array in a program from others."""
  dtype = jnp.result_type(value)
  is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
  if is_key or isinstance(value, jax.core.Tracer):
    # Known only as the same object, which the programs keep.
    return ("constant", id(value))
  return ("constant", dtype, np.shape(value), np.asarray(value).tobytes())


def _operations(program: Any) -> Iterator[tuple[tuple, Any]]:
  """Yields a program's operations in order, each followed by those that it calls.

  Each is described by its kind and operands, without shapes, and comes with its
  equation; the results come last, without an equation. Broadcasts of numbers are left
  out: if a leaf is a scalar, only the program on parts has them.
  """
  jaxpr = getattr(program, "jaxpr", program)
  consts = map(_constant, getattr(program, "consts", ()))
  names: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
  names.update((v, ("argument", i)) for i, v in enumerate(jaxpr.invars))
  count = itertools.count()

  def name_of(v: Any) -> Any:
    return _constant(v.val) if isinstance(v, _core.Literal) else names[v]

  for eqn in jaxpr.eqns:
    operands = [name_of(v) for v in eqn.invars]
    if (
      eqn.primitive.name == "broadcast_in_dim" and not eqn.invars[0].aval.shape
    ):
      names[eqn.outvars[0]] = operands[0]
      continue
    params = {
      key: value
      for key, value in eqn.params.items()
      if isinstance(value, int | float | str | bool | np.dtype)
    }
    yield (eqn.primitive.name, params, operands), eqn
    names.update((v, (next(count), i)) for i, v in enumerate(eqn.outvars))
    for value in eqn.params.values():
      for called in value if isinstance(value, tuple) else (value,):
        if hasattr(called, "eqns"):
          yield from _operations(called)
  yield ("results", [name_of(v) for v in jaxpr.outvars]), None


def _name(equations: Sequence[Any]) -> str:
  """Returns the name of the transformation that the first equation comes from."""
  names: list[str] = []
  for eqn in equations:
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
      if frame.file_name.startswith(_JAX):
        continue
      name, _, inside = frame.function_name.partition(".<locals>.")
      ours = "/optax_dist/" in frame.file_name
      checking = frame.file_name.endswith(("elementwise.py", "sharded.py"))
      if not inside or (
        ours and (checking or "/_internal/" in frame.file_name)
      ):
        continue
      # A transformation's function.
      if ours or inside.startswith(("update", "init")):
        return name
      names.append(name)
  return names[0] if names else "it"
