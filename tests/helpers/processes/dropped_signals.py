"""Signals whose exception Python drops, as in JAX's garbage collector callback."""

import os
import sys


def come(number, monkeypatch):
  """Sends this process a signal; what its handler raises is lost."""
  dropped = []

  class Finalized:
    def __del__(self):
      os.kill(os.getpid(), number)

  with monkeypatch.context() as patch:
    patch.setattr(sys, "unraisablehook", dropped.append)
    Finalized()
  assert [x.exc_type for x in dropped] in ([KeyboardInterrupt], [SystemExit])
