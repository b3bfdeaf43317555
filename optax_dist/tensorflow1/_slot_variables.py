"""Which variables of a TensorFlow checkpoint are an optimizer's slots.

Their names have three forms, each in the scope in which the optimizer was built:

* `training/dense/kernel/Adam`, `training/dense/kernel/Adam_1`: of the classes in
  `tf.compat.v1.train`, numbered in the order in which they are created;
* `training/Adam/dense/kernel/m`: Keras's, where the class is part of the scope;
* `dense/kernel/adam_m`: of BERT's AdamWeightDecayOptimizer, and of others that
  call `tf.get_variable` themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

# In the order in which TensorFlow's optimizers create them: a variable's first
# slot is called `Adam`, the next one `Adam_1`, whatever they are for.
ORDER = (
  "rms",
  "mg",
  "accum",
  "accum_update",
  "linear",
  "accumulator",
  "gradient_accumulator",
  "gradient_squared_accumulator",
  "m",
  "v",
  "v_hat",
  "vhat",
  "momentum",
)
# The suffix of a variable's moving average, which is no slot.
AVERAGE = "ExponentialMovingAverage"


class Form(NamedTuple):
  """How the slots of an optimizer are named.

  Attributes:
    scope: what precedes the variable, with a slash at its end; or empty.
    name: what follows it: "Adam"; "adam_" before the slot's name; or empty, if
      that alone follows.
  """

  scope: str
  name: str

  @property
  def pattern(self) -> str:
    """The names, with `*` for a variable; and `{slot}` where that follows."""
    slot = "{slot}" * (not self.name or self.name.endswith("_"))
    return f"{self.scope}*/{self.name}{slot}"

  def is_called(self, name: str) -> bool:
    """Whether this is what the user calls `name`."""
    parts = {self.name, self.name.rstrip("_"), self.pattern}
    return name in parts | set(self.scope.split("/")[:-1])


class SlotsNotFoundError(KeyError):
  """A slot is in no checkpoint of this kind; or in several variables."""

  def __str__(self) -> str:
    # The message as it is: that of a KeyError is quoted.
    return str(self.args[0])


def find(
  known: frozenset[str],
  slots: Mapping[str, Sequence[str]],
  name: str | None,
  more: bool,
) -> dict[str, tuple[Form, dict[str, str]]]:
  """Finds the slots of all variables.

  Args:
    known: the names of all variables in the checkpoint.
    slots: by variable, the names of its slots.
    name: of the optimizer, as the user gave it; None to find it.
    more: whether the checkpoint may have more slots of a variable.

  Returns:
    By variable: the form, and the name in the checkpoint of each slot.

  Raises:
    SlotsNotFoundError: if they are not there, or in more than one form.
  """
  forms = {
    variable: {
      form: names
      for form, names in _forms(
        known, variable, sorted(of, key=ORDER.index), more
      )
      if name is None or form.is_called(name)
    }
    for variable, of in slots.items()
  }
  common = set.intersection(*map(set, forms.values())) if forms else set()
  result = {}
  for variable, by_form in forms.items():
    # All variables have one optimizer, or with a partition each group has its own.
    fits = common or set(by_form)
    if len(fits) != 1:
      raise SlotsNotFoundError(
        _problem(known, variable, slots[variable], by_form, name)
      )
    (form,) = fits
    result[variable] = form, by_form[form]
  return result


def averages(known: frozenset[str], variable: str) -> list[str]:
  """Returns the names of a variable's moving averages, in any scope."""
  return [
    f"{scope}{variable}/{AVERAGE}"
    for scope, rest in _suffixes(known, variable).items()
    if AVERAGE in rest
  ]


def _suffixes(known: frozenset[str], variable: str) -> dict[str, set[str]]:
  """Returns, by scope, what follows a variable's name in others' names."""
  suffixes: dict[str, set[str]] = {}
  for other in known:
    start, slash, suffix = other.rpartition("/")
    scope = start.removesuffix(variable)
    if not slash or not start.endswith(variable):
      continue
    # The slot of another variable, whose name ends like this one's.
    if scope and (not scope.endswith("/") or start in known):
      continue
    suffixes.setdefault(scope, set()).add(suffix)
  return suffixes


def _forms(
  known: frozenset[str], variable: str, slots: list[str], more: bool
) -> Iterator[tuple[Form, dict[str, str]]]:
  """Yields the forms of names in which all of a variable's slots exist."""
  for scope, suffixes in _suffixes(known, variable).items():
    full = lambda rest, scope=scope: f"{scope}{variable}/{rest}"
    # Variables that are named after their slots.
    for prefix in {
      suffix.removesuffix(slot)
      for suffix in suffixes
      for slot in slots
      if suffix == slot or suffix.endswith(f"_{slot}")
    }:
      if all(f"{prefix}{slot}" in suffixes for slot in slots):
        names = {slot: full(f"{prefix}{slot}") for slot in slots}
        yield Form(scope, prefix), names
    numbered = {x for x in suffixes if not _is_named_after_a_slot(x)}
    for name in {re.sub(r"_\d+$", "", x) for x in numbered} - {AVERAGE}:
      here = [name, *(f"{name}_{i}" for i in range(1, len(slots)))]
      there = {
        x for x in numbered if re.fullmatch(rf"{re.escape(name)}(_\d+)?", x)
      }
      if set(here) == there or (more and set(here) < there):
        names = dict(zip(slots, map(full, here), strict=True))
        yield Form(scope, name), names


def _is_named_after_a_slot(suffix: str) -> bool:
  return any(suffix == s or suffix.endswith(f"_{s}") for s in ORDER)


def _problem(
  known: frozenset[str],
  variable: str,
  slots: Sequence[str],
  by_form: Mapping[Form, object],
  name: str | None,
) -> str:
  what = f"the slots {sorted(slots)} of the variable {variable!r}"
  if by_form:
    patterns = sorted(form.pattern for form in by_form)
    return (
      f"The checkpoint has several variables for {what}: pass `name=`, one of"
      f" {patterns}, in which * is the variable"
    )
  others = sorted(x for x in known - {variable} if f"/{variable}/" in f"/{x}/")
  called = f" called {name!r}" if name else ""
  has = f"the names {others}" if others else "no name with this variable in it"
  return (
    f"The checkpoint does not have {what}{called}; it has {has}. If they are"
    " those of another optimizer, make the state with that one. If there are no"
    " slots in it (RETURNN saves none), pass () for the state, and start the"
    " optimizer anew with init(params)"
  )
