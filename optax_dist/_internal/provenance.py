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
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.extend.core
import optax

from optax_dist._internal import axes
from optax_dist._internal.leaves.elementwise import is_elementwise

_given: contextvars.ContextVar[frozenset[axes.AxisName]] = (
  contextvars.ContextVar("given", default=frozenset())
)

Origin = Literal["gradient", "caller"]
# What the origin of a value shows, in order.
_NONE, _CALLER, _MOST = range(3)

# Operations that keep the elements of an array, all of them or some.
_REARRANGES = frozenset(
  """all_to_all broadcast_in_dim concatenate dynamic_slice dynamic_update_slice
  expand_dims gather name pad ppermute reshape rev slice split squeeze
  transpose""".split()  # noqa: SIM905
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


class Known:
  """What is known of a program's values.

  Calls for several values of a program share it, so that what many of them depend
  on is read once.
  """

  def __init__(self, warned: bool = False) -> None:
    # Whether the caller knows that nothing can be told of values without a program.
    self.warned = warned
    self._program = _Program(None)
    self._found: dict[Any, dict[Any, tuple[int, _Value]]] = {}

  def search(self, x: Any, question: Any, read: "_Read") -> int:
    """Returns the most that is found in the origin of a value, backwards from it.

    Args:
      x: an array.
      question: a key for ``read``.
      read: takes a value and the equation that computed it; returns what they
        show, up to ``_MOST``, and the values to go on with.
    """
    found = self._found.setdefault(question, {})
    starts = [v.outside() for v in _traced(x, self._program)]
    return max((_search(v, read, found) for v in starts), default=_NONE)


def of_invariant(
  x: Any, name: axes.AxisName, known: Known | None = None
) -> Origin | None:
  """Returns what reduced a value that does not vary over a tracked axis.

  Args:
    x: an array that does not vary over the axis, by its type.
    name: name of the bound and tracked axis.
    known: what is known of other values; it is added to.

  Returns:
    ``"gradient"`` if ``jax.grad`` summed any part of it; ``"caller"`` if every
    reduction in its origin is explicit, such as ``jax.lax.pmean`` or one of
    this library; None if none is found, as for an argument of the mapped
    function.
  """

  def read(value: _Value, equation: _Equation) -> tuple[int, list[_Value]]:
    if not equation.transposed and _scope(name) in equation.stack:
      return _CALLER, []
    if insides := equation.insides(value):
      return _NONE, insides
    inputs = equation.inputs()
    if not any(v.varies(name) for v in inputs):
      return _NONE, inputs
    if equation.transposed:
      return _MOST, []
    # A mean of equal values changes nothing: find the values' origin.
    casts = [v.outside().equation() for v in inputs if v.varies(name)]
    if not all(cast and cast.primitive == "pvary" for cast in casts):
      return _CALLER, []
    return _CALLER, [v for cast in casts if cast for v in cast.inputs()]

  found = (known or Known()).search(x, ("origin", name), read)
  if found == _MOST:
    return "gradient"
  return "caller" if found == _CALLER or name in _given.get() else None


def is_scattered(
  x: Any, name: axes.AxisName, known: Known | None = None
) -> bool:
  """Whether a value is a replica's part of a sum, or a function of its elements.

  The gradient of a parameter that is sharded over the axis, and gathered where
  it is used, is of that kind.

  Args:
    x: an array.
    name: name of a bound axis.
    known: what is known of other values; it is added to.
  """

  def read(value: _Value, equation: _Equation) -> tuple[int, list[_Value]]:
    if "reduce_scatter" in equation.primitive:
      return (_MOST if name in equation.over() else _NONE), []
    return _NONE, equation.element_by_element(value)

  return (known or Known()).search(x, ("scattered", name), read) == _MOST


def check_whole(
  what: str,
  x: Any,
  names: Collection[axes.AxisName],
  remedy: str,
  known: Known | None = None,
) -> None:
  """Checks that a gradient is not a replica's part of a sum over the replicas.

  Args:
    what: the transform and its gradient, for the message.
    x: an array.
    names: names of bound axes.
    remedy: what follows from it, and what to do.
    known: see :func:`is_scattered`.

  Raises:
    ValueError: if it is.
  """
  varying = axes.varying_axes(x)
  spread = [
    name
    for name in names
    if name in axes.mesh_axes()
    and (name in varying or not axes.is_tracked(name))
  ]
  has_program = _traced(x, _Program(None))
  known = known or Known()
  is_eager = isinstance(x, jax.core.Tracer) and not has_program
  if spread and is_eager and not known.warned:
    known.warned = True
    warnings.warn(
      f"{what} is computed outside of jax.jit, where it can't be told whether it is"
      f" each replica's own or one shard of a sum over axis {axes.listed(spread)},"
      " as the gradient of a parameter that is sharded over it: that would be"
      " summed again. Call the mapped step under jax.jit, which checks it.",
      stacklevel=2,
    )
  over = [name for name in names if is_scattered(x, name, known)]
  if over:
    raise ValueError(
      f"{what} is one shard of a gradient that was summed and scattered over axis"
      f" {axes.listed(over)}, as that of a parameter that is sharded over it,"
      f" {remedy}"
    )


def was_reduced(
  x: Any, name: axes.AxisName, known: Known | None = None
) -> bool:
  """Whether a value is final over an axis, or a function of such elements.

  For a shard, which varies over the axis, types don't show it.

  Args:
    x: an array.
    name: name of a bound axis.
    known: what is known of other values; it is added to.
  """

  def read(value: _Value, equation: _Equation) -> tuple[int, list[_Value]]:
    if not equation.transposed and _scope(name) in equation.stack:
      return _MOST, []
    return _NONE, equation.element_by_element(value)

  return (known or Known()).search(x, ("reduced", name), read) == _MOST


class _Program:
  """A program that is being traced, or one call of a finished one.

  Attributes:
    makers: for a finished one, what defines its variables: an equation, or the
      operand for an argument. None during tracing, where each value knows its own.
    calls: the programs that its equations call, by equation.
  """

  def __init__(self, makers: dict[Any, Any] | None):
    self.makers = makers
    self.calls: dict[Any, _Call] = {}


class _Call(NamedTuple):
  """An equation that calls programs, such as a branch.

  Attributes:
    equation: the equation, whose id is valid as long as it exists.
    at: the index of each of its results, by id.
    programs: the programs, and their results.
  """

  equation: Any
  at: dict[int, int]
  programs: list[tuple[_Program, Any]]


class _Equation:
  """An operation of a program."""

  def __init__(self, raw: Any, program: _Program, transposed: bool):
    self._raw = raw
    self._program = program
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
    if self._program.makers is None:
      return [
        _traced(v, self._program, self.transposed) for v in self._raw.invars
      ]
    return [
      []
      if isinstance(v, jax.extend.core.Literal)
      else [_Value(v, self._program, self.transposed)]
      for v in self._raw.invars
    ]

  def insides(self, value: "_Value") -> list["_Value"]:
    """The definitions of its result ``value`` in inner programs (branches)."""
    key = id(self._raw), self.transposed
    if key not in self._program.calls:
      self._program.calls[key] = self._call()
    call = self._program.calls[key]
    at = call.at.get(id(value.variable))
    if at is None:
      return []
    return [
      _Value(outs[at], program, self.transposed)
      for program, outs in call.programs
      if not isinstance(outs[at], jax.extend.core.Literal)
    ]

  def _call(self) -> _Call:
    outs = self._raw.outvars
    programs = []
    for jaxpr in jax.extend.core.jaxprs_in_params(self._raw.params):
      if len(jaxpr.outvars) != len(outs):
        continue
      # A branch's arguments follow the predicate; a loop's body also gets its
      # results.
      given = zip(
        reversed(jaxpr.invars), reversed(self._inputs()), strict=False
      )
      makers: dict = {v: outer[0] for v, outer in given if outer}
      makers |= {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
      programs.append((_Program(makers), jaxpr.outvars))
    return _Call(self._raw, {id(v): i for i, v in enumerate(outs)}, programs)

  def element_by_element(self, value: "_Value") -> list["_Value"]:
    """The values that the elements of its result ``value`` are computed from.

    Only if each is computed from one element of each of them.
    """
    if insides := self.insides(value):
      return insides
    if self.primitive in _REARRANGES:
      return self.inputs()
    if not is_elementwise(self._raw):
      return []
    return [v for v in self.inputs() if v.size == value.size]


class _Value:
  """A value of a program."""

  def __init__(self, raw: Any, program: _Program, transposed: bool):
    self._raw = raw
    self._program = program
    self._transposed = transposed
    # Calls of one program share its variables.
    self.key = id(raw), id(program), transposed
    self.size = getattr(raw.aval, "size", None)

  @property
  def variable(self) -> Any:
    return self._raw.val if self._program.makers is None else self._raw

  def varies(self, name: axes.AxisName) -> bool:
    return name in axes.varying_axes(self._raw.aval)

  def outside(self) -> "_Value":
    """Returns the operand in the outer program that it is an argument for."""
    outer = self._program.makers and self._program.makers.get(self._raw)
    return outer.outside() if isinstance(outer, _Value) else self

  def equation(self) -> _Equation | None:
    """Returns the equation that computed it; None if there is none."""
    if self._program.makers is None:
      raw = self._raw.parent
    else:
      raw = self._program.makers.get(self._raw)
    if raw is None or isinstance(raw, _Value):
      return None
    return _Equation(raw, self._program, self._transposed)


def _traced(
  x: Any, program: _Program, transposed: bool = False
) -> list[_Value]:
  """Returns ``x`` if it belongs to a program being traced."""
  while isinstance(x, jax.core.Tracer):
    if not hasattr(x, "parent"):
      # vmap and grad wrap the values that they trace.
      x = getattr(x, "primal", getattr(x, "val", None))
    elif x.parent is None and (outer := _closed_over(x)) is not None:
      x = outer
    else:
      return [_Value(x, program, transposed)]
  return []


def _closed_over(x: Any) -> Any:
  """Returns the outer value of ``x``, which a branch or a loop closes over."""
  if isinstance(x.val, jax.extend.core.Literal):
    return None
  frame = getattr(getattr(x, "_trace", None), "frame", None)
  return getattr(frame, "constvar_to_val", {}).get(x.val)


_Read = Callable[[_Value, _Equation], tuple[int, list[_Value]]]


def _search(
  start: _Value, read: _Read, known: dict[Any, tuple[int, _Value]]
) -> int:
  """Returns the most that is found backwards from a value; see :class:`Known`.

  Args:
    start: the value.
    read: see ``Known.search``.
    known: what was found for values by key, which is added to. It includes the
      values, whose keys are valid as long as they exist.
  """
  path: list[tuple[_Value, Iterator[_Value]]] = []

  def enter(value: _Value) -> None:
    equation = value.equation()
    found, inputs = read(value, equation) if equation else (_NONE, [])
    known[value.key] = found, value
    path.append((value, iter(inputs)))

  def add(value: _Value, found: int) -> None:
    known[value.key] = max(found, known[value.key][0]), value

  if start.key not in known:
    enter(start)
  while path:
    value, inputs = path[-1]
    found, _ = known[value.key]
    before = None if found == _MOST else next(inputs, None)
    if before is None:
      path.pop()
      if path:
        add(path[-1][0], found)
      continue
    before = before.outside()
    if before.key in known:
      add(value, known[before.key][0])
    else:
      enter(before)
  return known[start.key][0]
