"""Programs of the strategies of ``train``, to be stepped by hand."""

import argparse

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from optax_dist.cli import parser
from optax_dist.cli.train import strategies, strategy

AXIS = "data"


def parse(name, *flags, **given):
  """The command's arguments: a strategy's own flags, and others as given."""
  command = parser.Parser(prog="train")
  strategies.load(name).add_arguments(command.add_argument_group(name))
  return command.parse_args(flags, argparse.Namespace(strategy=name, **given))


def build(name, args, *, replicas, loss_fn, steps, optimizer=None):
  """Builds a strategy's program, around gradient descent with rate 0.1.

  Args:
    name: of the strategy.
    args: the command's arguments that the strategy reads: a dictionary, or what
      `parse` returns.
    replicas: how many there are, one on each device.
    loss_fn: of parameters and a batch.
    steps: of the run.
    optimizer: another one than gradient descent.

  Returns:
    The program, and how batches lie on the devices.
  """
  mesh = jax.make_mesh(
    (replicas,),
    (AXIS,),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:replicas],
  )
  if isinstance(args, dict):
    args = argparse.Namespace(**args)
  program = strategies.load(name).build(
    strategy.Run(
      args=args,
      mesh=mesh,
      axis_name=AXIS,
      loss_fn=loss_fn,
      optimizer=optimizer or optax.sgd(0.1),
      steps=steps,
    )
  )
  return program, NamedSharding(mesh, PartitionSpec(AXIS))
