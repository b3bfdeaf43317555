"""Replicas with their own parameters, elastically tied to a center."""

from optax_dist.cli import parser
from optax_dist.cli.train import own_replicas, strategy


class ElasticAverage(strategy.Strategy):
  """EASGD with :func:`optax_dist.elastic_average`."""

  summary = "replicas explore, and are pulled to a shared center now and then"

  def add_arguments(self, group):
    own_replicas.add_period(group, 10, "steps from exchange to exchange")
    group.add_argument(
      "--moving-rate",
      metavar="RATE",
      type=parser.positive_float,
      help="fraction of its distance from the center that a replica moves in an"
      " exchange (default: 0.9 / replicas)",
    )
    parser.add_number(
      group,
      "--rho",
      "STRENGTH",
      parser.non_negative_float,
      default=0.0,
      help="pull towards the center between exchanges; TensorFlow's default is"
      " the moving rate / the learning rate",
    )

  def build(self, run):
    import optax_dist

    rate = run.args.moving_rate
    return own_replicas.build(
      run,
      optax_dist.elastic_average,
      moving_rate=0.9 / run.mesh.size if rate is None else rate,
      rho=run.args.rho,
    )


STRATEGY = ElasticAverage()
