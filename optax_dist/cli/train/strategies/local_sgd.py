"""Replicas that train locally for some steps, then continue from their mean."""

from optax_dist.cli.train import own_replicas, strategy


class LocalSgd(strategy.Strategy):
  """Periodic averaging of parameters with :func:`optax_dist.local_sgd`."""

  summary = "replicas train alone and average their parameters now and then"

  def add_arguments(self, group):
    own_replicas.add_period(group, 10, "steps from average to average")
    group.add_argument(
      "--inner-state",
      choices=["local", "averaged"],
      default="local",
      help="what happens to the optimizer's state when parameters are averaged"
      " (default: %(default)s)",
    )

  def build(self, run):
    import optax_dist

    return own_replicas.build(
      run,
      optax_dist.local_sgd,
      inner_state=run.args.inner_state,
    )


STRATEGY = LocalSgd()
