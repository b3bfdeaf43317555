"""What a strategy of ``optax-dist train`` is."""

from __future__ import annotations

import abc
import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # These are slow to import: see optax_dist.cli.
  import jax
  import matplotlib.axes
  import optax

  from optax_dist.cli.train import digits

Record = dict[str, Any]
"""One line of ``metrics.jsonl``."""


@dataclasses.dataclass(frozen=True)
class Run:
  """What a strategy builds its program from.

  Attributes:
    args: the parsed arguments, the strategy's own among them.
    mesh: the replicas' devices, along one axis.
    axis_name: that axis.
    loss_fn: from parameters and a batch, of any size, to the mean loss over the
      batch's images: a float32 scalar.
    optimizer: what turns gradients into updates; knows nothing of replicas.
    steps: the number of steps that will be made.
  """

  args: argparse.Namespace
  mesh: jax.sharding.Mesh
  axis_name: str
  loss_fn: Callable[[optax.Params, digits.Batch], jax.Array]
  optimizer: optax.GradientTransformation
  steps: int


@dataclasses.dataclass(frozen=True)
class Program:
  """How a strategy trains. The state may be any pytree of arrays.

  Attributes:
    init: from parameters to the state, laid out over the mesh as ``step`` leaves
      it.
    step: from the state and a batch (whose leading axis lies along the mesh's) to
      the next state and metrics: a mapping of scalars with ``"loss"`` in it.
      Wrapped in ``jax.jit``; it is compiled once, before the first step, and may
      donate the state.
    eval_params: from the state to the parameters that are evaluated, without
      a replica axis: the replicas' common ones, or the center.
    replica_params: from the state to every replica's parameters, with a leading
      replica axis, where replicas have parameters of their own: each is evaluated
      too.
    summary: from all records to lines that are printed at the end.
    panels: each draws one more picture into the report, from all records.
  """

  init: Callable[[optax.Params], Any]
  step: jax.stages.Wrapped
  eval_params: Callable[[Any], optax.Params]
  replica_params: Callable[[Any], optax.Params] | None = None
  summary: Callable[[Sequence[Record]], Sequence[str]] = lambda records: ()
  panels: Sequence[
    Callable[[matplotlib.axes.Axes, Sequence[Record]], None]
  ] = ()


class Strategy(abc.ABC):
  """One way to train a model on several replicas.

  A strategy is one file in :mod:`optax_dist.cli.train.strategies`, named after it, with
  an instance of a subclass of this class as its ``STRATEGY``.

  Attributes:
    summary: what it does, in one line of help.
  """

  summary: ClassVar[str]

  def add_arguments(self, group: argparse._ArgumentGroup) -> None:  # noqa: B027
    """Adds the flags that only this strategy has."""

  def check(self, args: argparse.Namespace) -> None:  # noqa: B027
    """Raises :class:`errors.CommandError` if the arguments do not go together.

    Called before anything slow. ``args.replicas`` is None if it was not given.
    """

  @abc.abstractmethod
  def build(self, run: Run) -> Program:
    """Builds the program to train with."""
