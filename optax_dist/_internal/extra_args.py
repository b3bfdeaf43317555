"""Detects keyword arguments of ``update`` that nothing uses: they are mistakes.

Optax passes extra keyword arguments from transformation to transformation, and
each takes those that it knows. So a misspelled one reaches the last and is
ignored silently. The signature of an inner transformation does not say which
ones it knows: a chain accepts any. To find out which it *uses*, it is traced
with an argument that can't be used.
"""

import difflib
from collections.abc import Iterable
from typing import Any

import jax

# Extra arguments of optax's own transformations. Training loops pass these to
# every optimizer, whether it uses them or not.
CONVENTIONAL = frozenset({"value", "grad", "value_fn", "grad_fn", "obj_fn"})


class _Unusable:
  """An argument that fails where it is used, as any object does but in these cases."""

  def __getattr__(self, name: str) -> Any:
    raise TypeError

  def __bool__(self) -> bool:
    raise TypeError

  def __eq__(self, other: object) -> bool:
    raise TypeError

  __hash__ = object.__hash__


def check_used(
  user: str,
  update: Any,
  args: tuple,
  extra_args: dict[str, Any],
  known: Iterable[str] = (),
) -> None:
  """Checks that the inner transformation uses each of ``extra_args``.

  Args:
    user: the transform that got them, for the message.
    update: the ``update`` of the inner transformation.
    args: the arguments it is called with.
    extra_args: the keyword arguments that ``user`` itself does not take.
    known: those that it does take, for the message.

  Raises:
    TypeError: if one is never used, and isn't one that training loops pass to
      every optimizer.
  """
  for name in extra_args.keys() - CONVENTIONAL:
    probed = extra_args | {name: _Unusable()}
    try:
      jax.eval_shape(lambda probed=probed: update(*args, **probed))
    except Exception:
      # It is used; or the call itself will report what is wrong.
      continue
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    raise TypeError(
      f"{user}: update got an unexpected keyword argument {name!r}, which neither"
      f" {user} nor the transformation in it uses.{hint}"
    )
