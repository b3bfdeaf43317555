"""A map that checks its results: those declared equal on all replicas must be equal.

``jax.shard_map`` with ``check_vma=False`` trusts its ``out_specs``: an array with
different values on each device may be declared as replicated, and then the replicas
train different models without any error. ``check_vma=True`` refuses that by type, but
also refuses correct programs: a loop from zeros, zeros like a gradient. So this module
follows each value of the traced program, from the arguments that differ between
replicas to the results. A collective over an axis makes a value equal along it; the
results of every other operation differ where its operands do.

It also finds communication that only some replicas may reach, in a branch or a loop
that depends on a replica's own values: replicas that disagree hang, or end the process.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.extend.core
from jax.sharding import PartitionSpec

from optax_dist._internal import axes

#: Along which axes a value differs, and which arguments of the program it gets that
#: from.
Origins = frozenset[tuple[axes.AxisName, Hashable]]

_EQUAL: Origins = frozenset()
#: The origin of a replica's index, which is no argument.
_INDEX = "axis_index"
#: The origin of a host callback's results, which may differ on each device.
_HOST = "io_callback"
#: The origin that a sum in groups adds, whose results may differ between groups.
GROUPS = "axis_index_groups"

#: The origin of values that only JAX's types show as possibly different.
TYPES = "types"

# Collectives whose result is equal along their axes.
_REDUCES = frozenset(
  """psum psum_invariant unreduced_psum pmax unreduced_pmax pmin unreduced_pmin
  pbroadcast all_gather all_gather_invariant all_gather_reduced""".split()  # noqa: SIM905
)
# Casts between types, which have axes but don't communicate.
_CASTS = frozenset(
  """pvary pcast preduced reduced_vary_cast_p
  vary_unreduced_cast_p""".split()  # noqa: SIM905
)


class Difference(NamedTuple):
  """A result that is declared equal along axes along which it differs.

  Attributes:
    output: the index of the result.
    path: where it is in this result.
    axes: the axes.
    origins: the labels of the arguments that it gets this from.
  """

  output: int
  path: str
  axes: tuple[axes.AxisName, ...]
  origins: frozenset[Hashable]


class Divergence(NamedTuple):
  """Communication in a branch or a loop that replicas may not all take.

  Attributes:
    collective: what communicates.
    axes: the axes along which replicas may disagree.
    origins: the labels of the arguments that decide.
  """

  collective: str
  axes: tuple[axes.AxisName, ...]
  origins: frozenset[Hashable]


def shard_map(
  fun: Callable[..., tuple[Any, ...]],
  *,
  mesh: Any,
  in_specs: tuple[Any, ...],
  out_specs: tuple[Any, ...],
  axis_names: set[axes.AxisName],
  labels: tuple[Any, ...],
  refuse: Callable[[list[Divergence], list[Difference]], NoReturn],
  check_vma: bool = False,
) -> Callable[..., tuple[Any, ...]]:
  """Returns ``jax.shard_map`` of a function, whose out_specs are checked.

  Args:
    fun: a function that returns a tuple.
    mesh: see ``jax.shard_map``, as for all that is not listed here.
    in_specs: for each argument, a spec, or a pytree of them that is a prefix of it.
    out_specs: for each result, the same.
    axis_names: the manual axes.
    labels: for each argument, a label, or a pytree of them that is a prefix of it.
    refuse: raises the error, if there is a reason.
    check_vma: whether JAX tracks types too.
  """

  def checked(*args: Any) -> tuple[Any, ...]:
    whole = jax.jit(fun)
    try:
      traced: Any = whole.trace(*args)
    except TypeError as error:
      if "manual axis types do not match" not in str(error):
        raise
      refuse([Divergence(TYPES, (), frozenset())], [])
    leaves = [
      frozenset(
        (name, label) for name in axes.names_in(spec) if name in axis_names
      )
      for spec, label in zip(
        _by_leaf(in_specs, args), _by_leaf(labels, args), strict=True
      )
    ]
    walk = _Walk()
    # Tracers that the function closes over come first. They come from outside of the
    # map, so they are equal on all replicas.
    closed_over = len(traced.jaxpr.jaxpr.invars) - len(leaves)
    leaves = [_EQUAL] * closed_over + leaves
    of_results = walk.results(traced.jaxpr, leaves, _EQUAL)
    differences = _differences(traced.out_info, of_results, out_specs)
    divergences = [
      Divergence(name, *_split(origins))
      for name, origins in walk.divergences.items()
    ]
    if divergences or differences:
      refuse(divergences, differences)
    return whole(*args)

  mapped = jax.shard_map(
    checked,
    mesh=mesh,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names=axis_names,
    check_vma=check_vma,
  )
  # Eagerly, a map loses the types of Explicit axes in the program in it.
  return jax.jit(mapped)


def _differences(
  results: Any, of_results: list[Origins], out_specs: tuple[Any, ...]
) -> list[Difference]:
  """Returns which results differ along axes along which they are declared equal."""
  paths = jax.tree_util.tree_leaves_with_path(results)
  declared = _by_leaf(out_specs, results)
  differences = []
  for (path, x), origins, spec in zip(paths, of_results, declared, strict=True):
    typed = {(name, TYPES) for name in axes.varying_axes(x)}
    wrong = {o for o in origins or typed if o[0] not in axes.names_in(spec)}
    if wrong:
      at, *rest = path
      differences.append(
        Difference(at.idx, jax.tree_util.keystr(tuple(rest)), *_split(wrong))
      )
  return differences


def _split(origins: Iterable[tuple[axes.AxisName, Hashable]]) -> Any:
  names = sorted({name for name, _ in origins}, key=str)
  return tuple(names), frozenset(label for _, label in origins)


def _by_leaf(prefix: Any, tree: Any) -> list[Any]:
  is_leaf = lambda x: isinstance(x, PartitionSpec)
  return jax.tree.leaves(
    jax.tree.broadcast(prefix, tree, is_leaf=is_leaf), is_leaf=is_leaf
  )


class _Walk:
  """Follows the values of a program and of its inner programs.

  Attributes:
    divergences: for each collective, the origins that decide whether a replica reaches
      it.
  """

  def __init__(self) -> None:
    self.divergences: dict[str, Origins] = {}

  def results(
    self, program: Any, args: Sequence[Origins], control: Origins
  ) -> list[Origins]:
    """Returns the origins of a program's results from those of its arguments.

    Args:
      program: a jaxpr, with its constants or without.
      args: the origins of its arguments.
      control: the origins of the conditions under which it runs.
    """
    jaxpr = getattr(program, "jaxpr", program)
    # A constant is equal on all replicas, since a replica's own values are arguments.
    known = dict.fromkeys(jaxpr.constvars, _EQUAL)
    known |= dict(zip(jaxpr.invars, args, strict=True))

    def of(variable: Any) -> Origins:
      is_literal = isinstance(variable, jax.extend.core.Literal)
      return _EQUAL if is_literal else known[variable]

    for equation in jaxpr.eqns:
      operands = [of(v) for v in equation.invars]
      new_origins = self._equation(equation, operands, control)
      known.update(zip(equation.outvars, new_origins, strict=True))
      for v in equation.invars if _writes(equation) else ():
        known[v] = _union(operands)
    return [of(v) for v in jaxpr.outvars]

  def _equation(
    self, equation: Any, operands: list[Origins], control: Origins
  ) -> list[Origins]:
    name = equation.primitive.name
    params = equation.params
    if name == "cond":
      return self._branches(params["branches"], operands, control)
    if name == "while" and not _writes(equation):
      return self._while(params, operands, control)
    if name == "scan" and not _writes(equation):
      return self._scan(params, operands, control)
    programs: list[Any] = list(jax.extend.core.jaxprs_in_params(params))
    if len(programs) == 1 and _fits(equation, programs[0]):
      return self.results(programs[0], operands, control)
    together = _union(operands)
    if programs:
      # The order in which the inner programs run is not known.
      for program in programs:
        args = [together] * len(program.invars)
        of_body = self.results(program, args, control | together)
        together = together.union(*of_body)
    else:
      together = self._operation(name, params, together, control)
    return [together] * len(equation.outvars)

  def _operation(
    self, name: str, params: Any, operands: Origins, control: Origins
  ) -> Origins:
    """Returns the origins of an operation without a program in it."""
    if name == "io_callback":
      return operands | {(axis, _HOST) for axis in axes.bound_axes()}
    over = set() if name in _CASTS else _axes_of(params)
    if not over:
      return operands
    decides = frozenset(o for o in control if o[0] in over)
    if decides and name != "axis_index":
      known = self.divergences.get(name, _EQUAL)
      self.divergences[name] = known | decides
    if name.removesuffix("_start") not in _REDUCES:
      return operands | {(axis, _INDEX) for axis in over}
    if params.get("axis_index_groups") is not None:
      differ = {o[0] for o in operands} & over
      return operands | {(axis, GROUPS) for axis in differ}
    return frozenset(o for o in operands if o[0] not in over)

  def _branches(
    self, branches: Any, operands: list[Origins], control: Origins
  ) -> list[Origins]:
    decides, *args = operands
    of_branches = [self.results(b, args, control | decides) for b in branches]
    same = [
      len(set(sources)) == 1
      for sources in zip(*map(_sources, branches), strict=True)
    ]
    return [
      _union(origins) | (_EQUAL if passed else decides)
      for *origins, passed in zip(*of_branches, same, strict=True)
    ]

  def _while(
    self, params: Any, operands: list[Origins], control: Origins
  ) -> list[Origins]:
    of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
    test, operands = operands[:of_test], operands[of_test:]
    consts, carry = operands[:of_body], operands[of_body:]
    sources = _sources(params["body_jaxpr"])
    passed = [s == of_body + i for i, s in enumerate(sources)]
    decides = _EQUAL

    def again(carry: list[Origins]) -> list[Origins]:
      nonlocal decides
      (wanted,) = self.results(
        params["cond_jaxpr"], [*test, *carry], control | decides
      )
      decides |= wanted
      new = self.results(
        params["body_jaxpr"], [*consts, *carry], control | decides
      )
      return [x if p else x | decides for x, p in zip(new, passed, strict=True)]

    return _until_settled(again, carry)

  def _scan(
    self, params: Any, operands: list[Origins], control: Origins
  ) -> list[Origins]:
    if "ft_in" in params:  # From JAX 0.11 on.
      parts = params["ft_in"].unpack()
      sizes = [len(part) for part in parts]
    else:
      sizes = [params["num_consts"], params["num_carry"]]
    first, count = sizes[:2]
    consts, carry = operands[:first], operands[first : first + count]
    xs = operands[first + count :]
    ys: list[Origins] = []

    def again(carry: list[Origins]) -> list[Origins]:
      nonlocal ys
      of_outputs = self.results(
        params["jaxpr"], [*consts, *carry, *xs], control
      )
      ys = of_outputs[count:]
      return of_outputs[:count]

    return [*_until_settled(again, carry), *ys]


def _until_settled(
  again: Callable[[list[Origins]], list[Origins]], carry: list[Origins]
) -> list[Origins]:
  """Returns the origins of a loop's carry, after any number of iterations."""
  while True:
    new = [old | x for old, x in zip(carry, again(carry), strict=True)]
    if new == carry:
      return carry
    carry = new


def _sources(program: Any) -> list[Hashable]:
  """Returns for each result the argument that it is, or something else."""
  jaxpr = getattr(program, "jaxpr", program)
  at: dict[Any, int] = {v: i for i, v in enumerate(jaxpr.invars)}
  is_literal = lambda v: isinstance(v, jax.extend.core.Literal)
  return [
    # Any other result counts as different from all arguments.
    object() if is_literal(v) else at.get(v, object())
    for v in jaxpr.outvars
  ]


def _union(origins: Iterable[Origins]) -> Origins:
  return functools.reduce(frozenset.union, origins, _EQUAL)


def _fits(equation: Any, program: Any) -> bool:
  """Whether an operation is a call of a program."""
  return len(program.invars) == len(equation.invars) and len(
    program.outvars
  ) == len(equation.outvars)


def _writes(equation: Any) -> bool:
  """Whether an operation changes its operands, which are references."""
  return any(
    "Ref" in type(getattr(v, "aval", None)).__name__ for v in equation.invars
  )


def _axes_of(params: Any) -> set[axes.AxisName]:
  """Returns the named axes of a collective; none for other operations."""
  names = params.get("axes", params.get("axis_name", ()))
  names = names if isinstance(names, tuple | list | frozenset) else (names,)
  return {n for n in names if not isinstance(n, int)} & set(axes.bound_axes())
