"""Programs of the strategies of ``train``, to be stepped by hand."""

import argparse

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from optax_dist.cli.train import strategies, strategy

AXIS = "data"


def build(name, args, *, replicas, loss_fn, steps):
  """Builds a strategy's program around gradient descent with rate 0.1.

  Args:
    name: of the strategy.
    args: the command's arguments that the strategy reads, a dictionary.
    replicas: how many there are, one on each device.
    loss_fn: of parameters and a batch.
    steps: of the run.

  Returns:
    The program, and how batches lie on the devices.
  """
  mesh = jax.make_mesh(
    (replicas,),
    (AXIS,),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:replicas],
  )
  program = strategies.load(name).build(
    strategy.Run(
      args=argparse.Namespace(**args),
      mesh=mesh,
      axis_name=AXIS,
      loss_fn=loss_fn,
      optimizer=optax.sgd(0.1),
      steps=steps,
    )
  )
  return program, NamedSharding(mesh, PartitionSpec(AXIS))
