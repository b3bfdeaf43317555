"""A full disk, for this process and its children."""

import contextlib
import os
import resource
import sys
from unittest import mock


@contextlib.contextmanager
def files_end_at(size):
  """No file can become longer than so many bytes.

  Python writes no bytecode meanwhile: it would keep what is cut off.
  """
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  with (
    mock.patch.object(sys, "dont_write_bytecode", True),
    mock.patch.dict(os.environ, PYTHONDONTWRITEBYTECODE="1"),
  ):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
      yield
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
