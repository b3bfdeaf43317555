"""Evaluates one equation of a traced program, like `jax.core.eval_jaxpr`."""

from collections.abc import Sequence
from typing import Any

from jax._src import source_info_util as _source  # As in eval_jaxpr.


def evaluate(equation: Any, operands: Sequence[Any]) -> Any:
  """Returns the results of an equation for given operands.

  Errors and profiles name the line that the equation comes from.

  Returns:
    An array, or a list of arrays if its primitive has several results.

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
