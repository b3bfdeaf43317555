"""Errors for results that are declared equal on all replicas, and are not."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

from optax_dist._internal import axes
from optax_dist._internal.replication import (
  GROUPS,
  TYPES,
  Difference,
  Divergence,
)

#: The kinds of a step's results, for messages and remedies.
PARAMS, STATE, VARIABLES = "parameters", "parts of the state", "variables"

_MAX_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Refusal:
  """Raises the error for a step whose replicas would not agree.

  Attributes:
    transform_name: the function with the step, for the message.
    names: names of the axes over the replicas.
    outputs: the kind of each result of the step.
  """

  transform_name: str
  names: tuple[axes.AxisName, ...]
  outputs: Sequence[str]

  def __call__(
    self, divergences: list[Divergence], differences: list[Difference]
  ) -> NoReturn:
    """Raises the error."""
    if divergences:
      raise ValueError(self._diverges(divergences[0]))
    of = lambda what: [d for d in differences if self.outputs[d.output] == what]
    worst = next(filter(None, map(of, (PARAMS, STATE, VARIABLES))))
    raise ValueError(self._differs(self.outputs[worst[0].output], worst))

  @property
  def _axis(self) -> Any:
    return self.names[0] if len(self.names) == 1 else self.names

  @property
  def _reduction(self) -> str:
    return f"optax_dist.cross_shard({self._axis!r})"

  def _diverges(self, divergence: Divergence) -> str:
    if divergence.collective == TYPES:
      return (
        f"{self.transform_name}: a branch or a loop mixes values that differ between"
        " replicas or shards with values that don't, as optax.apply_if_finite or"
        " optax.MultiSteps around cross_shard does. Reduce before it:"
        f" optax.chain({self._reduction}, optax.apply_if_finite(...))."
      )
    given = _arguments(divergence.origins)
    return (
      f"{self.transform_name}: there is communication over axis"
      f" {axes.listed(divergence.axes)} ({divergence.collective}) in a branch or a"
      " loop that"
      f" each replica takes by values of its own{given}, as with optax.apply_if_finite"
      " around cross_shard. Replicas that disagree would wait for each other"
      f" forever. Reduce before it: optax.chain({self._reduction},"
      " optax.apply_if_finite(...)). sync_replicas drops gradients that are not"
      " finite itself."
    )

  def _differs(self, what: str, differences: list[Difference]) -> str:
    which = ", ".join(d.path for d in differences[:_MAX_NAMED])
    more = f" and {len(differences) - _MAX_NAMED} more" * (
      len(differences) > _MAX_NAMED
    )
    over = axes.listed({name for d in differences for name in d.axes})
    origins = frozenset[object]().union(*(d.origins for d in differences))
    differ = (
      f"{self.transform_name}: {what} {which}{more} differ between replicas along axis"
      f" {over}"
    )
    if origins == {TYPES}:
      return (
        f"{differ} after `tx`, as far as JAX can tell: reduce all that they are"
        f" computed from, as in optax.chain({self._reduction}, optax.partition(...))."
      )
    shards = {name for d in differences for name in d.axes} - set(self.names)
    if shards:
      return (
        f"{differ} after `tx`, though they are not sharded over it: something in `tx`"
        " takes one shard for the whole, as optax.clip_by_global_norm does. Use"
        " optax_dist.clip_by_global_norm over all axes, or sum what it computes over"
        f" {axes.listed(shards)}."
      )
    given = _arguments(origins)
    if given and all(map(_argument, origins - {GROUPS})):
      return (
        f"{differ} after `tx`{given}, though all replicas share them: give one"
        " value for all, such as the mean over the replicas."
      )
    if what == VARIABLES:
      return (
        f"{differ} after the loss, and can't be averaged, because they are not"
        " floating-point. Compute them from what is equal on all replicas, or"
        " return them with has_aux=True."
      )
    groups = (
      " (`axis_index_groups` makes only the replicas of a group equal)"
      * (GROUPS in origins)
    )
    if what == PARAMS:
      return (
        f"{differ} after `tx`, though all replicas share them{groups}: put"
        f" {self._reduction} in front of it, for all parameters, as in"
        f" optax.chain({self._reduction}, optax.adam(1e-3))."
      )
    # The last field in a path such as [1][0].trace['w'].
    field = differences[0].path.rpartition(".")[2].partition("[")[0]
    by_field = f", {field!r}" * bool(field)
    return (
      f"{differ} after `tx`, though all replicas share them{groups}: put"
      f" {self._reduction} in front of what they belong to. If it is meant to see each"
      " replica's own gradient, say that it has a state of each replica:"
      f" optax_dist.per_replica(..., {self._axis!r}{by_field})."
    )


def argument(name: str) -> str:
  """Returns the label of a keyword argument of each replica."""
  return f"`{name}`"


def _argument(origin: object) -> bool:
  return isinstance(origin, str) and origin.startswith("`")


def _arguments(origins: frozenset) -> str:
  """Returns which keyword arguments are among the origins, for a message."""
  given = sorted(filter(_argument, origins))
  return f" (because of argument {', '.join(given)} of each)" if given else ""
