"""The interface of a strategy of ``optax-dist train``."""

from __future__ import annotations

import abc
import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # Slow to import: see optax_dist.cli.
  import jax
  import matplotlib.axes
  import optax

  from optax_dist.cli.train import digits

Record = dict[str, Any]
"""One line of ``metrics.jsonl``."""


@dataclasses.dataclass(frozen=True)
class Run:
  """The settings from which a strategy builds its program.

  Attributes:
    args: the parsed arguments, including the strategy's own.
    mesh: the replicas' devices, along one axis.
    axis_name: name of that axis.
    loss_fn: function of parameters and a batch of any size; returns the mean
      loss over the batch's images, a float32 scalar.
    optimizer: turns gradients into updates; independent of replicas.
    steps: the number of training steps.
  """

  args: argparse.Namespace
  mesh: jax.sharding.Mesh
  axis_name: str
  loss_fn: Callable[[optax.Params, digits.Batch], jax.Array]
  optimizer: optax.GradientTransformation
  steps: int


@dataclasses.dataclass(frozen=True)
class Program:
  """A strategy's training program. The state may be any pytree of arrays.

  Attributes:
    init: function of the parameters; returns the state, sharded over the mesh
      as by ``step``.
    step: function of the state and a batch (whose leading axis is sharded over
      the mesh's); returns the next state and metrics: a mapping of scalars that
      includes ``"loss"``. It is wrapped in ``jax.jit``, compiled once, before
      the first step, and may donate the state.
    eval_params: function of the state; returns the parameters to evaluate,
      without a replica axis: the replicas' common ones, or the center.
    replica_params: function of the state; returns every replica's parameters,
      with a leading replica axis, if replicas have their own: each is evaluated
      too.
    summary: function of all records; returns lines to print at the end.
    panels: functions that each draw one more panel of the report, from all
      records.
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
  """A way to train a model on several replicas.

  A strategy is one file in :mod:`optax_dist.cli.train.strategies`, named after
  it, with an instance of a subclass as its ``STRATEGY``.

  Attributes:
    summary: one line of help.
  """

  summary: ClassVar[str]

  def add_arguments(self, group: argparse._ArgumentGroup) -> None:  # noqa: B027
    """Adds the flags that only this strategy has."""

  def check(self, args: argparse.Namespace) -> None:  # noqa: B027
    """Raises :class:`errors.CommandError` if the arguments are inconsistent.

    Called before anything slow. ``args.replicas`` is None if it was not given.
    """

  @abc.abstractmethod
  def build(self, run: Run) -> Program:
    """Builds the program to train with."""
