"""Keyword arguments of ``update`` that nobody uses are mistakes.

Optax hands further keyword arguments from transformation to transformation, and
each takes those that it knows. So a misspelt one reaches the last and is lost
without notice. Which ones an inner transformation knows, its signature does not
tell: a chain takes any. What it *uses* can be seen by tracing it with an argument
that reports its first use.
"""

import difflib
from collections.abc import Iterable
from typing import Any

import jax

# What optax's own transformations take. Training loops hand these to every
# optimizer, whether it uses them or not.
CONVENTIONAL = frozenset({"value", "grad", "value_fn", "grad_fn", "obj_fn"})


class _UsedError(Exception):
  """Somebody looked at the argument."""


def _used(self, *args, **kwargs):
  raise _UsedError


_SPECIAL = (
  "call getattr getitem iter len bool int float index contains array jax_array"
  " add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow"
  " rpow matmul rmatmul neg pos abs invert and rand or ror xor rxor eq ne lt le"
  " gt ge"
)

_Reporter = type(
  "_Reporter",
  (),
  {f"__{name}__": _used for name in _SPECIAL.split()}
  | {"__hash__": object.__hash__},
)


def check_used(
  user: str,
  update: Any,
  args: tuple,
  extra_args: dict[str, Any],
  known: Iterable[str] = (),
) -> None:
  """Checks that the inner transformation uses each of ``extra_args``.

  Args:
    user: what got them, for the message.
    update: the ``update`` of the inner transformation.
    args: what it is called with.
    extra_args: the keyword arguments that ``user`` itself does not know.
    known: those that it knows, for the message.

  Raises:
    TypeError: if one is never used, and is none that training loops hand to
      every optimizer.
  """
  for name in extra_args.keys() - CONVENTIONAL:
    probed = extra_args | {name: _Reporter()}
    try:
      jax.eval_shape(lambda probed=probed: update(*args, **probed))
    except Exception:
      # Used; or else the call itself will say what is wrong.
      continue
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    raise TypeError(
      f"{user}: update got an unexpected keyword argument {name!r}, which neither"
      f" {user} nor the transformation in it uses.{hint}"
    )
