"""Steps from the first gradients to arrive, without waiting for stragglers."""

import argparse
from collections.abc import Sequence

from optax_dist.cli import errors, parser
from optax_dist.cli.train import strategy

# The outcomes of a gradient: label and color.
_LABELS = {
  "accepted": ("accepted", "#2563a8"),
  "stale": ("dropped: stale", "#c2571a"),
  "nonfinite": ("dropped: not finite", "#7b2d8b"),
  "absent": ("computing", "#cbd2d9"),
}


class SyncReplicas(strategy.Strategy):
  """Training with :func:`optax_dist.sync_replicas`, with simulated stragglers.

  A step of the command is a tick: the replicas that arrive submit a gradient. A
  replica that does not arrive continues to compute on the parameters of its
  last token, and submits their gradient when it arrives.
  """

  summary = "k of N fresh gradients make an update; late ones are dropped"

  def add_arguments(self, group):
    group.add_argument(
      "--replicas-to-aggregate",
      metavar="K",
      type=parser.whole_number(1),
      help="gradients in an update; more than there are replicas take"
      " several steps of the command for each (default: one of each replica)",
    )
    group.add_argument(
      "--straggler",
      metavar="REPLICA:P",
      type=_straggler,
      action="append",
      default=[],
      help="this replica, counted from 0, arrives with probability P at each"
      " step; may be given several times (default: all arrive)",
    )
    parser.add_number(
      group,
      "--max-staleness",
      "N",
      parser.whole_number(0),
      default=0,
      help="largest staleness of a gradient, in updates",
    )
    group.add_argument(
      "--staleness-weight",
      choices=["one", "inverse"],
      default="one",
      help="the weight of a stale gradient: equal to others, or 1 divided by its"
      " staleness (default: %(default)s)",
    )
    group.add_argument(
      "--variable-averages",
      metavar="DECAY",
      type=_decay,
      help="keep moving averages of the parameters, and evaluate those",
    )

  def check(self, args):
    if args.staleness_weight != "one" and not args.max_staleness:
      raise errors.CommandError(
        f"--staleness-weight {args.staleness_weight} needs --max-staleness:"
        " without it, what is late is dropped"
      )
    replicas = [replica for replica, _ in args.straggler]
    twice = [i for i in replicas if replicas.count(i) > 1]
    if twice:
      raise errors.CommandError(f"--straggler {twice[0]} is given twice")
    if args.replicas is not None:
      _arrival(args.straggler, args.replicas)

  def build(self, run):
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    import optax_dist

    axis, size, args = run.axis_name, run.mesh.size, run.args
    arrival = _arrival(args.straggler, size)
    inverse = args.staleness_weight == "inverse"
    optimizer = optax.chain(
      optax.clip_by_global_norm(1.0),  # Each replica's own gradient.
      optax_dist.sync_replicas(
        run.optimizer,
        axis,
        replicas_to_aggregate=args.replicas_to_aggregate or size,
        total_num_replicas=size,
        max_staleness=args.max_staleness,
        staleness_weight="inverse" if inverse else None,
        variable_averages=args.variable_averages,
      ),
    )

    def start(params):
      # For each replica, the parameters that it took with its last token.
      taken = jax.tree.map(lambda x: jnp.stack([x] * size), params)
      tick = jnp.zeros([], jnp.int32)
      return params, optax_dist.PerReplica(taken), optimizer.init(params), tick

    def init(params):
      specs = optax_dist.state_specs(jax.eval_shape(start, params), axis)
      shardings = jax.tree.map(
        lambda spec: NamedSharding(run.mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
      )
      return jax.jit(start, out_shardings=shardings)(params)

    def replica_step(state, batch):
      params, taken, optimizer_state, tick = state
      mine = jax.tree.map(lambda x: x[0], taken.value)
      key = jax.random.fold_in(jax.random.key(args.seed), tick)
      drawn = jax.random.uniform(key, (size,)) < jnp.asarray(arrival)
      arrived = drawn[jax.lax.axis_index(axis)]
      loss, gradients = jax.value_and_grad(run.loss_fn)(mine, batch)
      updates, optimizer_state = optimizer.update(
        gradients, optimizer_state, params, arrived=arrived
      )
      params = optax.apply_updates(params, updates)
      mine = jax.tree.map(
        lambda new, old: jnp.where(arrived, new, old), params, mine
      )
      metrics = {"loss": jax.lax.pmean(loss, axis)}
      metrics |= _ledger(optimizer_state, axis, size)
      taken = optax_dist.PerReplica(jax.tree.map(lambda x: x[None], mine))
      return (params, taken, optimizer_state, tick + 1), metrics

    def eval_params(state):
      params, _, optimizer_state, _ = state
      if args.variable_averages is None:
        return params
      return optax_dist.averaged_params(optimizer_state, params)

    def step(state, batch):
      specs = optax_dist.state_specs(state, axis)
      return jax.shard_map(
        replica_step,
        mesh=run.mesh,
        in_specs=(specs, PartitionSpec(axis)),
        out_specs=(specs, PartitionSpec()),
      )(state, batch)

    return strategy.Program(
      init=init,
      step=jax.jit(step, donate_argnums=0),
      eval_params=eval_params,
      summary=lambda records: _summary(records[-1], size),
      panels=[lambda axes, records: _draw_ledger(axes, records[-1], size)],
    )


def _straggler(text: str) -> tuple[int, float]:
  """An argument type: a replica and its probability to arrive."""
  replica, _, probability = text.partition(":")
  try:
    parsed = int(replica), float(probability)
  except ValueError:
    parsed = -1, 0.0
  if parsed[0] < 0 or not 0 <= parsed[1] <= 1:
    raise argparse.ArgumentTypeError(
      "must be a replica, a colon and a probability from 0 to 1, such as 2:0.5,"
      f" got {text!r}"
    )
  return parsed


def _decay(text: str) -> float:
  """An argument type: the decay of a moving average."""
  try:
    value = float(text)
  except ValueError:
    value = -1.0
  if not 0 <= value <= 1:
    raise argparse.ArgumentTypeError(
      f"must be a decay from 0 to 1, got {text!r}"
    )
  return value


def _arrival(
  stragglers: Sequence[tuple[int, float]], replicas: int
) -> list[float]:
  """Returns each replica's probability to arrive."""
  arrival = [1.0] * replicas
  for replica, probability in stragglers:
    if replica >= replicas:
      raise errors.CommandError(
        f"--straggler {replica}:{probability:g}: there are {replicas} replicas,"
        f" numbered 0 to {replicas - 1}"
      )
    arrival[replica] = probability
  if not any(arrival):
    raise errors.CommandError("--straggler: no replica would ever arrive")
  return arrival


def _ledger(optimizer_state, axis: str, size: int) -> dict:
  """The counts of all replicas as scalar metrics."""
  import jax
  import jax.numpy as jnp
  import optax

  own = optax.tree.get(optimizer_state, "replica").value
  counts = [
    own.accepted,
    own.dropped_stale,
    own.dropped_nonfinite,
    own.absent,
  ]
  # Each replica fills its column; the sum is known to be equal on all.
  mine = jnp.arange(size) == jax.lax.axis_index(axis)
  table = jax.lax.psum(
    jnp.where(mine[None], jnp.concatenate(counts)[:, None], 0), axis
  )
  metrics = {"global_step": optax.tree.get(optimizer_state, "global_step")}
  for row, kind in zip(table, _LABELS, strict=True):
    metrics |= {f"{kind}_{i}": row[i] for i in range(size)}
  return metrics


def _counts(record: strategy.Record, size: int) -> dict[str, list[int]]:
  return {
    kind: [record[f"{kind}_{i}"] for i in range(size)] for kind in _LABELS
  }


def _summary(last: strategy.Record, size: int) -> list[str]:
  lines = [
    f"{last['global_step']:,} updates in {last['step']:,} steps; gradients of"
    " each replica:",
    "replica  " + "  ".join(label for label, _ in _LABELS.values()),
  ]
  rows = zip(*_counts(last, size).values(), strict=True)
  for replica, row in enumerate(rows):
    cells = "  ".join(
      f"{count:>{len(label)},}"
      for count, (label, _) in zip(row, _LABELS.values(), strict=True)
    )
    lines.append(f"{replica:>7}  {cells}")
  return lines


def _draw_ledger(axes, last: strategy.Record, size: int) -> None:
  import matplotlib.ticker

  replicas = range(size)
  start = [0] * size
  for kind, counts in _counts(last, size).items():
    label, color = _LABELS[kind]
    if any(counts):
      axes.barh(replicas, counts, left=start, color=color, label=label)
    start = [a + b for a, b in zip(start, counts, strict=True)]
  axes.set_title("What became of each replica's gradients", pad=36)
  axes.set_xlabel("steps of the command")
  axes.set_ylabel("replica")
  axes.set_ylim(size - 0.4, -0.6)
  axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
  axes.grid(axis="y", visible=False)
  axes.legend(
    loc="lower left",
    bbox_to_anchor=(-0.02, 0.99),
    ncols=4,
    fontsize=11,
    handlelength=0.8,
    columnspacing=1.0,
  )


STRATEGY = SyncReplicas()
