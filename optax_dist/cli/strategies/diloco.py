"""Replicas that train alone; a second optimizer applies their mean change."""

from optax_dist.cli import errors, own_replicas, parser, strategy


class Diloco(strategy.Strategy):
  """DiLoCo with :func:`optax_dist.diloco`."""

  summary = "replicas train alone; an outer optimizer applies their mean change"

  def add_arguments(self, group):
    own_replicas.add_period(group, 20, "steps from round to round")
    group.add_argument(
      "--outer-learning-rate",
      metavar="RATE",
      type=parser.positive_float,
      default=0.7,
      help="of the outer optimizer (default: %(default)g)",
    )
    group.add_argument(
      "--outer-momentum",
      metavar="DECAY",
      type=parser.non_negative_float,
      default=0.9,
      help="Nesterov momentum of the outer optimizer, below 1 (default:"
      " %(default)g)",
    )

  def check(self, args):
    if args.outer_momentum >= 1:
      raise errors.CommandError(
        f"--outer-momentum must be below 1, got {args.outer_momentum:g}"
      )

  def build(self, run):
    import optax_dist

    return own_replicas.build(
      run,
      optax_dist.diloco(
        run.optimizer,
        run.axis_name,
        num_workers=run.mesh.size,
        communication_period=run.args.communication_period,
        outer_learning_rate=run.args.outer_learning_rate,
        outer_momentum=run.args.outer_momentum,
      ),
    )


STRATEGY = Diloco()
