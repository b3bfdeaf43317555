"""Checks whether a transformation can be applied to flat parts of the leaves.

It can if each element of its results depends only on the same element of the
leaves, and if it does not use their shapes. Both are checked on the traced
programs, once with the whole leaves and once with their parts: the two programs
must be equal except for shapes, and every value computed from a leaf must
remain elementwise. Nothing is computed.
"""

import contextvars
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import source_info_util as _source  # To name rejected operations.
from jax.extend import core as _core

#: Each element of the result depends only on that element of the operands.
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


class NotElementwise(Exception):
  """An operation that mixes elements: its name and its effect."""


class _Value:
  """A value of both programs.

  Attributes:
    kind: "same": equal in both; "uniform": filled with one number, which is
      equal in both; "part": in one program a part of its value in the other;
      "mixed": none of these.
    shapes: its shapes in both programs; None for a number, which fits any.
    why: for a mixed one, the reason.
  """

  def __init__(self, kind: str, shapes: Any = None, why: str = ""):
    self.kind = kind
    self.shapes = shapes
    self.why = why


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
  wholes: tuple[Callable[..., Any], Sequence[Any]],
  parts: tuple[Callable[..., Any], Sequence[Any]],
  is_part: Sequence[bool],
  out_is_part: Callable[[int], bool],
) -> None:
  """Checks that a function of leaves also works on parts of them.

  Args:
    wholes: the function, and the shapes of its flat arguments, with the whole
      leaves; its results are flat too.
    parts: the same, with parts of the leaves.
    is_part: which of the arguments are leaves or mirror them.
    out_is_part: which of the results should mirror them.

  Raises:
    NotElementwise: if it does not, or if that can't be determined.
  """
  whole, part = (jax.make_jaxpr(fun)(*args) for fun, args in (wholes, parts))
  args = [
    _Value("part" if split else "same", (a.shape, b.shape))
    for a, b, split in zip(wholes[1], parts[1], is_part, strict=True)
  ]
  outs = _closed(whole, part, args)
  for i, out in enumerate(outs):
    if out.kind == "mixed":
      raise NotElementwise(out.why)
    if out.kind == "part" and not out_is_part(i):
      raise NotElementwise(
        "a number in its state is computed from the elements of a leaf"
      )
    if out.kind == "same" and out.shapes is not None and out_is_part(i):
      raise NotElementwise("an array of its own is taken for a leaf")


def _closed(a: Any, b: Any, args: list[_Value]) -> list[_Value]:
  consts = []
  if len(a.consts) != len(b.consts):
    raise NotElementwise("its constants depend on the shapes of the leaves")
  for x, y in zip(a.consts, b.consts, strict=True):
    same = x is y or _is_equal(x, y)
    shapes = (np.shape(x), np.shape(y))
    why = "" if same else "a constant depends on the shapes of the leaves"
    consts.append(_Value("same" if same else "mixed", shapes, why))
  return _jaxprs(a.jaxpr, b.jaxpr, consts, args)


def _is_equal(x: Any, y: Any) -> bool:
  if any(isinstance(v, jax.core.Tracer) for v in (x, y)):
    return False
  if any(jax.dtypes.issubdtype(v.dtype, jax.dtypes.extended) for v in (x, y)):
    return False
  return bool(np.array_equal(np.asarray(x), np.asarray(y)))


def _jaxprs(a: Any, b: Any, consts: list, args: list) -> list[_Value]:
  envs: tuple[dict, dict] = ({}, {})
  for env, jaxpr in zip(envs, (a, b), strict=True):
    names = [*jaxpr.constvars, *jaxpr.invars]
    env.update(zip(names, consts + args, strict=True))
  walks = [_without_spreads(j, e) for j, e in zip((a, b), envs, strict=True)]
  for eqns in itertools.zip_longest(*walks):
    first, second = eqns
    _check_alike(first, second)
    values = _pairs(first.invars, second.invars, envs, eqns)
    outs = _outputs(first, second, values)
    for env, eqn in zip(envs, eqns, strict=True):
      env.update(zip(eqn.outvars, outs, strict=True))
  return _pairs(a.outvars, b.outvars, envs, None)


class _Spread(NamedTuple):
  """A number that a program broadcasts to an array."""

  number: Any


def _without_spreads(jaxpr: Any, env: dict) -> Iterator[Any]:
  """Yields a program's equations, except for broadcasts of numbers.

  If a leaf is a scalar, only the program with its parts has these.
  """
  for eqn in jaxpr.eqns:
    if (
      eqn.primitive.name == "broadcast_in_dim" and not eqn.invars[0].aval.shape
    ):
      number = _look_up(eqn.invars[0], env)
      is_value = isinstance(number, _Value)
      if not is_value or number.kind in ("same", "uniform"):
        env[eqn.outvars[0]] = _Spread(number)
        continue
    yield eqn


def _look_up(var: Any, env: dict) -> Any:
  """Returns a literal's number, or the known value of a variable."""
  if isinstance(var, _core.Literal):
    return np.asarray(var.val)
  found = env[var]
  return found.number if isinstance(found, _Spread) else found


def _pairs(first, second, envs, eqns) -> list[_Value]:
  values = []
  for x, y in zip(first, second, strict=True):
    a, b = _look_up(x, envs[0]), _look_up(y, envs[1])
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
      if not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
        raise NotElementwise(
          f"{_name(eqns)} computes with {a} for a whole leaf and {b} for a part"
        )
      values.append(_Value("same"))
    elif a is not b:
      raise NotElementwise(_differs(eqns))
    else:
      spread = any(
        not isinstance(v, _core.Literal) and isinstance(e[v], _Spread)
        for v, e in zip((x, y), envs, strict=True)
      )
      values.append(_Value(a.kind) if spread else a)
  return values


def _differs(eqns: Any) -> str:
  return f"{_name(eqns)} treats a leaf by its shape, and parts have others"


def _check_alike(a: Any, b: Any) -> None:
  if a is None or b is None or a.primitive != b.primitive:
    raise NotElementwise(_differs([x for x in (a, b) if x is not None]))
  if len(a.invars) != len(b.invars) or len(a.outvars) != len(b.outvars):
    raise NotElementwise(_differs((a, b)))
  for key in a.params.keys() & b.params.keys():
    x, y = a.params[key], b.params[key]
    if isinstance(x, int | float | str | bool | np.dtype) and x != y:
      raise NotElementwise(_differs((a, b)))


def _outputs(a: Any, b: Any, values: list[_Value]) -> list[_Value]:
  shapes = [
    (x.aval.shape, y.aval.shape)
    for x, y in zip(a.outvars, b.outvars, strict=True)
  ]
  name = a.primitive.name
  elementwise = is_elementwise(a) and is_elementwise(b)

  def mixed() -> list[_Value]:
    why = f"{_name((a, b))} mixes the elements of a leaf ({name})"
    return [_Value("mixed", s, why) for s in shapes]

  broken = next((v for v in values if v.kind == "mixed"), None)
  if broken is not None:
    return [_Value("mixed", s, broken.why) for s in shapes]
  inner = _inner(a, b, values)
  if inner is not None:
    return inner
  if all(v.kind == "same" for v in values):
    if all(x == y for x, y in shapes):
      return [_Value("same", s) for s in shapes]
    if elementwise:  # Numbers that were broadcast.
      return [_Value("uniform") for _ in shapes]
    return mixed()
  if elementwise:
    for value in values:
      takes_any = value.shapes is None or value.shapes == ((), ())
      if not takes_any and (value.shapes not in shapes or value.kind == "same"):
        return mixed()
    if any(v.kind == "part" for v in values):
      return [_Value("part", s) for s in shapes]
    return [_Value("uniform") for _ in shapes]
  if name in _SHAPES_ONLY and values[0].kind == "uniform":
    return [values[0]]
  if name in _SHAPES_ONLY and values[0].shapes == shapes[0]:
    return [values[0]]
  return mixed()


def _inner(a: Any, b: Any, values: list[_Value]) -> list[_Value] | None:
  """Returns the results of a call or a conditional; otherwise None."""
  if "branches" in a.params:
    index, *operands = values
    if index.kind != "same":
      return None
    branches = [
      _closed(x, y, operands)
      for x, y in zip(a.params["branches"], b.params["branches"], strict=True)
    ]
    return [_either(outs) for outs in zip(*branches, strict=True)]
  if a.primitive.name in ("while", "scan"):
    return None
  for key in _CALLS:
    if key in a.params:
      x, y = a.params[key], b.params[key]
      token = _calls.set((a, b, *_calls.get()))
      try:
        if hasattr(x, "consts"):
          return _closed(x, y, values)
        return _jaxprs(x, y, [], values)
      finally:
        _calls.reset(token)
  return None


def _either(outs: Sequence[_Value]) -> _Value:
  for kind in ("mixed", "part", "uniform"):
    for out in outs:
      if out.kind == kind:
        own = [o for o in outs if o.kind == "same" and o.shapes is not None]
        if own and kind != "mixed":
          return _Value("mixed", out.shapes, "a choice between unlike values")
        return out
  return outs[0]


#: The calls being examined, for equations without a name of their own.
_calls: contextvars.ContextVar[tuple] = contextvars.ContextVar(
  "calls", default=()
)


def _name(eqns: Any) -> str:
  """Returns the name of the transformation that an equation comes from."""
  names: list[str] = []
  for eqn in (*(eqns or ()), *_calls.get()):
    for frame in _source.user_frames(eqn.source_info.traceback):
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
