"""The devices that replicas train on: virtual ones of the CPU, or real ones."""

from typing import Any

import jax
import numpy as np

from optax_dist.cli import errors

VIRTUAL_DEVICES = 8
_UNSET = -1


def replica_mesh(
  replicas: int | None, batch_size: int, axis_name: str
) -> jax.sharding.Mesh:
  """Creates a mesh with one device per replica, and initializes JAX's backend.

  On a CPU it creates as many virtual devices as requested, if JAX's backend is
  not initialized yet.

  Args:
    replicas: number of replicas. None for the number of devices (on a CPU: 8),
      or the next smaller one that divides the batch.
    batch_size: images per step, over all replicas.
    axis_name: the name of the mesh's only axis.

  Returns:
    The mesh.

  Raises:
    errors.CommandError: if there are not enough devices, or no backend.
  """
  config: Any = jax.config  # Its flags are missing in its type.
  if config.jax_num_cpu_devices == _UNSET:
    try:
      wanted = replicas or VIRTUAL_DEVICES
      jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
      pass  # The backend is initialized: its devices can't be changed.
  try:
    devices = jax.devices()
  except (RuntimeError, AssertionError) as error:  # JAX raises either.
    raise errors.CommandError(
      f"JAX has no devices here: {str(error) or 'no such platform'} (JAX_PLATFORMS is"
      f" {config.jax_platforms or 'not set'})"
    ) from error
  platform = devices[0].platform
  if replicas is None:
    at_most = min(len(devices), batch_size)
    replicas = max(n for n in range(1, at_most + 1) if batch_size % n == 0)
  elif replicas > len(devices):
    hint = "" if platform == "cpu" else ", or set JAX_PLATFORMS=cpu"
    raise errors.CommandError(
      f"--replicas {replicas} is more than the {len(devices)} {platform}"
      f" device(s) there are; give at most {len(devices)}{hint}"
    )
  return jax.sharding.Mesh(np.asarray(devices[:replicas]), (axis_name,))
