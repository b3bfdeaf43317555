"""How test processes compile kernels, and those whose numbers they repeat."""

import os

import jax
import jaxlib

_FLAGS = "--xla_cpu_use_fusion_emitters=false"
_chosen = {}


def quickly():
  """Has this process use the older of XLA's two emitters for CPU kernels.

  It takes two thirds of the time, and compiling takes most of that of the tests.
  Programs that tests start run as users run them, and so does all of this with
  ``XLA_FLAGS=`` before the command, or with jaxlib 0.11, which has one emitter.
  """
  if "XLA_FLAGS" in os.environ or jaxlib.version.__version_info__ >= (0, 11):
    return
  os.environ["XLA_FLAGS"] = _FLAGS
  try:
    jax.jit(lambda: 0)()  # From here on XLA knows them.
  finally:
    del os.environ["XLA_FLAGS"]
  _chosen["XLA_FLAGS"] = _FLAGS


def as_here():
  """The environment of programs that must have the bits that this one has."""
  return dict(_chosen)
