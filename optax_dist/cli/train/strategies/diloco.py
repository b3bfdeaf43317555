"""Replicas that train locally; an outer optimizer applies their mean change."""

from optax_dist.cli import errors, parser
from optax_dist.cli.train import own_replicas, strategy


def add_outer(group):
  """Adds the flags of the outer optimizer."""
  parser.add_number(
    group,
    "--outer-learning-rate",
    "RATE",
    parser.positive_float,
    default=0.7,
    help="learning rate of the outer optimizer",
  )
  parser.add_number(
    group,
    "--outer-momentum",
    "DECAY",
    parser.non_negative_float,
    default=0.9,
    help="Nesterov momentum of the outer optimizer, below 1",
  )


def check_outer(args):
  """Raises an error if the outer optimizer's flags are out of range."""
  if args.outer_momentum >= 1:
    raise errors.CommandError(
      f"--outer-momentum must be below 1, got {args.outer_momentum:g}"
    )


class Diloco(strategy.Strategy):
  """DiLoCo with :func:`optax_dist.diloco`."""

  summary = "replicas train alone; an outer optimizer applies their mean change"

  def add_arguments(self, group):
    own_replicas.add_period(group, 20, "steps from round to round")
    add_outer(group)

  def check(self, args):
    check_outer(args)

  def build(self, run):
    import optax_dist

    return own_replicas.build(
      run,
      optax_dist.diloco,
      outer_learning_rate=run.args.outer_learning_rate,
      outer_momentum=run.args.outer_momentum,
    )


STRATEGY = Diloco()
