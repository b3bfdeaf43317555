"""Arithmetic on many small arrays, done on one buffer that contains them.

An optimizer applies the same elementwise computation to each leaf. On CPU that
is one kernel per leaf and array to compile and to start, which takes longer
than the arithmetic if leaves are small. So this module reads the traced program
of a function, finds the leaves with the same computations, and does these once,
on the concatenated leaves. Operations that are not elementwise, on large
leaves, or on a single leaf are unchanged.

Results do not change: each element is computed from the same elements by the
same operations, whichever arrays are concatenated.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as _core

from optax_dist._internal import axes
from optax_dist._internal.leaves.elementwise import is_elementwise
from optax_dist._internal.leaves.evaluate import evaluate
from optax_dist._internal.leaves.materialize import materialize
from optax_dist._internal.leaves.packing import (
  Joined,
  Packing,
  fitting,
  is_small,
  one_piece,
)

_CALLS = frozenset(["jit", "pjit", "closed_call", "core_call"])
# Operands that may be scalars next to an array: the first, or all but the
# second.
_TAKES_SCALARS = {"select_n": (0,), "clamp": (0, 2)}


def fuse_leaves(
  fun: Callable[..., Any],
  names: tuple[axes.AxisName, ...],
  joined: Sequence[Joined] = (),
) -> Callable[..., Any]:
  """Returns a function with the results of ``fun``, and fewer kernels.

  Args:
    fun: a function of pytrees of arrays that returns one.
    names: names of the axes over the replicas, bound when it is called.
    joined: for some of the arrays that it will get, the buffers that contain
      them.

  Returns:
    A function of the same arguments. It is ``fun`` itself except on CPU, in a
    ``shard_map`` or ``pmap`` over all axes of the mesh.

  Example:
    >>> double = fuse_leaves(lambda xs: [2 * x for x in xs], ())
    >>> double([jnp.ones(1), jnp.ones(2)])
    [Array([2.], dtype=float32), Array([2., 2.], dtype=float32)]
  """

  def fused(*args):
    leaves: list[Any] = jax.tree.leaves(args)
    if sum(is_small(x, names) and jnp.ndim(x) > 0 for x in leaves) < 2:
      return fun(*args)
    program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    results = _Program(program, leaves, names, joined).run()
    return jax.tree.unflatten(jax.tree.structure(shapes), results)

  return fused


@dataclasses.dataclass(eq=False)
class _Value:
  """A value of the program.

  Attributes:
    aval: its type.
    kind: "plain"; "uniform", an array of one number; "root": a small input
      array; or "element": computed from these, element by element.
    number: equal for values that are equal, possibly except for the position of
      their component in its group.
    now: its value, once it is known; for a uniform one, its number.
    component: the component of a root or an element.
  """

  aval: Any
  kind: str = "plain"
  number: Any = None
  now: Any = None
  component: "_Component | None" = None


class _Component:
  """Arrays of one shape that are computed elementwise from each other."""

  def __init__(self, value: _Value):
    self.roots = [value]
    self.steps: list[_Step] = []
    self.into: _Component | None = None
    self.group: _Group | None = None
    self.place = 0

  def join(self, other: "_Component") -> None:
    """Takes over the values of another component."""
    if other is not self:
      other.into = self
      self.roots += other.roots
      self.steps += other.steps


class _Step(NamedTuple):
  """An equation, its results, and its operands: values and literals."""

  equation: Any
  operands: list[Any]
  outs: list[_Value]

  def key(self) -> tuple:
    """A key that is equal for steps with the same operation on equal values."""
    params = sorted((k, repr(v)) for k, v in self.equation.params.items())
    return (
      self.equation.primitive.name,
      tuple(params),
      tuple(_number(x) for x in self.operands),
    )


class _Group:
  """Components with the same computations, concatenated."""

  def __init__(self, members: list[_Component], joined: dict[int, Joined]):
    self.joined = joined
    for place, member in enumerate(members):
      member.group, member.place = self, place
    self.leaves: dict[Any, list[Any]] = {}
    self.buffers: dict[Any, Any] = {}
    for column in zip(*(member.roots for member in members), strict=True):
      self.leaves[column[0].number] = [root.now for root in column]
    self.packing = Packing.side_by_side([m.roots[0].now for m in members])
    self.size = sum(m.roots[0].aval.size for m in members)

  def buffer(self, number: Any) -> Any:
    if number not in self.buffers:
      leaves = self.leaves[number]
      whole = one_piece([self.joined.get(id(x)) for x in leaves])
      if whole is None:
        (whole,) = self.packing.pack(leaves)
      self.buffers[number] = whole
    return self.buffers[number]

  def leaf(self, number: Any, place: int) -> Any:
    if number not in self.leaves:
      self.unpack([number])
    return self.leaves[number][place]

  def unpack(self, numbers: list[Any]) -> None:
    # Otherwise a buffer would be recomputed for each of its leaves.
    whole = materialize([self.buffers[number] for number in numbers])
    for number, buffer in zip(numbers, whole, strict=True):
      self.leaves[number] = self.packing.unpack([buffer])

  def compute(self, step: _Step) -> None:
    """Computes a step of all members."""
    number = step.outs[0].number
    if number in self.buffers:
      return
    takes = _TAKES_SCALARS.get(step.equation.primitive.name, ())
    self.buffers[number] = evaluate(
      step.equation,
      [self._whole(x, i in takes) for i, x in enumerate(step.operands)],
    )

  def _whole(self, x: Any, may_be_scalar: bool) -> Any:
    if not isinstance(x, _Value):
      return x.val
    if x.component is not None:
      return self.buffer(x.number)
    if may_be_scalar and x.kind == "plain":
      return x.now
    return jnp.broadcast_to(x.now, (self.size,))


class _Program:
  """A program that is read, sorted into groups, and run."""

  def __init__(
    self,
    program: Any,
    leaves: list[Any],
    names: tuple[axes.AxisName, ...],
    joined: Sequence[Joined],
  ):
    self._names = names
    self._joined = {id(x.leaf): x for x in joined}
    self._count = itertools.count()
    self._steps: list[_Step] = []
    self._scalars: dict[Any, Any] = {}
    given = [self._given(x) for x in (*program.consts, *leaves)]
    split = len(program.consts)
    self._outs = self._read(program.jaxpr, given[:split], given[split:])
    self._sort(given)

  def run(self) -> list[Any]:
    for step in self._steps:
      out = step.outs[0]
      group = _group(out)
      if group:
        group.compute(step)
      elif out.kind == "uniform":
        operands = [
          x.now if isinstance(x, _Value) else x.val for x in step.operands
        ]
        is_spread = step.equation.primitive.name == "broadcast_in_dim"
        out.now = (
          operands[0] if is_spread else evaluate(step.equation, operands)
        )
      else:
        operands = [_now(x) for x in step.operands]
        results = evaluate(step.equation, operands)
        if not step.equation.primitive.multiple_results:
          results = [results]
        for value, x in zip(step.outs, results, strict=True):
          value.now = x
    wanted: dict[_Group, dict[Any, None]] = {}
    for x in self._outs:
      group = _group(x)
      if group and x.number not in group.leaves:
        wanted.setdefault(group, {})[x.number] = None
    for group, numbers in wanted.items():
      group.unpack(list(numbers))
    return [_now(x) for x in self._outs]

  def _given(self, x: Any) -> _Value:
    value = _Value(jax.typeof(x), number=next(self._count), now=x)
    if jnp.ndim(x) and is_small(x, self._names):
      value.kind, value.component = "root", _Component(value)
    return value

  def _read(self, jaxpr: Any, consts: list[Any], args: list[Any]) -> list[Any]:
    values = dict(
      zip((*jaxpr.constvars, *jaxpr.invars), consts + args, strict=True)
    )
    look_up = lambda v: v if isinstance(v, _core.Literal) else values[v]
    for equation in jaxpr.eqns:
      operands = [look_up(v) for v in equation.invars]
      if equation.primitive.name in _CALLS:
        inside = equation.params["jaxpr"]
        outs = self._read(
          inside.jaxpr, [self._given(x) for x in inside.consts], operands
        )
      else:
        outs = [_Value(v.aval) for v in equation.outvars]
        self._add(_Step(equation, operands, outs))
      values.update(zip(equation.outvars, outs, strict=True))
    return [look_up(v) for v in jaxpr.outvars]

  def _add(self, step: _Step) -> None:
    """Classifies the results of a step."""
    self._steps.append(step)
    for out in step.outs:
      out.number = next(self._count)
    out, name = step.outs[0], step.equation.primitive.name
    arrays = [
      x for x in step.operands if isinstance(x, _Value) and x.aval.shape
    ]
    elements = [x for x in arrays if x.kind != "uniform"]
    if name == "broadcast_in_dim" and not step.operands[0].aval.shape:
      out.kind, out.number = "uniform", _number(step.operands[0])
    elif not is_elementwise(step.equation) or len(step.outs) > 1:
      return
    elif not elements:
      out.kind = "uniform" if arrays else "plain"
      out.number = self._scalars.setdefault(step.key(), out.number)
    elif all(
      x.component is not None and x.aval.shape == out.aval.shape
      for x in elements
    ):
      component, *others = [
        _found(x.component) for x in elements if x.component
      ]
      for other in others:
        # It may have been merged into the component by now.
        component.join(_found(other))
      component.steps.append(step)
      out.kind, out.component = "element", component

  def _sort(self, given: list[_Value]) -> None:
    """Sorts components with the same computations into groups."""
    alike: dict[Any, list[_Component]] = {}
    keys: dict[Any, int] = {}
    found = [x.component for x in given if x.component is not None]
    for component in found:
      if component.into is None and component.steps:
        alike.setdefault(_signature(component, keys), []).append(component)
    for members in alike.values():
      members = fitting(members, lambda m: m.roots[0].aval)
      if len(members) > 1:
        _Group(members, self._joined)


def _group(x: Any) -> _Group | None:
  """Returns the group of a value or literal; None if it is on its own."""
  if not isinstance(x, _Value) or x.component is None:
    return None
  return _found(x.component).group


def _found(component: _Component) -> _Component:
  while component.into is not None:
    component = component.into
  return component


def _signature(component: _Component, keys: dict[Any, int]) -> Any:
  """Numbers the values of a component; returns what groups have in common.

  Keys have numbers too: a key in a key would double its size at each step.
  """
  component.roots.sort(key=lambda x: x.number)
  for i, x in enumerate(component.roots):
    x.number = ("root", i, str(x.aval.dtype), axes.varying_axes(x.aval))
  numbers = [x.number for x in component.roots]
  for step in sorted(component.steps, key=lambda step: step.outs[0].number):
    number = keys.setdefault(step.key(), len(keys))
    step.outs[0].number = ("step", number)
    numbers.append(step.outs[0].number)
  return tuple(numbers)


def _number(x: Any) -> Any:
  if isinstance(x, _Value):
    return x.number
  return ("literal", str(x.aval), repr(x.val))


def _now(x: Any) -> Any:
  """Returns a value as an array."""
  if not isinstance(x, _Value):
    return x.val
  if x.kind == "uniform":
    return jnp.broadcast_to(x.now, x.aval.shape)
  group = _group(x) if x.kind == "element" else None
  if group and x.component is not None:
    return group.leaf(x.number, _found(x.component).place)
  return x.now
