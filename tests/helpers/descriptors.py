"""Descriptors that `select.select` refuses, as processes of large jobs get."""

import contextlib
import fcntl
import os
import resource

import pytest

_FIRST = 1024  # The first one that it refuses.


@contextlib.contextmanager
def high(file):
  """A copy of a descriptor with a number beyond those of `select.select`."""
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
