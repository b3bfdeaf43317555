"""Strategies whose replicas have their own parameters, around a center."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from optax_dist.cli import parser
from optax_dist.cli.train import strategy

if TYPE_CHECKING:  # Slow to import: see optax_dist.cli.
  import optax


def add_period(group: argparse._ArgumentGroup, default: int, what: str) -> None:
  """Adds ``--communication-period``; ``what`` is the unit in its help text."""
  parser.add_number(
    group,
    "--communication-period",
    "STEPS",
    parser.whole_number(1),
    default=default,
    help=what,
  )


def build(
  run: strategy.Run,
  make: Callable[..., optax.GradientTransformationExtraArgs],
  **options: Any,
) -> strategy.Program:
  """Builds the program of a transform whose state has a center.

  Each step's metrics are ``loss``, the mean over the replicas; ``spread``, the
  root mean square distance of a replica's parameters from the replicas' mean,
  relative to the size of that mean; and ``exchanges``, the number so far.
  Measuring the spread takes communication at every step, in addition to the
  transform's.

  Args:
    run: the settings to build from, with the arguments of :func:`add_period`.
    make: a function such as :func:`optax_dist.local_sgd`, whose transform has a
      state that :func:`optax_dist.center_params` reads.
    **options: further arguments of it.

  Returns:
    The program, which evaluates the center and each replica.
  """
  import jax
  import jax.numpy as jnp
  import optax
  from jax.sharding import NamedSharding, PartitionSpec

  import optax_dist

  axis, mesh = run.axis_name, run.mesh
  transform = make(
    run.optimizer,
    axis,
    num_replicas=mesh.size,
    communication_period=run.args.communication_period,
    **options,
  )

  def start(params):
    own = jax.tree.map(lambda x: jnp.stack([x] * mesh.size), params)
    return own, transform.init(params)

  def specs(params):
    own, state = jax.eval_shape(start, params)
    return (
      jax.tree.map(lambda _: PartitionSpec(axis), own),
      optax_dist.state_specs(state, axis),
    )

  def init(params):
    shardings = jax.tree.map(
      lambda spec: NamedSharding(mesh, spec),
      specs(params),
      is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    return jax.tree.map(
      lambda x, sharding: jax.device_put(x, sharding), start(params), shardings
    )

  def replica_step(state, batch):
    own, transform_state = state
    params = jax.tree.map(lambda x: x[0], own)
    loss, gradients = jax.value_and_grad(run.loss_fn)(params, batch)
    updates, transform_state = transform.update(
      gradients, transform_state, params
    )
    params = optax.apply_updates(params, updates)
    mean = jax.lax.pmean(params, axis)
    apart = jax.lax.pmean(
      _square(jax.tree.map(jnp.subtract, params, mean)), axis
    )
    metrics = {
      "loss": jax.lax.pmean(loss, axis),
      "spread": jnp.sqrt(apart / _square(mean)),
      "exchanges": optax.tree.get(transform_state, "global_step"),
    }
    own = jax.tree.map(lambda x: x[None], params)
    return (own, transform_state), metrics

  def _square(tree):
    return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree))

  def step(state, batch):
    state_specs = specs(center_of(state))
    return jax.shard_map(
      replica_step,
      mesh=mesh,
      in_specs=(state_specs, PartitionSpec(axis)),
      out_specs=(state_specs, PartitionSpec()),
    )(state, batch)

  def center_of(state):
    return optax_dist.center_params(state[1])

  payload: list[int] = []

  def init_and_weigh(params):
    payload[:] = [sum(x.nbytes for x in jax.tree.leaves(params))]
    return init(params)

  return strategy.Program(
    init=init_and_weigh,
    step=jax.jit(step, donate_argnums=0),
    eval_params=center_of,
    replica_params=lambda state: state[0],
    summary=lambda records: _summary(records, payload[0]),
    panels=(_draw_replicas,),
  )


def _summary(
  records: Sequence[strategy.Record], parameter_bytes: int
) -> list[str]:
  last = records[-1]
  replicas = last["replica_test_accuracy"]
  sent = last["exchanges"] * parameter_bytes
  full = len(records) * parameter_bytes
  return [
    f"center {last['test_accuracy']:.1%}, replicas {min(replicas):.1%} to"
    f" {max(replicas):.1%}; spread of the replicas {last['spread']:.2g} of their"
    " mean's size",
    f"{last['exchanges']} exchanges of {_size(parameter_bytes)}: {_size(sent)} per"
    f" replica, {sent / full:.1%} of the {_size(full)} of averaging at every step",
  ]


def _size(count: int) -> str:
  return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def _draw_replicas(axes, records: Sequence[strategy.Record]) -> None:
  from optax_dist.cli.train import picture

  spread = [100 * record["spread"] for record in records]
  axes.plot(picture.epochs_passed(records), spread, color=picture.SPREAD)
  axes.set_title("Distance of the replicas")
  axes.set_ylabel("from their mean (% of its size)")
  axes.set_ylim(bottom=0)
  picture.label_epochs(axes)
