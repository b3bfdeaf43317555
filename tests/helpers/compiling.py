"""How test processes compile kernels, and those whose numbers they repeat."""

import os

import jax
import jaxlib

# Kernels are small here: making them takes far longer than running them.
_FLAGS = [
  "--xla_backend_optimization_level=0",
  "--xla_llvm_disable_expensive_passes=true",
  "--xla_cpu_parallel_codegen_split_count=1",
]
# jaxlib 0.11 has one emitter of kernels; of the two of 0.10 the older is quicker.
if jaxlib.version.__version_info__ < (0, 11):
  _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
# For programs that compute for longer than they take to compile.
OPTIMIZED = {
  "xla_backend_optimization_level": 3,
  "xla_llvm_disable_expensive_passes": False,
}
_chosen = {}


def quickly():
  """Has this process compile CPU kernels quickly, and hardly optimize them.

  Compiling takes most of the time of the tests. Programs that tests start run as
  users run them, but for those that are given `as_here`; and so does all of this
  with ``XLA_FLAGS=`` before the command.
  """
  if "XLA_FLAGS" in os.environ:
    return
  flags = " ".join(_FLAGS)
  os.environ["XLA_FLAGS"] = flags
  try:
    jax.jit(lambda: 0)()  # From here on XLA knows them.
  finally:
    del os.environ["XLA_FLAGS"]
  _chosen["XLA_FLAGS"] = flags


def as_here():
  """The environment of programs that compile as this one does, to the same bits."""
  return dict(_chosen)
