"""Flags to report metrics while a command runs."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from optax_dist.cli import errors, parser

if TYPE_CHECKING:  # Slow to import: see optax_dist.cli.
  from optax_dist.coordinator.metrics.reporter import Reporter


def add_arguments(
  to: argparse._ArgumentGroup | argparse.ArgumentParser,
) -> None:
  """Adds ``--metrics-port``, ``--metrics-bind`` and ``--tensorboard``."""
  to.add_argument(
    "--metrics-port",
    metavar="PORT",
    type=parser.whole_number(0, 65535),
    help="serve metrics for Prometheus on this port while it runs; 0 for any"
    " free one",
  )
  to.add_argument(
    "--metrics-bind",
    metavar="ADDRESS",
    default="127.0.0.1",
    help="address of that port; beyond loopback everyone can read the metrics"
    " (default: %(default)s)",
  )
  to.add_argument(
    "--tensorboard",
    metavar="DIR",
    type=pathlib.Path,
    help="folder to write TensorBoard event files to",
  )


def wanted(args: argparse.Namespace) -> bool:
  """Whether one of the flags was given."""
  return args.metrics_port is not None or args.tensorboard is not None


@contextlib.contextmanager
def reporting(
  args: argparse.Namespace, follow: pathlib.Path | None
) -> Iterator[Reporter | None]:
  """Reports metrics inside the context, and prints where.

  Args:
    args: the parsed arguments.
    follow: the journal of the run, if there is one.

  Yields:
    The reporter; None if no metrics were requested.

  Raises:
    errors.CommandError: a package is missing, or port or folder can't be used.
  """
  if not wanted(args):
    yield None
    return
  from optax_dist.coordinator.metrics import reporter  # Slow.

  try:
    made = reporter.Reporter(
      port=args.metrics_port,
      bind=args.metrics_bind,
      folder=args.tensorboard,
      follow=follow,
    )
  except ModuleNotFoundError as error:
    raise errors.CommandError(str(error)) from error
  except OSError as error:
    what = "--metrics-port" if error.filename is None else "--tensorboard"
    raise errors.CommandError(f"{what}: {error.strerror}") from error
  if made.url:
    parser.say(f"metrics at {made.url}")
  try:
    yield made
  finally:
    made.close()
