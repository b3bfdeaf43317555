"""Replicas on the 8 devices that tests have."""

import pytest

from optax_dist.cli import devices, errors


@pytest.mark.parametrize(
  ("replicas", "batch_size", "size"),
  [(None, 64, 8), (None, 20, 5), (None, 7, 7), (None, 1, 1), (2, 64, 2)],
)
def test_replicas_are_as_asked_or_as_many_as_divide_the_batch(
  replicas, batch_size, size
):
  mesh = devices.replica_mesh(replicas, batch_size, "data")
  assert dict(mesh.shape) == {"data": size}


def test_more_replicas_than_devices_are_refused():
  with pytest.raises(errors.CommandError, match="more than the 8 cpu") as info:
    devices.replica_mesh(16, 64, "data")
  assert info.value.exit_code == 2
