"""Compiles for TPU topologies on a machine without a TPU.

Files that import this one are skipped where libtpu, the extra ``[tpu-aot]``, is
not installed.
"""

import collections
import functools
import os
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

pytest.importorskip(
  "libtpu",
  reason="compiling for TPU needs the extra: pip install optax-dist[tpu-aot]",
)
# There is no TPU machine whose metadata could be asked for.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Nor one that two processes could not share, such as these tests run twice.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

AXIS = "data"
_COLLECTIVES = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)


@functools.cache
def mesh(topology: str) -> Mesh:
  """Returns a mesh of all chips of a topology, as "v5e:16x16", along ``AXIS``."""
  description = topologies.get_topology_desc(
    platform="tpu", topology_name=topology
  )
  return Mesh(np.array(description.devices), (AXIS,))


def compile_for(
  topology: str,
  fn: Any,
  args: tuple[Any, ...],
  in_specs: tuple[Any, ...],
  out_specs: Any,
  *,
  check_vma: bool,
  donate_argnums: tuple[int, ...] = (),
) -> jax.stages.Compiled:
  """Compiles ``shard_map`` of ``fn`` over all chips of a topology.

  Args:
    topology: a name as "v5e:16x16".
    fn: a function of one replica's values.
    args: per argument a pytree of ``jax.ShapeDtypeStruct``, of global shapes.
    in_specs: per argument one partition spec for all of its leaves.
    out_specs: the partition specs of the results.
    check_vma: whether the types say what varies over the axis.
    donate_argnums: the arguments that the results may overwrite.

  Returns:
    The compiled program, for ``as_text()`` and ``memory_analysis()``.
  """
  over = mesh(topology)
  mapped = jax.shard_map(
    fn, mesh=over, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
  )
  placed = [
    jax.tree.map(
      lambda x, spec=spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(over, spec)
      ),
      arg,
    )
    for arg, spec in zip(args, in_specs, strict=True)
  ]
  run = jax.jit(mapped, donate_argnums=donate_argnums)
  return run.lower(*placed).compile()


def count_ops(text: str) -> collections.Counter[str]:
  """Counts the operations in a compiled program's text, by name.

  The halves of an asynchronous one count as one, under the plain name.
  """
  # An operation is "%name = type op(operands)"; a tuple's type has spaces, and a
  # layout such as {1,0:T(8,128)} has parentheses, but after no lower-case name.
  names = re.findall(r"^.*? = .*? ([a-z][a-z0-9-]*)\(", text, re.MULTILINE)
  return collections.Counter(
    name.removesuffix("-start") for name in names if not name.endswith("-done")
  )


def count_collectives(text: str) -> dict[str, int]:
  """Returns how many collectives of each kind are in the text, if any."""
  ops = count_ops(text)
  return {name: ops[name] for name in _COLLECTIVES if ops[name]}


def temporaries(compiled: jax.stages.Compiled) -> int:
  """Returns the bytes of device memory for neither arguments nor results."""
  return compiled.memory_analysis().temp_size_in_bytes
