"""Learners with their own clocks, in processes, which merge fragments."""

from optax_dist.cli import errors, parser
from optax_dist.cli.train import own_replicas, strategy
from optax_dist.cli.train.strategies import diloco


class DecoupledDiloco(strategy.Strategy):
  """Decoupled DiLoCo with :func:`optax_dist.coordinator.decoupled_diloco`."""

  summary = "learners never wait for each other; needs --launch processes"

  def add_arguments(self, group):
    own_replicas.add_period(group, 20, "own steps to give every fragment once")
    group.add_argument(
      "--replicas-to-aggregate",
      metavar="K",
      type=parser.whole_number(1),
      help="the quorum: smallest number of contributions to merge (default: half"
      " of the replicas)",
    )
    parser.add_number(
      group,
      "--fragments",
      "N",
      parser.whole_number(1),
      default=2,
      help="parts of the parameters that take turns",
    )
    parser.add_number(
      group,
      "--alpha",
      "PART",
      parser.non_negative_float,
      default=0.25,
      help="weight of a learner's own parameters in the mixing, below 1",
    )
    diloco.add_outer(group)

  def check(self, args):
    if args.launch is None:
      raise errors.CommandError(
        "--strategy decoupled-diloco needs --launch processes: its learners are"
        " no one program; --strategy diloco is"
      )
    diloco.check_outer(args)
    if args.alpha >= 1:
      raise errors.CommandError(f"--alpha must be below 1, got {args.alpha:g}")
    if args.communication_period < args.fragments:
      raise errors.CommandError(
        f"--communication-period must be at least --fragments {args.fragments},"
        f" got {args.communication_period}"
      )

  def build(self, run):
    raise errors.CommandError("decoupled-diloco needs --launch processes")


STRATEGY = DecoupledDiloco()
