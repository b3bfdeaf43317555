"""All replicas' gradients, averaged at every step."""

from optax_dist.cli.train import strategy


class CrossShard(strategy.Strategy):
  """Data parallelism with :func:`optax_dist.cross_shard`."""

  summary = "every step applies the mean of all replicas' gradients"

  def add_arguments(self, group):
    group.add_argument(
      "--reduction",
      choices=["mean", "sum"],
      default="mean",
      help="how the replicas' gradients are aggregated (default: %(default)s)",
    )

  def build(self, run):
    import jax
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    import optax_dist

    axis = run.axis_name
    optimizer = optax.chain(
      optax.clip_by_global_norm(1.0),  # Each replica's own gradient.
      optax_dist.cross_shard(axis, reduction=run.args.reduction),
      run.optimizer,
    )

    def init(params):
      return params, optimizer.init(params)

    def replica_step(state, batch):
      params, optimizer_state = state
      loss, gradients = jax.value_and_grad(run.loss_fn)(
        optax_dist.local_params(params, axis), batch
      )
      updates, optimizer_state = optimizer.update(
        gradients, optimizer_state, params
      )
      params = optax.apply_updates(params, updates)
      return (params, optimizer_state), {"loss": jax.lax.pmean(loss, axis)}

    everywhere = PartitionSpec()
    step = jax.shard_map(
      replica_step,
      mesh=run.mesh,
      in_specs=(everywhere, PartitionSpec(axis)),
      out_specs=everywhere,
    )
    return strategy.Program(
      init=jax.jit(init, out_shardings=NamedSharding(run.mesh, everywhere)),
      step=jax.jit(step, donate_argnums=0),
      eval_params=lambda state: state[0],
    )


STRATEGY = CrossShard()
