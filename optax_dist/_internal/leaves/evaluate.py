"""Computes one equation of a traced program, as `jax.core.eval_jaxpr` does."""

from collections.abc import Sequence
from typing import Any

from jax._src import source_info_util as _source  # Used there, too.


def evaluate(equation: Any, operands: Sequence[Any]) -> Any:
  """Returns what an equation computes of operands: of its own, or of others.

  Errors and profiles name the line that the equation comes from.

  Returns:
    An array, or a list of them where its primitive has several results.

  Example:
    >>> import jax
    >>> (equation,) = jax.make_jaxpr(lambda x: x * x)(3).eqns
    >>> evaluate(equation, [4, 5]).item()
    20
  """
  stack = _source.current_name_stack() + equation.source_info.name_stack
  with (
    _source.user_context(equation.source_info.traceback, name_stack=stack),
    equation.ctx.manager,
  ):
    return equation.primitive.bind(
      *operands, **equation.primitive.get_bind_params(equation.params)
    )
