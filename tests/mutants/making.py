"""Makes mutants of a module: copies of its code with one small fault each."""

from __future__ import annotations

import ast
import collections
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

# What each operator becomes: its boundary moved, and its opposite.
_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
  ast.Lt: (ast.LtE, ast.GtE),
  ast.LtE: (ast.Lt, ast.Gt),
  ast.Gt: (ast.GtE, ast.LtE),
  ast.GtE: (ast.Gt, ast.Lt),
  ast.Eq: (ast.NotEq,),
  ast.NotEq: (ast.Eq,),
  ast.Is: (ast.IsNot,),
  ast.IsNot: (ast.Is,),
  ast.In: (ast.NotIn,),
  ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
  ast.Add: ast.Sub,
  ast.Sub: ast.Add,
  ast.Mult: ast.FloorDiv,
  ast.FloorDiv: ast.Mult,
  ast.Mod: ast.FloorDiv,
  ast.BitOr: ast.BitAnd,
  ast.BitAnd: ast.BitOr,
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Their arguments may come in any order.
_SYMMETRIC = ("min", "max", "isinstance", "union", "overlap")
_VALUES = ast.Name | ast.Attribute | ast.Call | ast.Subscript
_REMOVABLE = (
  ast.Assign,
  ast.AugAssign,
  ast.Expr,
  ast.Raise,
  ast.Continue,
  ast.Break,
)


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One mutant.

  Attributes:
    name: where it is and what it changes, without line numbers.
    line: line of the change.
    tree: code of the whole module.
  """

  name: str
  line: int
  tree: ast.Module


def mutants(source: str) -> Iterator[Mutant]:
  """All mutants of a module, in the order of its lines."""
  tree = ast.parse(source)
  seen: collections.Counter[str] = collections.Counter()
  for where, path, node in _nodes(tree):
    for new in _replacements(node):
      if isinstance(new, ast.Pass) and not _is_in_function(tree, path):
        continue  # Importing the module would fail, or nothing change.
      if ast.unparse(new) == ast.unparse(node):
        continue
      name = f"{where}: {_text(node)} -> {_text(new)}"
      seen[name] += 1
      if seen[name] > 1:
        name += f" (#{seen[name]})"
      yield Mutant(name, node.lineno, _replaced(tree, path, new))


def changed(source: str, where: str, old: str, new: str) -> Mutant:
  """The mutant that has another expression or statement in a function.

  Args:
    source: of the module.
    where: the function, with its class.
    old: what is there once, however it is formatted.
    new: what stands there instead.

  Raises:
    ValueError: it is not there, or more than once.
  """
  tree = ast.parse(source)
  wanted = ast.unparse(ast.parse(old))
  result = [
    (path, node)
    for place, path, node in _nodes(tree)
    if place == where and ast.unparse(node) == wanted
  ]
  # A statement that is an expression is there as both.
  if len(result) == 2 and isinstance(result[0][1], ast.Expr):
    del result[1 if isinstance(ast.parse(new).body[0], ast.Pass) else 0]
  if len(result) != 1:
    raise ValueError(
      f"{where} has {len(result)} times {old!r}: bring it up to date."
    )
  ((path, node),) = result
  (stands,) = ast.parse(new).body
  if isinstance(node, ast.expr):
    assert isinstance(stands, ast.Expr)
    stands = stands.value
  name = f"{where}: {_text(node)} -> {_text(stands)}"
  return Mutant(name, node.lineno, _replaced(tree, path, stands))


def _text(node: ast.AST) -> str:
  text = " ".join(ast.unparse(node).split())
  return text if len(text) <= 70 else f"{text[:50]} ... {text[-15:]}"


# The way from a module to a node: names of fields, and places in lists.
_Path = tuple[tuple[str, int | None], ...]


def _nodes(
  tree: ast.Module,
) -> Iterator[tuple[str, _Path, ast.expr | ast.stmt]]:
  """Expressions and statements, with the function they are in."""

  def below(
    node: ast.AST, where: str, path: _Path
  ) -> Iterator[tuple[str, _Path, ast.expr | ast.stmt]]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      where = f"{where}.{node.name}" if where else node.name
    if isinstance(node, ast.expr | ast.stmt):
      yield where or "module", path, node
    for field, value in ast.iter_fields(node):
      if _is_left_alone(node, field):
        continue
      if isinstance(value, ast.AST):
        yield from below(value, where, (*path, (field, None)))
      elif isinstance(value, list):
        for i, one in enumerate(value):
          if isinstance(one, ast.AST):
            yield from below(one, where, (*path, (field, i)))

  return below(tree, "", ())


def _is_left_alone(node: ast.AST, field: str) -> bool:
  """Types, decorators, and the words of errors."""
  if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import):
    return True
  return field in ("annotation", "returns", "decorator_list", "bases")


def _is_in_function(tree: ast.Module, path: _Path) -> bool:
  node: Any = tree
  for field, place in path[:-1]:
    node = getattr(node, field)
    node = node if place is None else node[place]
    if isinstance(node, ast.FunctionDef):
      return True
  return False


def _replaced(tree: ast.Module, path: _Path, new: ast.AST) -> ast.Module:
  """A copy of the tree with another node at the end of the path.

  Only the nodes on the path are copied: others can be shared.
  """

  def copied(node: ast.AST, rest: _Path) -> ast.AST:
    if not rest:
      return new
    (field, place), *deeper = rest
    fresh = copy.copy(node)
    value = getattr(node, field)
    if place is None:
      setattr(fresh, field, copied(value, tuple(deeper)))
    else:
      items = list(value)
      items[place] = copied(items[place], tuple(deeper))
      setattr(fresh, field, items)
    return fresh

  result = copied(tree, path)
  assert isinstance(result, ast.Module)
  return ast.fix_missing_locations(result)


def _like(node: ast.expr | ast.stmt, **changes: object) -> ast.AST:
  new = copy.copy(node)
  for name, value in changes.items():
    setattr(new, name, value)
  return new


def _not(node: ast.expr) -> ast.expr:
  return ast.copy_location(ast.UnaryOp(ast.Not(), node), node)


def _replacements(node: ast.expr | ast.stmt) -> Iterator[ast.AST]:
  """The nodes that may stand in place of this one."""
  match node:
    case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
      for kind in _COMPARISONS[type(op)]:
        yield _like(node, ops=[kind()])
    case ast.Compare(ops=ops):
      for i, op in enumerate(ops):
        for kind in _COMPARISONS[type(op)]:
          yield _like(node, ops=[*ops[:i], kind(), *ops[i + 1 :]])
    case ast.BoolOp(op=op, values=values):
      other = ast.Or() if isinstance(op, ast.And) else ast.And()
      yield _like(node, op=other)
      for i in range(len(values)):
        rest = values[:i] + values[i + 1 :]
        yield rest[0] if len(rest) == 1 else _like(node, values=rest)
    case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
      yield operand
    case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
      yield _like(node, op=_ARITHMETIC[type(op)]())
    case ast.Constant(value=bool() as value):
      yield _like(node, value=not value)
    case ast.Constant(value=int() as value):
      yield _like(node, value=value + 1)
      yield _like(node, value=value - 1)
    case ast.IfExp(test=test) if not isinstance(test, ast.Compare):
      yield _like(node, test=_not(test))
    case ast.Call():
      yield from _calls(node)
    case ast.If(test=test) | ast.While(test=test):
      if not isinstance(test, ast.Compare | ast.UnaryOp):
        yield _like(node, test=_not(test))
    case ast.AugAssign(op=op) if type(op) in _ARITHMETIC:
      yield _like(node, op=_ARITHMETIC[type(op)]())
    case ast.Return(value=value) if value is not None:
      if not (isinstance(value, ast.Constant) and value.value is None):
        yield _like(node, value=ast.Constant(None))
    case ast.FunctionDef(body=body) if len(body) > 2:
      rest = [one for one in body[1:] if not isinstance(one, ast.Expr)]
      if rest and not any(isinstance(n, ast.Return) for n in ast.walk(node)):
        yield _like(node, body=[ast.Return(None)])
  if isinstance(node, _REMOVABLE) and not _is_docstring(node):
    yield ast.copy_location(ast.Pass(), node)
  if isinstance(node, ast.Return) and node.value is None:
    yield ast.copy_location(ast.Pass(), node)


def _is_docstring(node: ast.stmt) -> bool:
  return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _calls(node: ast.Call) -> Iterator[ast.AST]:
  name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
  args = node.args
  if name in _FUNCTIONS:
    yield _like(node, func=ast.Name(_FUNCTIONS[name], ast.Load()))
    if len(args) > 1:
      # Without a bound, or the bound alone.
      yield from (one for one in args if not isinstance(one, ast.Starred))
  for i in range(len(args) - 1):
    # Arguments of other types fail at once, so they cost little to try.
    if isinstance(args[i], _VALUES) and isinstance(args[i + 1], _VALUES):
      swapped = [*args[:i], args[i + 1], args[i], *args[i + 2 :]]
      if name not in _SYMMETRIC:
        yield _like(node, args=swapped)
