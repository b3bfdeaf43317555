"""Descriptors of this process: which are open, and some with high numbers."""

import contextlib
import fcntl
import os
import resource

import pytest

_FIRST = 1024  # The first one that it refuses.


def of_files(text):
  """The open descriptors of files whose name has a text, and these names.

  Those of other tests may be closed or opened meanwhile, by their threads or by
  the garbage collector, so a number of all descriptors says little.
  """
  result = set()
  for number in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError):
      name = os.readlink(f"/proc/self/fd/{number}")
      if text in name:
        result.add((int(number), name))
  return result


@contextlib.contextmanager
def high(file):
  """A copy of a descriptor that `select.select` refuses, as large jobs get."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = _FIRST + 100
  if hard != resource.RLIM_INFINITY and hard < wanted:
    pytest.skip(f"needs {wanted} descriptors")
  resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
  try:
    copy = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    try:
      yield copy
    finally:
      os.close(copy)
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
