"""The errors of the coordinator; each names what is missing or wrong."""

from __future__ import annotations


class CoordinatorError(RuntimeError):
  """The run cannot go on for this replica; the message says why.

  Attributes:
    final: whether a process that took its place would fail in the same way.
  """

  final = False


class JoinRefused(CoordinatorError):
  """The job does not admit this replica; the message names the difference."""


class RunFinished(CoordinatorError):
  """The run has ended gracefully, and this replica can't have the final parameters."""


class Diverged(CoordinatorError):
  """Replicas hold different parameters after the same step."""
