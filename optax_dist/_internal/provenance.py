"""The origin of a value: whether it was summed over an axis, and by what.

A user who averages a gradient twice, or sums one shard of a gradient as if it were a
replica's own, gets the right number or an error instead of a wrong step.

Under ``shard_map(check_vma=True)`` a type says that a value is equal along an
axis, but not why. ``jax.grad`` sums the gradient of a replicated parameter, a
mean over the replicas is also equal on all of them, and the two have the same
type. They differ in the traced program, so this module reads it, backwards from
the value. It needs a program, as under ``jax.jit`` or ``jax.pmap``; values
computed eagerly have no origin. docs/ordering.md lists what this analysis can detect.
"""

import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection
from typing import Any, Literal

import jax
import jax.extend.core
import optax

from optax_dist._internal import axes
from optax_dist._internal.leaves.elementwise import is_elementwise

_known_equal_axes: contextvars.ContextVar[frozenset[axes.AxisName]] = (
  contextvars.ContextVar("given", default=frozenset())
)

Origin = Literal["gradient", "caller"]
# Findings about the origin of a value, from the weakest to the strongest.
_NONE, _CALLER, _GRADIENT = range(3)

# Operations that keep the elements of an array, all of them or some.
_REARRANGES = frozenset(
  """all_to_all broadcast_in_dim concatenate dynamic_slice dynamic_update_slice
  expand_dims gather name pad ppermute reshape rev slice split squeeze
  transpose""".split()  # noqa: SIM905
)


def reduced_over(names: tuple[axes.AxisName, ...]) -> Any:
  """Returns a context whose results are final over the axes ``names``."""
  return jax.named_scope("".join(map(_scope, names)))


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
    token = _known_equal_axes.set(_known_equal_axes.get() | set(names))
    try:
      return inner.update(updates, state, params, **extra_args)
    finally:
      _known_equal_axes.reset(token)

  return optax.GradientTransformationExtraArgs(inner.init, update_fn)


class Known:
  """Findings about a program's values.

  Searches for several values of a program share it, so that a common dependency is read
  only once.
  """

  def __init__(self, is_specified: bool = False) -> None:
    # Whether the caller has specified which values are shards, so that the program need
    # not be read for that.
    self.is_specified = is_specified
    self._calls: dict[Any, list[_Call]] = {}
    # The finding for each question and value's key; and the value, which is kept alive
    # because its key is valid only as long as it exists.
    self._answers: dict[Any, dict[Any, tuple[int, _Value]]] = {}

  def search(self, x: Any, question: Any, read: "_Read") -> int:
    """Returns the most that is found in the origin of a value, backwards from it.

    Args:
      x: an array.
      question: a key for ``read``.
      read: takes a value that was computed, and this; returns what its operation
        shows, up to ``_GRADIENT``, and the values to go on with.
    """
    answers = self._answers.setdefault(question, {})
    shown: dict[Any, tuple[int, list[_Value]]] = {}
    start = _traced(x)
    path = [*start]
    while path:
      value = path[-1]
      if value.key not in shown:
        shown[value.key] = read(value, self) if value.maker else (_NONE, [])
      here, inputs = shown[value.key]
      missing = [v for v in inputs if v.key not in answers]
      if missing:
        path += missing
      else:
        most = max([here, *(answers[v.key][0] for v in inputs)])
        answers[value.key] = most, value
        path.pop()
    return max((answers[v.key][0] for v in start), default=_NONE)

  def definitions_in_branches(self, value: "_Value") -> list["_Value"]:
    """Returns the definitions of a value in the programs (branches) it comes from."""
    outs = value.maker.outvars
    key = id(value.maker), id(value.call), value.in_gradient
    if key not in self._calls:
      self._calls[key] = [
        _Call(value.maker, jaxpr, value.operands())
        for jaxpr in jax.extend.core.jaxprs_in_params(value.maker.params)
        if len(jaxpr.outvars) == len(outs)
      ]
    at = next(i for i, v in enumerate(outs) if v is value.variable)
    return [
      inside
      for call in self._calls[key]
      for inside in call.values(call.results[at], value.in_gradient)
    ]


def origin_of(
  x: Any, name: axes.AxisName, known: Known | None = None
) -> Origin | None:
  """Returns what reduced a value that does not vary over a tracked axis.

  Args:
    x: an array that does not vary over the axis, by its type.
    name: name of the bound and tracked axis.
    known: findings about other values, which are extended.

  Returns:
    ``"gradient"`` if ``jax.grad`` summed any part of it; ``"caller"`` if every
    reduction in its origin is explicit, such as ``jax.lax.pmean`` or one of
    this library; None if none is found, as for an argument of the mapped
    function.
  """

  def read(value: _Value, known: Known) -> tuple[int, list[_Value]]:
    if value.is_in(_scope(name)):
      return _CALLER, []
    if definitions_in_branches := known.definitions_in_branches(value):
      return _NONE, definitions_in_branches
    inputs = value.inputs()
    own = [v for v in inputs if v.varies(name)]
    if not own:
      return _NONE, inputs
    if value.in_gradient:
      return _GRADIENT, []
    # A mean of equal values changes nothing: find the values' origin.
    if not all(v.primitive == "pvary" for v in own):
      return _CALLER, []
    return _CALLER, [v for cast in own for v in cast.inputs()]

  origin = (known or Known()).search(x, ("origin", name), read)
  if origin == _GRADIENT:
    return "gradient"
  return (
    "caller" if origin == _CALLER or name in _known_equal_axes.get() else None
  )


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
  scatters = lambda value: (
    "reduce_scatter" in value.primitive and name in value.over()
  )
  return _is_made_by(scatters, x, ("scattered", name), known)


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
    remedy: the consequence and the remedy, for the message.
    known: see :func:`is_scattered`.

  Raises:
    ValueError: if it is, or if that can't be determined.
  """
  varying = axes.varying_axes(x)
  spread = [
    name
    for name in names
    if name in axes.mesh_axes()
    and (name in varying or not axes.is_tracked(name))
  ]
  has_program = _traced(x)
  known = known or Known()
  is_eager = isinstance(x, jax.core.Tracer) and not has_program
  if spread and is_eager and not known.is_specified:
    raise ValueError(
      f"{what} is computed outside of jax.jit, where it can't be told whether it is"
      f" each replica's own or one shard of a sum over axis {axes.listed(spread)},"
      " as the gradient of a parameter that is sharded over it: that would be"
      " summed again. Call the mapped step under jax.jit, which shows it."
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
  is_final = lambda value: value.is_in(_scope(name))
  return _is_made_by(is_final, x, ("reduced", name), known)


def _is_made_by(
  makes: Callable[["_Value"], bool],
  x: Any,
  question: Any,
  known: Known | None,
) -> bool:
  """Whether each element of a value is an element of such an operation's result."""

  def read(value: _Value, known: Known) -> tuple[int, list[_Value]]:
    if makes(value):
      return _GRADIENT, []
    if definitions_in_branches := known.definitions_in_branches(value):
      return _NONE, definitions_in_branches
    if value.primitive in _REARRANGES:
      return _NONE, value.inputs()
    if not is_elementwise(value.maker):
      return _NONE, []
    return _NONE, [v for v in value.inputs() if v.size == value.size]

  return (known or Known()).search(x, question, read) == _GRADIENT


@dataclasses.dataclass(frozen=True)
class _Value:
  """A value of a program, and the operation that computed it.

  Attributes:
    variable: the variable that it is in the program.
    type: its type.
    maker: the equation that computed it; None for an argument or a constant.
    call: the call of the program; None for a program that is being traced.
    of_gradient: whether the program, or what the value is for, is a gradient.
  """

  variable: Any
  type: Any
  maker: Any
  call: "_Call | None"
  of_gradient: bool

  @property
  def key(self) -> tuple:
    """Identifies it as long as it exists; calls of one program share variables."""
    return id(self.variable), id(self.call), self.of_gradient

  @property
  def size(self) -> int | None:
    """The number of its elements; None for what has none."""
    return getattr(self.type, "size", None)

  @property
  def primitive(self) -> str:
    """The name of the operation, or nothing."""
    return self.maker.primitive.name if self.maker else ""

  @functools.cached_property
  def in_gradient(self) -> bool:
    """Whether the operation is part of a gradient."""
    return self.of_gradient or "transpose(" in self._stack()

  def varies(self, name: axes.AxisName) -> bool:
    return name in axes.varying_axes(self.type)

  def is_in(self, scope: str) -> bool:
    """Whether the operation itself, not its gradient, is in a named scope."""
    return not self.in_gradient and scope in self._stack()

  def _stack(self) -> str:
    return str(self.maker.source_info.name_stack)

  def over(self) -> tuple[axes.AxisName, ...]:
    """The axes of the operation's communication."""
    names = self.maker.params.get("axis_name", ())
    return tuple(names) if isinstance(names, list | tuple) else (names,)

  def inputs(self) -> list["_Value"]:
    """The values that the operation takes."""
    return list(itertools.chain.from_iterable(self.operands()))

  def operands(self) -> list[list["_Value"]]:
    """For each argument of the operation, one value or none."""
    find = _traced if self.call is None else self.call.values
    return [find(v, self.in_gradient) for v in self.maker.invars]


class _Call:
  """One call of a finished program, such as a branch.

  Attributes:
    equation: the equation that calls it, whose id is valid as long as it exists.
    results: its results.
  """

  def __init__(self, equation: Any, jaxpr: Any, operands: list[list[_Value]]):
    self.equation = equation
    self.results = jaxpr.outvars
    self._makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    # A branch's arguments follow the predicate; a loop's body also gets its
    # results.
    pairs = zip(reversed(jaxpr.invars), reversed(operands), strict=False)
    self._operands = dict(pairs)

  def values(self, variable: Any, of_gradient: bool) -> list[_Value]:
    """Returns the value of a variable, for an argument its operand, or none."""
    if isinstance(variable, jax.extend.core.Literal):
      return []
    if operand := self._operands.get(variable):
      return operand
    maker = self._makers.get(variable)
    return [_Value(variable, variable.aval, maker, self, of_gradient)]


_Read = Callable[[_Value, Known], tuple[int, list[_Value]]]


def _traced(x: Any, of_gradient: bool = False) -> list[_Value]:
  """Returns ``x`` as a value of the program that is being traced, or nothing.

  JAX has no public way to ask a traced value how it was computed. This is the only
  function that reads private attributes of tracers instead.
  """
  while isinstance(x, jax.core.Tracer):
    if not hasattr(x, "parent"):
      # vmap and grad wrap the values that they trace.
      x = getattr(x, "primal", getattr(x, "val", None))
      continue
    if x.parent is None and not isinstance(x.val, jax.extend.core.Literal):
      # A branch or a loop closes over outer values.
      frame = getattr(getattr(x, "_trace", None), "frame", None)
      outer = getattr(frame, "constvar_to_val", {}).get(x.val)
      if outer is not None:
        x = outer
        continue
    return [_Value(x.val, x.aval, x.parent, None, of_gradient)]
  return []
